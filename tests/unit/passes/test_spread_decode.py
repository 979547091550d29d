"""SpreadDecode: decode buckets get a second function, whose layers without a window know which leading keys rows share."""

from __future__ import annotations

from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import AttentionSpec, Kernel
from relaxpack.passes.lower_kernels import LowerKernels
from relaxpack.passes.rewrite import placeholder
from relaxpack.passes.specialize_buckets import buckets_of, spread_buckets
from relaxpack.passes.spread_decode import SpreadDecode
from relaxpack.passes.step_table import step_table
from relaxpack.placeholders import DECODE_ATTENTION, SPREAD_ATTENTION
from tests.helpers.ir import check_declines, check_pass
from tests.helpers.plain_kernels import PlainKernels
from tvm import relax

ATTENTION = AttentionSpec(2, 2, 1, 4, 4, 8, 3, 24, "float32", "float32", 0.5)


class WithoutPrefix(PlainKernels):
    def spread_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        return None


def module(*functions: tuple[str, int, bool], windows: tuple[int, ...] = (0, 5)) -> tvm.IRModule:
    """(name, rows, whether it takes `shared`): one attention a layer over the same qkv, their outputs added."""
    builder = relax.BlockBuilder()

    def var(name: str, *shape: Any, dtype: str = "int32") -> Any:
        return relax.Var(name, relax.TensorType(shape, dtype))

    for name, rows, spread in functions:
        p = tvm.tirx.Var("p", "int64")
        qkv, pages = var("qkv", rows, 16, dtype="float32"), var("pages", 2, p, 2, 1, 8, 4, dtype="float32")
        integers = [var("positions", rows), var("slots", rows), var("page_table", rows, 3), var("lengths", rows)]
        table, shared = var("table", 24, 4, dtype="float32"), [var("shared", rows)] * spread
        attrs = {"num_input": 6 + spread, "relaxpack.bucket": rows, "global_symbol": name}
        with builder.function(name, [qkv, *integers, pages, *shared, table], attrs=attrs):
            with builder.dataflow():
                results = []
                for layer, window in enumerate(windows):
                    own = shared if not window else []
                    results.append(builder.emit(placeholder(
                        SPREAD_ATTENTION if own else DECODE_ATTENTION,
                        [qkv, pages, table, *integers, *own, relax.prim_value(layer), relax.prim_value(window)],
                        relax.TensorType([rows, 8], "float32"))))
                out = builder.emit_output(relax.op.add(*results))
            builder.emit_func_output(out)
    return builder.get()


def test_a_second_function_whose_full_layers_take_one_input_more() -> None:
    check_pass(module(("decode_1", 1, False), ("decode_2", 2, False), ("decode_4", 4, False)),
               SpreadDecode(PlainKernels(), ATTENTION, (1, 4)),
               module(("decode_1", 1, False), ("decode_2", 2, False), ("decode_4", 4, False), ("decode_spread_4", 4, True)))


@pytest.mark.parametrize(("provider", "windows"), [(WithoutPrefix(), (0, 5)), (PlainKernels(), (7, 5))],
                         ids=["the provider has no such kernel", "every layer has a window"])
def test_it_declines(provider: Any, windows: tuple[int, ...]) -> None:
    check_declines(module(("decode_4", 4, False), windows=windows), SpreadDecode(provider, ATTENTION, (4,)))


def test_buckets_are_what_the_module_has() -> None:
    after = module(("decode_2", 2, False), ("decode_16", 16, False), ("decode_4", 4, False), ("decode_spread_4", 4, True))
    assert buckets_of(after) == {"decode": (2, 4, 16), "decode_spread": (4,)}
    assert spread_buckets(64) == (1, 2, 4, 8, 16, 32, 64) and spread_buckets(24) == (1, 2, 4, 8, 16, 24)


def test_lowered_with_shared_where_there_is_no_window() -> None:
    after = LowerKernels(PlainKernels(), ATTENTION)(module(("decode_spread_4", 4, True)))
    func = after["decode_spread_4"]
    calls = {binding.value.args[0].name_hint: binding.value for binding in func.body.blocks[0].bindings
             if "call_tir" in str(binding.value)}
    assert list(calls) == ["rope_append", "spread_attention", "decode_attention_5"]
    assert "shared" in [var.name for var in calls["spread_attention"].args[1].fields if isinstance(var, relax.Var)]
    rows = {row["kernel"]: row for row in step_table(after)["decode_spread_4"]}
    assert rows["decode_attention_5"]["context_bytes"] == 2 * 1 * 4 * 4
