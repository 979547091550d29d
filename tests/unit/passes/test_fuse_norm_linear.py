"""FuseNormLinear: a norm between matmuls becomes part of both, where the provider has kernels for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import LinearSpec
from relaxpack.passes.fuse_norm_linear import FuseNormLinear
from relaxpack.passes.rewrite import placeholder
from relaxpack.weight_format import FORMATS
from tests.helpers.ir import check_declines, check_pass
from tvm import relax

ROWS = relax.TensorType([4, 32], "float32")
HALF = relax.TensorType([4, 16], "float32")
SQUARES = relax.TensorType([4, 2], "float32")
FACTS = [tvm.ir.StringImm("f32"), relax.prim_value(0)]
GATED = [tvm.ir.StringImm("f32"), relax.prim_value(1)]
EPSILON = relax.prim_value(1e-5)


class Asked:
    """A provider that notes the questions; `says` answers."""

    def __init__(self, says: Callable[[LinearSpec], bool] = lambda spec: True) -> None:
        self.says, self.questions = says, []

    def folds_norm(self, spec: LinearSpec) -> bool:
        self.questions.append(spec)
        return self.says(spec)


def module(body: Callable[..., Any]) -> tvm.IRModule:
    """A function "decode_4" of x and a residual r, with weights w, v, bias b and norm weight g; `body` emits its results."""
    builder = relax.BlockBuilder()
    x, r = relax.Var("x", ROWS), relax.Var("r", ROWS)
    w, v = (relax.Var(name, relax.TensorType([32, 32], "float32")) for name in "wv")
    b, g = (relax.Var(name, relax.TensorType([32], "float32")) for name in "bg")
    with builder.function("decode_4", [x, r, w, v, b, g], attrs={"num_input": 2}):
        with builder.dataflow():
            found = builder.emit_output(relax.Tuple(body(builder.emit, x, r, w, v, b, g)))
        builder.emit_func_output(found)
    return builder.get()


def linear(flags: str, operands: list[Any], ty: Any = ROWS, facts: Any = FACTS) -> Any:
    return placeholder("relaxpack.linear" + flags, [*operands, *facts], ty)


def before(bias: bool = False, first: bool = True) -> tvm.IRModule:
    def body(emit: Any, x: Any, r: Any, w: Any, v: Any, b: Any, g: Any) -> list[Any]:
        y = emit(linear("+bias", [x, w, b]) if bias else linear("", [x, w]))
        both = emit(placeholder("relaxpack.add_rms_norm", [*([y, r] if first else [r, y]), g, EPSILON], [ROWS, ROWS]))
        total, n = (emit(relax.TupleGetItem(both, i)) for i in (0, 1))
        return [emit(linear("+bias", [n, v, b])), emit(linear("+swiglu", [n, v], HALF, GATED)),
                emit(relax.op.nn.silu(total))]
    return module(body)


def after(bias: bool = False) -> tvm.IRModule:
    def body(emit: Any, x: Any, r: Any, w: Any, v: Any, b: Any, g: Any) -> list[Any]:
        flags = ("+bias" if bias else "") + "+residual+prepares_norm"
        three = emit(linear(flags, [x, w, *([b] if bias else []), r, g], [ROWS, ROWS, SQUARES]))
        total, scaled = (emit(relax.TupleGetItem(three, i)) for i in (0, 1))
        first = emit(linear("+bias+norm", [scaled, v, b, emit(relax.TupleGetItem(three, 2)), EPSILON]))
        second = emit(linear("+swiglu+norm", [scaled, v, emit(relax.TupleGetItem(three, 2)), EPSILON], HALF, GATED))
        return [first, second, emit(relax.op.nn.silu(total))]
    return module(body)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_sum_and_norm_between_matmuls(bias: bool, first: bool) -> None:
    check_pass(before(bias, first), FuseNormLinear(Asked()), after(bias))


def test_the_provider_is_asked_for_every_matmul() -> None:
    provider = Asked()
    FuseNormLinear(provider)(before(bias=True))
    facts = (32, 32, FORMATS["f32"], "decode", "float32", "float32")
    assert provider.questions == [LinearSpec(*facts, bias=True, residual=True, max_rows=4, prepares_norm=True),
                                  LinearSpec(*facts, bias=True, max_rows=4, norm_epsilon=1e-5),
                                  LinearSpec(*facts, glu="swiglu", max_rows=4, norm_epsilon=1e-5)]


@pytest.mark.parametrize("says", [lambda spec: not spec.prepares_norm, lambda spec: not spec.gated],
                         ids=["the one before", "one of those after"])
def test_one_kernel_too_few(says: Callable[[LinearSpec], bool]) -> None:
    check_declines(before(), FuseNormLinear(Asked(says)))


def test_a_norm_behind_a_matmul_with_the_sum() -> None:
    """The form that FuseResidual leaves. The sum has other readers."""
    def fused(emit: Any, x: Any, r: Any, w: Any, v: Any, b: Any, g: Any) -> list[Any]:
        total = emit(linear("+bias+residual", [x, w, b, r]))
        n = emit(placeholder("relaxpack.rms_norm", [total, g, EPSILON], ROWS))
        return [emit(linear("", [n, v])), emit(relax.op.nn.silu(total))]

    def expected(emit: Any, x: Any, r: Any, w: Any, v: Any, b: Any, g: Any) -> list[Any]:
        three = emit(linear("+bias+residual+prepares_norm", [x, w, b, r, g], [ROWS, ROWS, SQUARES]))
        total, scaled = (emit(relax.TupleGetItem(three, i)) for i in (0, 1))
        return [emit(linear("+norm", [scaled, v, emit(relax.TupleGetItem(three, 2)), EPSILON])),
                emit(relax.op.nn.silu(total))]

    check_pass(module(fused), FuseNormLinear(Asked()), module(expected))


def declined(kind: str) -> tvm.IRModule:
    def body(emit: Any, x: Any, r: Any, w: Any, v: Any, b: Any, g: Any) -> list[Any]:
        if kind == "no matmul before it":
            n = emit(placeholder("relaxpack.rms_norm", [x, g, EPSILON], ROWS))
            return [emit(linear("", [n, v]))]
        y = emit(linear("+swiglu", [x, w], ROWS, GATED) if kind == "gated" else linear("", [x, w]))
        if kind == "no sum":
            n = emit(placeholder("relaxpack.rms_norm", [y, g, EPSILON], ROWS))
            return [emit(linear("", [n, v]))]
        other = {"doubled": y, "adds its own input": x}.get(kind, r)
        both = emit(placeholder("relaxpack.add_rms_norm", [y, other, g, EPSILON], [ROWS, ROWS]))
        n = emit(relax.TupleGetItem(both, 1))
        last = emit(linear("+residual", [x, v, n]) if kind == "added, not multiplied" else linear("", [n, v]))
        read = {"another reader of the product": y, "another reader of the norm": n}.get(kind)
        return [last, *([] if read is None else [emit(relax.op.nn.silu(read))]), *([n] if kind == "a result" else [])]
    return module(body)


@pytest.mark.parametrize("kind", [
    "no matmul before it", "gated", "no sum", "doubled", "adds its own input", "added, not multiplied",
    "another reader of the product", "another reader of the norm", "a result"])
def test_it_declines(kind: str) -> None:
    check_declines(declined(kind), FuseNormLinear(Asked()))
