"""FoldNormWeights (on request): the weight of a norm goes into the columns of the matmuls that read the norm.

`matmul(rms_norm(x, g), W^T)` becomes `matmul(rms_norm(x, 1), (W * g)^T)`: the same number up to the rounding of W * g to
the weight's format. Runs before packing, so quantised formats are quantised after the product. Declines a norm that
anything but matmuls reads, a weight that anything else reads (a tied head), and weights that the checkpoint stores
quantised, which would have to be quantised again; a note in the report names those.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import FunctionRewriter, is_op, with_note
from relaxpack.recipe import Filled, ScaleColumns, matrix_tensors
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, fixed: frozenset[str]) -> None:
        super().__init__(mod)
        self.fixed = fixed
        self.folded: set[str] = set()
        self.declined: dict[str, str] = {}    # norm weight → why

    def rewrite(self, call: Any) -> Any | None:
        if is_op(call, "relax.nn.rms_norm") and self._weights(call) is not None:
            self.folded.add(call.args[1].name)
            size = int(call.args[1].ty.shape[0])
            ones = self.parameter(f"ones.{size}", call.args[1].ty, Filled((size,), 1.0))
            return relax.op.nn.rms_norm(self.new(call.args[0]), ones, axes=-1, epsilon=float(call.attrs.epsilon))
        if is_op(call, "relax.permute_dims") and self.is_parameter(call.args[0]):
            norm, weight = self._norm_before(call), call.args[0]
            if norm is not None and self._weights(norm) is not None:
                made_by = ScaleColumns(self.recipe_of(weight), self.recipe_of(norm.args[1]))
                return relax.op.permute_dims(self.parameter(f"{weight.name}*norm", weight.ty, made_by))
        return None

    def _norm_before(self, permute: Any) -> Any | None:
        """The norm whose result the matmul over this weight multiplies."""
        for _, value in self.users[self.variable_of(permute)]:
            if is_op(value, "relax.matmul") and is_op(norm := self.definition(value.args[0]), "relax.nn.rms_norm"):
                return norm
        return None

    def _weights(self, norm: Any) -> list[Any] | None:
        """The weights that take over the norm's; None where it has to stay."""
        if not self.is_parameter(norm.args[1]):
            return None
        weights = []
        for _, user in self.users[self.variable_of(norm)]:
            permute: Any = self.definition(user.args[1]) if is_op(user, "relax.matmul") else None
            if (why := self._objection(permute)) is not None:
                self.declined[norm.args[1].name] = why
                return None
            weights.append(permute.args[0])
        return weights or None

    def _objection(self, permute: Any) -> str | None:
        """Why the weight that this turns, for a matmul, cannot take over a factor."""
        if not is_op(permute, "relax.permute_dims") or not self.is_parameter(permute.args[0]):
            return "more than matmuls read it"
        weight = permute.args[0]
        if len(self.users[weight]) != 1 or len(self.users[self.variable_of(permute)]) != 1:
            return "the weight has other readers"
        if not self.fixed.isdisjoint(matrix_tensors(self.recipe_of(weight))):
            return "the weight is quantised in the checkpoint"
        return None


def FoldNormWeights(fixed: frozenset[str] = frozenset()) -> Any:
    """The pass. `fixed`: checkpoint tensors whose stored numbers are kept as they are."""

    @tvm.transform.module_pass(opt_level=0, name="FoldNormWeights")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        rewriter = _Rewriter(mod, fixed)
        out = rewriter.run()
        stay = Counter(rewriter.declined.values())
        first = {why: name for name, why in reversed(rewriter.declined.items())}
        return with_note(out, f"FoldNormWeights: {len(rewriter.folded)} norm weights folded into the next matmul" + "".join(
            f"; {count} left alone, since {why}: {first[why]}{' and others' if count > 1 else ''}"
            for why, count in stay.items()))

    return run
