"""CombineParallelMatmul: projections of the same input become one matmul over stacked weights.

Matches `concat(linear(x, W1) [+ b1], linear(x, W2) [+ b2], ...)` (query, key, value) and
`f(linear(x, Wg)) * linear(x, Wu)` (gate, up; f is silu or gelu_tanh), where linear(x, W) = matmul(x, permute_dims(W)).
Runs before packing, so that one packed weight serves. Declines when the inputs differ, only some have a bias, or the
weight formats differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import FunctionRewriter, glu_of, is_op
from relaxpack.recipe import Concat
from relaxpack.weight_format import WeightFormat
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, formats: Mapping[str, WeightFormat]) -> None:
        super().__init__(mod)
        self.formats = formats

    def rewrite(self, call: Any) -> Any | None:
        if is_op(call, "relax.concat"):
            return self._combine([f for f in call.args[0].fields])
        if is_op(call, "relax.multiply"):
            gate = self.definition(call.args[0])
            if glu_of(gate) is not None and (both := self._combine([gate.args[0], call.args[1]])) is not None:
                halves = self.emit(relax.op.split(self.emit(both), 2, axis=1))
                active = self.emit(tvm.ir.Call(gate.op, [self.emit(relax.TupleGetItem(halves, 0))]))
                return relax.op.multiply(active, self.emit(relax.TupleGetItem(halves, 1)))
        return None

    def _linear(self, expr: Any) -> tuple[Any, Any, Any] | None:
        """(x, weight parameter, bias parameter or None) if `expr` is a linear layer."""
        value, bias = self.definition(expr), None
        if is_op(value, "relax.add") and self.is_parameter(value.args[1]):
            value, bias = self.definition(value.args[0]), value.args[1]
        if not is_op(value, "relax.matmul"):
            return None
        transposed = self.definition(value.args[1])
        if not is_op(transposed, "relax.permute_dims") or not self.is_parameter(transposed.args[0]):
            return None
        return value.args[0], transposed.args[0], bias

    def _combine(self, exprs: list[Any]) -> Any | None:
        linears = [linear for expr in exprs if (linear := self._linear(expr)) is not None]
        if len(linears) != len(exprs) or len(linears) < 2:
            return None
        x, weight, bias = linears[0]
        if any(not other.same_as(x) or (b is None) != (bias is None) for other, _, b in linears):
            return None
        if len({self.formats.get(w.name) for _, w, _ in linears}) != 1:
            return None
        weights = [w for _, w, _ in linears]
        rows = sum(int(w.ty.shape[0]) for w in weights)
        combined = self._stack(weights, [rows, int(weight.ty.shape[1])])
        y = relax.op.matmul(self.new(x), self.emit(relax.op.permute_dims(combined)))
        if bias is not None:
            y = relax.op.add(self.emit(y), self._stack([b for _, _, b in linears], [rows]))
        return y

    def _stack(self, parameters: list[Any], shape: list[int]) -> Any:
        first, *rest = [p.name for p in parameters]
        name = _joined_name(first, rest)
        made_by = Concat(tuple(self.recipe_of(p) for p in parameters))
        return self.parameter(name, relax.TensorType(shape, parameters[0].ty.dtype), made_by)


def _joined_name(first: str, rest: list[str]) -> str:
    """`a.q_proj.weight`, `a.k_proj.weight` → `a.q_proj+k_proj.weight`."""
    prefix, own, suffix = first.rsplit(".", 2)
    return ".".join([prefix, "+".join([own, *(name.rsplit(".", 2)[1] for name in rest)]), suffix])


def CombineParallelMatmul(formats: Mapping[str, WeightFormat] | None = None) -> Any:
    """The pass. `formats` gives the weight format of each checkpoint tensor; without it all are taken as equal."""

    @tvm.transform.module_pass(opt_level=0, name="CombineParallelMatmul")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return _Rewriter(mod, formats or {}).run()

    return run
