"""FuseResidual: a sum after a matmul becomes part of the matmul's kernel."""

from __future__ import annotations

from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.fuse_residual import FuseResidual
from relaxpack.passes.rewrite import placeholder
from tests.helpers.ir import check_declines, check_pass
from tvm import relax

ROWS = relax.TensorType([4, 8], "float32")


def module(kind: str = "", *, first: bool = True, fused: bool = False, other: str = "residual", users: int = 1) -> Any:
    """linear(x, w) [+ bias] + r, which then goes through silu."""
    builder = relax.BlockBuilder()
    x, r = relax.Var("x", ROWS), relax.Var("r", ROWS)
    w, b = relax.Var("w", relax.TensorType([8, 8], "float32")), relax.Var("b", relax.TensorType([8], "float32"))
    facts = [tvm.ir.StringImm("f32"), relax.prim_value(0)]
    own = [x, w, *([b] if "bias" in kind else [])]
    with builder.function("step", [x, r, w, b], attrs={"num_input": 2}):
        with builder.dataflow():
            if fused:
                total = builder.emit(placeholder(f"relaxpack.linear{kind}+residual", [*own, r, *facts], ROWS))
            else:
                y = builder.emit(placeholder(f"relaxpack.linear{kind}", [*own, *facts], ROWS))
                addend = {"residual": r, "itself": y, "bias": b}[other]
                total = builder.emit(relax.op.add(y, addend) if first else relax.op.add(addend, y))
                for _ in range(users - 1):
                    total = builder.emit(relax.op.multiply(total, y))
            out = builder.emit_output(relax.op.nn.silu(total))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("kind", ["", "+bias"])
@pytest.mark.parametrize("first", [True, False])
def test_a_sum_after_a_matmul(kind: str, first: bool) -> None:
    check_pass(module(kind, first=first), FuseResidual, module(kind, fused=True))


@pytest.mark.parametrize("before", [
    module("+swiglu"), module(users=2), module(other="itself"), module(other="bias")],
    ids=["swiglu", "another reader", "doubled", "a parameter of one row"])
def test_it_declines(before: tvm.IRModule) -> None:
    check_declines(before, FuseResidual)
