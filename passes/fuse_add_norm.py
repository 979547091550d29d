"""FuseAddNorm: `total = a + b; y = rms_norm(total, w)` becomes one kernel with both results; a norm alone becomes
`relaxpack.rms_norm`. Norm weights turn float32. Declines additions whose result feeds no norm.

Operands: x, [residual], weight, epsilon.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import FunctionRewriter, is_op, placeholder
from relaxpack.placeholders import ADD_RMS_NORM, RMS_NORM
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.fused: list[tuple[Any, Any]] = []  # (old norm call, its new value)

    def rewrite(self, call: Any) -> Any | None:
        if is_op(call, "relax.add"):
            return self._add(call)
        if is_op(call, "relax.nn.rms_norm"):
            for norm, value in self.fused:
                if norm.same_as(call):
                    return value
            return placeholder(RMS_NORM, [self.new(call.args[0]), *self._weight_and_epsilon(call)], call.ty)
        return None

    def _add(self, call: Any) -> Any | None:
        norms = [value for _, value in self.users[self.variable_of(call)] if is_op(value, "relax.nn.rms_norm")]
        if len(norms) != 1 or self.is_parameter(call.args[1]):
            return None
        both = self.emit(placeholder(
            ADD_RMS_NORM, [self.new(call.args[0]), self.new(call.args[1]), *self._weight_and_epsilon(norms[0])],
            [call.ty, norms[0].ty]))
        self.fused.append((norms[0], relax.TupleGetItem(both, 1)))
        return relax.TupleGetItem(both, 0)

    def _weight_and_epsilon(self, norm: Any) -> list[Any]:
        return [self.as_float32(norm.args[1]), relax.prim_value(float(norm.attrs.epsilon))]


@tvm.transform.module_pass(opt_level=0, name="FuseAddNorm")
def FuseAddNorm(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    return _Rewriter(mod).run()
