"""What TVM says of a library against what the manifest says of the model, without a library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from relaxpack.dist.manifest import TargetEntry
from relaxpack.runtime.library_facts import Declared, LibraryDiffers, check_library, declared
from relaxpack.step_interface import STEP_INPUTS
from relaxpack.target import TargetSpec
from tests.helpers.bundles import INFO

PAGES = (2, None, 2, 2, 16, 16)
CPU = TargetEntry(TargetSpec("cpu", "x86-64-v3"), "lib/x.so", "x", (), ("prefill", "decode"), {"t": 64, "b": 4, "r": 64})
GPU = replace(CPU, target=TargetSpec("cuda", "sm_90a"), functions=tuple(STEP_INPUTS["cuda"]), symbolic_bounds={})
_SIZES = {"pages": "2, p, 2, 2, 16, 16", "page_table": "b, T.int64(8)", "counts": f"c, {100 + 512}", "drawn": "4, 2"}


def facts(entry: TargetEntry, kv_dtype: str = "float32", **inputs: tuple[str, ...]) -> str:
    """As TVM writes them; `inputs`: of functions that take other ones."""
    lines = ["Relax VM executable statistics:\n  Constant pool (# 25): [int32, "]
    for function, names in {**STEP_INPUTS[entry.target.kind], **inputs}.items():
        lines += [f'"ErrorContext(fn={function}, loc=param[{place}], param={name}, annotation=R.Tensor('
                  f'({_SIZES.get(name, "t,")}), dtype="{kv_dtype if name == "pages" else "int32"}")) ", '
                  for place, name in enumerate(names)]
        lines.append(f'"ErrorContext(fn={function}, loc=param[{len(names)}], param=params, annotation=T.Tuple('
                     'R.Tensor((T.int64(16), T.int64(64)), dtype="uint8"), R.Tensor((T.int64(64),), dtype="float32"))) ", ')
        if function == "prefill":
            lines.append('"ErrorContext(fn=prefill, loc=return, annotation=R.Tensor((r, 100), dtype="float32")) ", ')
    return "".join(lines)


def test_what_is_read() -> None:
    found = declared(facts(CPU))
    assert list(found["decode"]) == ["token_ids", "positions", "slots", "lengths", "page_table", "pages", "params"]
    assert found["decode"]["pages"] == Declared(PAGES, "float32") and found["decode"]["page_table"].shape == (None, 8)
    assert found["decode"]["params"] == Declared((), "") and found["prefill"]["result"] == Declared((None, 100), "float32")
    assert declared("") == {}


@pytest.mark.parametrize("entry", [CPU, GPU], ids=["cpu", "cuda"])
def test_a_library_for_the_model_passes(entry: TargetEntry) -> None:
    check_library(facts(entry), entry, INFO, "0.1.0")
    check_library(facts(entry, "uint8"), entry, replace(INFO, kv_dtype="float8_e4m3fn"), "0.1.0")
    check_library("", entry, INFO, "0.1.0")     # of a TVM that says nothing


@pytest.mark.parametrize(("change", "compiled"), [
    ({"kv_dtype": "float16"}, "float32"), ({"kv_dtype": "float8_e4m3fn"}, "float32"), ({"num_layers": 3}, "2"),
    ({"num_kv_heads": 4}, "2"), ({"page_size": 8}, "16"), ({"head_dim": 32}, "16"), ({"vocab_size": 101}, "100"),
    ({"max_context": 129}, "8 pages of 16 tokens")])
def test_a_fact_that_was_changed_is_named(change: dict[str, Any], compiled: str) -> None:
    [(fact, value)] = change.items()
    for entry in (CPU, GPU):
        with pytest.raises(LibraryDiffers, match=f"says {fact} {value}, and the library was compiled for {compiled}: "):
            check_library(facts(entry), entry, replace(INFO, **change), "0.1.0")


def test_fp8_pages_are_named_by_their_dtype() -> None:
    with pytest.raises(LibraryDiffers, match="kv_dtype float32, and the library was compiled for float8_e4m3fn"):
        check_library(facts(CPU, "uint8"), CPU, INFO, "0.1.0")


def test_limits_beyond_the_plan() -> None:
    with pytest.raises(LibraryDiffers, match=r"max_batch 5, and cpu:x86-64-v3 was planned for 4 \(b\)"):
        check_library(facts(CPU), CPU, replace(INFO, max_batch=5), "0.1.0")
    with pytest.raises(LibraryDiffers, match=r"prefill_chunk 65, and cpu:x86-64-v3 was planned for 64 \(t\)"):
        check_library(facts(CPU), CPU, replace(INFO, prefill_chunk=65), "0.1.0")
    with pytest.raises(LibraryDiffers, match="max_batch 2, and the library was compiled for 4"):
        check_library(facts(GPU), GPU, replace(INFO, max_batch=2), "0.1.0")
    check_library(facts(CPU), CPU, replace(INFO, max_batch=2, prefill_chunk=8), "0.1.0")


def test_other_inputs_are_another_step_interface() -> None:
    before = tuple(name for name in STEP_INPUTS["cuda"]["decode"] if name != "drawn")
    with pytest.raises(LibraryDiffers, match=r"cuda:sm_90a was built by relaxpack 0\.0\.9 with another step interface than "
                                             r"the 1 of this one .*inputs of decode differ \(drawn\): build it again with "
                                             r"relaxpack build MODEL --target cuda:sm_90a"):
        check_library(facts(GPU, decode=before), GPU, INFO, "0.0.9")
    with pytest.raises(LibraryDiffers, match="their order"):
        check_library(facts(GPU, sample=STEP_INPUTS["cuda"]["sample"][::-1]), GPU, INFO, "0.0.9")


def test_functions_that_are_not_exported_do_not_count() -> None:
    entry = replace(CPU, functions=("embed",))
    check_library(facts(CPU, decode=("x",)), entry, INFO, "0.1.0")


def test_functions_that_the_library_lacks() -> None:
    """Else the first request would find out, and every one after it."""
    entry = replace(CPU, functions=("decode", "embed", "prefill"))
    check_library(facts(entry), entry, INFO, "0.1.0")
    with pytest.raises(LibraryDiffers, match="says that cpu:x86-64-v3 has embed, and the library has no such function: "):
        check_library(facts(entry).replace("fn=embed,", "fn=other,"), entry, INFO, "0.1.0")
