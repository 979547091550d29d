"""FoldScales: a constant factor goes into the weight that makes the number, so that no kernel multiplies by it.

    multiply(matmul(x, W^T), c)            → matmul(x, (c * W)^T)
    multiply(matmul(x, W^T) + b, c)        → matmul(x, (c * W)^T) + c * b
    multiply(rms_norm(x, g), c)            → rms_norm(x, c * g)

Runs before combining and packing. Declines numbers and weights that anything else reads, and weights that the checkpoint
stores quantised. The scale of attention is no part of the graph: it is a constant of the kernel.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import FunctionRewriter, is_op, scalar_of
from relaxpack.recipe import ScaleBy, matrix_tensors
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, fixed: frozenset[str]) -> None:
        super().__init__(mod)
        self.fixed = fixed

    def rewrite(self, call: Any) -> Any | None:
        if not is_op(call, "relax.multiply") or (factor := scalar_of(call.args[1])) is None \
                or len(self.users.get(call.args[0], ())) != 1:
            return None
        value = self.definition(call.args[0])
        if is_op(value, "relax.nn.rms_norm") and self._own(value.args[1]):
            weight = self._scaled(value.args[1], factor)
            return relax.op.nn.rms_norm(self.new(value.args[0]), weight, axes=-1, epsilon=float(value.attrs.epsilon))
        bias = None
        if is_op(value, "relax.add") and self._own(value.args[1]) and len(self.users[value.args[0]]) == 1:
            value, bias = self.definition(value.args[0]), value.args[1]
        if not is_op(value, "relax.matmul"):
            return None
        permute = self.definition(value.args[1])
        if not is_op(permute, "relax.permute_dims") or not self._own(permute.args[0]) \
                or len(self.users[value.args[1]]) != 1:
            return None
        weight = self.emit(relax.op.permute_dims(self._scaled(permute.args[0], factor)))
        y = relax.op.matmul(self.new(value.args[0]), weight)
        return y if bias is None else relax.op.add(self.emit(y), self._scaled(bias, factor))

    def _own(self, parameter: Any) -> bool:
        """A parameter with one reader, whose numbers may change."""
        return self.is_parameter(parameter) and len(self.users[parameter]) == 1 \
            and self.fixed.isdisjoint(matrix_tensors(self.recipe_of(parameter)))

    def _scaled(self, parameter: Any, factor: float) -> Any:
        return self.parameter(f"{parameter.name}*{factor:g}", parameter.ty, ScaleBy(self.recipe_of(parameter), factor))


def FoldScales(fixed: frozenset[str] = frozenset()) -> Any:
    """The pass. `fixed`: checkpoint tensors whose stored numbers are kept as they are."""

    @tvm.transform.module_pass(opt_level=0, name="FoldScales")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return _Rewriter(mod, fixed).run()

    return run
