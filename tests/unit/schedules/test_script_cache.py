"""What TVMScript's parser remembers: a kernel made again is the same one, and values that look alike are not mixed up."""

from __future__ import annotations

from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.schedules.kernels.cuda import script_cache
from tvm.script import tirx as T
from tvm.script.parser.core import doc


def filled(value: Any, twice: bool = False) -> tvm.tirx.PrimFunc:
    """16 numbers, by an inlined function with another one inside, over slices and in a branch of the script."""
    @T.inline
    def body(y):
        @T.inline
        def put(i):
            if twice:
                y[i] = value + value
            else:
                y[i] = value

        for i in T.serial(16):
            put(i)

    @T.prim_func
    def main(out: T.handle):
        y = T.match_buffer(out, (16,), "float32")
        body(y)

    return main


def test_a_kernel_made_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_codes", "_sources"):
        monkeypatch.setattr(script_cache, name, {})
    script_cache._parsed.cache_clear()
    first = filled(T.float32(2))
    known, texts = len(script_cache._codes), script_cache._parsed.cache_info().currsize
    tvm.ir.assert_structural_equal(first, filled(T.float32(2)))
    assert first.script() == filled(T.float32(2)).script() and "2.0" in first.script()
    assert len(script_cache._codes) == known and script_cache._parsed.cache_info().currsize == texts > 0


def test_the_same_text_with_other_values_is_another_kernel() -> None:
    scripts = {filled(T.float32(value), twice).script() for value in (1, 3) for twice in (False, True)}
    assert len(scripts) == 4


def test_full_memory_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_cache, "_MOST_CODES", 3)
    monkeypatch.setattr(script_cache, "_codes", {})
    assert "3.0" in filled(T.float32(3)).script() and 0 < len(script_cache._codes) <= 3


@pytest.mark.parametrize("alike", [("1", "True", "1.0", "'1'", "1j", "b'1'"), ("0.0", "-0.0", "0"), ("x", "'x'", "'x.y'"),
                                   ("f(a)", "f(*a)", "f(a=a)", "f(**a)", "f(a, b)", "f((a, b))"), ("a < b", "a <= b"),
                                   ("x[1]", "x[1,]", "x[1:]", "x[:1]", "x[::1]", "x[(1, 1)]")])
def test_what_looks_alike_is_told_apart(alike: tuple[str, ...]) -> None:
    keys = {script_cache._key(doc.parse(text, mode="eval").body) for text in alike}
    assert len(keys) == len(alike)


def test_the_place_in_a_text_does_not_matter() -> None:
    one, other = (script_cache._key(doc.parse(text, mode="eval")) for text in ("f(x, 2)", "f(x,\n    2)"))
    assert one == other


def test_an_inlined_function_alone_is_refused() -> None:
    @T.inline
    def body(y):
        y[0] = 1.0

    with pytest.raises(RuntimeError, match="outside of a TVMScript function"):
        body(None)


def test_what_is_wrong_in_a_script_is_said_each_time() -> None:
    def broken() -> tvm.tirx.PrimFunc:
        @T.prim_func
        def main(out: T.handle):
            y = T.match_buffer(out, (16,), "float32")
            y[0] = missing

        return main

    for _ in range(2):
        with pytest.raises(Exception, match="missing"):
            broken()
