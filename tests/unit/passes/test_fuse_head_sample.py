"""FuseHeadSample: head and sampling become one placeholder where the provider has a kernel; else everything stays."""

from __future__ import annotations

from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import Kernel, LinearSpec, SamplingSpec
from relaxpack.passes.fuse_head_sample import FuseHeadSample
from relaxpack.passes.rewrite import placeholder
from relaxpack.recipe import Filled
from relaxpack.weight_format import FORMATS
from tests.helpers.ir import check_declines, check_pass
from tvm import relax


class Provider:
    """Has a kernel for up to `rows` rows, which keeps two numbers between its runs."""

    def __init__(self, rows: int = 4) -> None:
        self.rows, self.asked = rows, []

    def head_sample(self, spec: LinearSpec, sampling: SamplingSpec) -> Kernel | None:
        self.asked.append((spec, sampling))
        if spec.max_rows is None or spec.max_rows > self.rows:
            return None
        return Kernel((), "rule:test", persistent={"arrived": ((2,), "int32")})


def tensor(dtype: str, *shape: Any) -> relax.TensorType:
    return relax.TensorType(list(shape), dtype)


def module(rows: Any = 2, head: str = "relaxpack.linear", fused: bool = False, given: str = "", readers: int = 1) -> Any:
    """linear(x, w), then sample. `given`: "masks" of allowed tokens, or "computed" settings."""
    def var(name: str, dtype: str, *shape: Any) -> relax.Var:
        return relax.Var(name, tensor(dtype, *shape))

    t = tvm.tirx.Var("t", "int64") if rows == "t" else rows
    x, w = var("x", "float32", t, 16), var("w", "float32", 16, 16)
    settings, counters = var("settings", "float32", t, 8), var("counters", "int32", t, 8)
    counts, bias, masks = var("counts", "int32", 1, 16), var("bias", "float32", 16), var("masks", "int32", 1, 1)
    arrived, squares = var("head_sample.arrived", "int32", 2), var("squares", "float32", t, 1)
    drawn, logits_ty = var("drawn", "int32", 8, 2), tensor("float32", t, 16)
    fmt, gated = tvm.ir.StringImm("f32"), relax.prim_value(0)
    norm = [squares, relax.prim_value(1e-5)] if head.endswith("+norm") else []
    operands = [x, w, *([bias] if "bias" in head else []), *norm, fmt, gated]
    builder = relax.BlockBuilder()
    parameters = [w, *([bias] if "bias" in head else []), *([arrived] if fused else [])]
    with builder.function("step", [x, settings, counters, counts, drawn, masks, squares, *parameters],
                          attrs={"num_input": 7, "global_symbol": "step"}):
        with builder.dataflow():
            if fused:
                both = builder.emit(placeholder(head.replace("linear", "head_sample"), [
                    *operands, settings, counters, counts, drawn, arrived], [logits_ty, drawn.ty]))
                logits = builder.emit(relax.TupleGetItem(both, 0))
                draws = [builder.emit(relax.TupleGetItem(both, 1))]
            else:
                logits = builder.emit(placeholder(head, operands, logits_ty))
                used = builder.emit(relax.op.add(settings, settings)) if given == "computed" else settings
                draws = [builder.emit(placeholder("relaxpack.sample", [
                    logits, used, counters, counts, drawn, *([masks] if given == "masks" else [])], drawn.ty))
                         for _ in range(readers)]
            out = builder.emit_output(relax.Tuple([logits, *draws]))
        builder.emit_func_output(out)
    return builder.get()


def test_head_and_sampling() -> None:
    provider = Provider()
    check_pass(module(), FuseHeadSample(provider), module(fused=True), {"head_sample.arrived": Filled((2,), 0)})
    assert provider.asked == [(LinearSpec(16, 16, FORMATS["f32"], "decode", "float32", "float32", max_rows=2),
                               SamplingSpec(16))]


def test_a_head_with_a_norm_inside() -> None:
    provider, head = Provider(), "relaxpack.linear+norm"
    check_pass(module(head=head), FuseHeadSample(provider), module(head=head, fused=True),
               {"head_sample.arrived": Filled((2,), 0)})
    assert provider.asked[0][0].norm_epsilon == 1e-5


@pytest.mark.parametrize("before", [module(rows=8), module(rows="t"), module(head="relaxpack.linear+bias"),
                                    module(given="masks"), module(given="computed"), module(readers=2)],
                         ids=["too many rows", "any rows", "a bias", "masks", "computed settings", "sampled twice"])
def test_declines(before: tvm.IRModule) -> None:
    check_declines(before, FuseHeadSample(Provider()))
