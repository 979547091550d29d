"""The diff of a function's IR: what counts as a change, how repetition is shown, what is left off."""

from __future__ import annotations

import pytest

from relaxpack.compile.ir_diff import MOST_HUNKS, MOST_LINES, FunctionDiff, diff, function_lines

HEAD = '''# from tvm.script import relax as R
t = TypeVar("t")
@R.function
def decode(x: R.Tensor((t, 8), dtype="float32"), w: R.Tensor((8,), dtype="float32")) -> R.Tensor((t, 8), dtype="float32"):
    R.func_attr({"num_input": 1})
    with R.dataflow():
'''


def function(*lines: str) -> str:
    return HEAD + "".join(f"        {line}\n" for line in lines) + "        R.output(y)\n    return y\n"


def changed(before: str, after: str) -> FunctionDiff:
    return diff(function_lines(before), function_lines(after))


def test_a_function_is_its_parameters_and_bindings() -> None:
    lines = function_lines(function("y = R.add(x, w)"))
    assert [line.text for line in lines] == [
        "parameter x: float32[t, 8]", "parameter w: float32[8]", "y = R.add(x, w)", "return y"]
    assert [line.defines for line in lines] == [None, None, "y", None]
    assert lines[2].operands == () and lines[3].operands == ("y",)       # parameters are no local variables


def test_renaming_is_no_change() -> None:
    before = function("a: R.Tensor((t, 8), dtype=\"float32\") = R.exp(x)", "y = R.add(a, w)")
    after = function("lv5: R.Tensor((t, 8), dtype=\"float32\") = R.exp(x)", "y = R.add(lv5, w)")
    assert changed(before, after).hunks == []


def test_another_operand_is_a_change() -> None:
    before = function("a = R.exp(x)", "b = R.sin(x)", "y = R.add(a, w)")
    after = function("a = R.exp(x)", "b = R.sin(x)", "y = R.add(b, w)")
    (hunk,) = changed(before, after).hunks
    assert hunk.lines == ["  b = R.sin(x)", "- y = R.add(a, w)", "+ y = R.add(b, w)", "  return y"]


def test_who_reads_a_replaced_value_by_its_old_name_has_not_changed() -> None:
    before = function("a = R.exp(x)", "b = R.sin(a)", "y = R.add(b, w)")
    after = function("a = R.exp(x)", "c = R.call_tir(sine, (a,))", "b = c", "y = R.add(b, w)")
    found = changed(before, after)
    assert [h.lines for h in found.hunks] == [
        ["  a = R.exp(x)", "- b = R.sin(a)", "+ c = R.call_tir(sine, (a,))", "+ b = c", "  y = R.add(b, w)"]]
    assert (found.removed, found.added) == (1, 2)


def layer(i: int, op: str) -> list[str]:
    return [f"h{i} = R.norm({'x' if i == 0 else f'z{i - 1}'}, layers_{i}_w)", f"g{i} = R.{op}(h{i})", f"z{i} = R.exp(g{i})"]


def test_what_every_layer_has_is_shown_once() -> None:
    before = function(*[line for i in range(12) for line in layer(i, "sin")], "y = R.neg(z11)")
    after = function(*[line for i in range(12) for line in layer(i, "cos")], "y = R.neg(z11)")
    (hunk,) = changed(before, after).hunks
    assert hunk.count == 12
    assert hunk.lines == ["  h0 = R.norm(x, layers_0_w)", "- g0 = R.sin(h0)", "+ g0 = R.cos(h0)", "  z0 = R.exp(g0)"]


def test_blocks_that_repeat_within_a_change_are_shown_once() -> None:
    before = function("y = R.exp(x)")
    after = function(*[line for i in range(12) for line in layer(i, "sin")], "y = R.neg(z11)")
    (hunk,) = changed(before, after).hunks
    assert "+ … and 10 times more, but for names and numbers" in hunk.lines
    assert hunk.lines.count("+ h0 = R.norm(x, layers_0_w)") == 1 and len(hunk.lines) < 14


def test_what_is_left_off_is_counted() -> None:
    letters = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(100)]
    plain = function("y = R.exp(x)")
    (hunk,) = changed(plain, function(*[f"v{n} = R.{n}(x, w)" for n in letters], "y = R.exp(x)")).hunks
    assert hunk.left_off == 100 - MOST_LINES and len(hunk.lines) == MOST_LINES + 2
    before = function(*[line for n in letters for line in (f"{n} = R.op_{n}(x)", f"k{n} = R.keep_{n}(x)")], "y = R.exp(x)")
    found = changed(before, function(*[f"k{n} = R.keep_{n}(x)" for n in letters], "y = R.exp(x)"))
    assert len(found.hunks) == MOST_HUNKS and found.left_off == 100 - MOST_HUNKS and found.removed == 100
    assert found.to_json()["left_off"] == 100 - MOST_HUNKS


@pytest.mark.parametrize("after", [function(), function("a = R.exp(x)", "b = R.sin(x)", "y = R.add(a, b)")])
def test_equal_functions_have_no_diff(after: str) -> None:
    assert changed(after, after) == FunctionDiff()
