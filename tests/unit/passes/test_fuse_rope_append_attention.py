"""FuseRopeAppendAttention: decode attention of few rows becomes one kernel where the provider has one; LowerKernels then
asks for that, and the pages stay a chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import AttentionSpec, Kernel
from relaxpack.passes.fuse_rope_append_attention import FuseRopeAppendAttention
from relaxpack.passes.lower_kernels import LowerKernels
from relaxpack.passes.rewrite import placeholder
from relaxpack.passes.step_table import step_table
from tests.helpers.ir import check_declines, check_pass
from tests.helpers.plain_kernels import PlainKernels
from tvm import relax

ATTENTION = AttentionSpec(2, 2, 1, 4, 4, 8, 3, 24, "float32", "float32", 0.5)
DECODE, PREFILL, FUSED = "relaxpack.decode_attention", "relaxpack.prefill_attention", "relaxpack.rope_append_attention"


class Asked(PlainKernels):
    """Remembers what it was asked for in one kernel."""

    def __init__(self) -> None:
        self.questions: list[tuple[AttentionSpec, int]] = []

    def rope_append_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        self.questions.append((spec, rows))
        return super().rope_append_attention(spec, rows)


def module(name: str, rows: Any, windows: tuple[int, ...] = (0, 5)) -> tvm.IRModule:
    """One attention a layer over the same qkv, their outputs added."""
    builder, p = relax.BlockBuilder(), tvm.tirx.Var("p", "int64")
    rows = tvm.tirx.Var(rows, "int64") if isinstance(rows, str) else rows

    def var(name: str, *shape: Any, dtype: str = "int32") -> Any:
        return relax.Var(name, relax.TensorType(shape, dtype))

    qkv, pages = var("qkv", rows, 16, dtype="float32"), var("pages", 2, p, 2, 1, 8, 4, dtype="float32")
    integers = [var("positions", rows), var("slots", rows), var("page_table", rows, 3),
                *([var("query_start", 2)] if name == PREFILL else []), var("lengths", rows)]
    table = var("table", 24, 4, dtype="float32")
    with builder.function("decode", [qkv, *integers, pages, table], attrs={"num_input": len(integers) + 2}):
        with builder.dataflow():
            results = [builder.emit(placeholder(
                name, [qkv, pages, table, *integers, relax.prim_value(layer), relax.prim_value(window)],
                relax.TensorType([rows, 8], "float32"))) for layer, window in enumerate(windows)]
            out = builder.emit_output(relax.op.add(*results))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("rows", [1, 2])
def test_every_layer_of_a_small_bucket(rows: int) -> None:
    provider = Asked()
    check_pass(module(DECODE, rows), FuseRopeAppendAttention(provider, ATTENTION), module(FUSED, rows))
    assert provider.questions == [(ATTENTION, rows), (replace(ATTENTION, window=5), rows)]


@pytest.mark.parametrize(("name", "rows", "asked"), [(DECODE, 4, 2), (DECODE, "t", 0), (PREFILL, 2, 0)],
                         ids=["the provider has none", "any number of rows", "prefill"])
def test_it_declines(name: str, rows: Any, asked: int) -> None:
    provider = Asked()
    check_declines(module(name, rows), FuseRopeAppendAttention(provider, ATTENTION))
    assert len(provider.questions) == asked


def test_lowered_to_the_providers_kernel() -> None:
    after = LowerKernels(PlainKernels(), ATTENTION)(module(FUSED, 2))
    calls = [binding for binding in after["decode"].body.blocks[0].bindings if "call_tir" in str(binding.value)]
    names = [binding.value.args[0].name_hint for binding in calls]
    assert names == ["fused_append", "fused_attention_None", "fused_append", "fused_attention_5"]
    appended = {binding.value.tuple_value: binding.var for binding in after["decode"].body.blocks[0].bindings
                if isinstance(binding.value, relax.TupleGetItem) and binding.value.index == 0}
    assert calls[1].value.args[1].fields[1].same_as(appended[calls[0].var])          # layer 0 reads what it appended
    assert calls[2].value.args[1].fields[4].same_as(appended[calls[0].var])          # layer 1 appends to that
    row = step_table(after)["decode"][0]
    kv_bytes = 2 * 1 * 4 * 4
    assert row["operation"] == "rope_append_attention" and row["context_bytes"] == kv_bytes
    assert row["row_bytes"] == (16 + 8) * 4 + kv_bytes + 4 * 4 and row["context_flops"] == 4 * 2 * 4
