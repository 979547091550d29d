"""FuseResidual (on request): `linear(x, w) + r` becomes one kernel that adds r where it writes its result.

Matches the sum of a `relaxpack.linear` that nobody else reads and another tensor of its type. Needs FuseUnpackMatmul
before; FuseAddNorm after it then finds a norm alone in the place of a sum with a norm. Declines gated matmuls.

Operands of `linear+residual`: those of `linear`, r before the format.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.passes.rewrite import FunctionRewriter, is_op, operands_of, placeholder, placeholder_name
from relaxpack.placeholders import LINEAR
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def rewrite(self, call: Any) -> Any | None:
        if not is_op(call, "relax.add") or not tvm_ffi.structural_equal(call.args[0].ty, call.args[1].ty):
            return None
        for at, other in ((0, 1), (1, 0)):
            linear, residual = self.definition(call.args[at]), call.args[other]
            name = placeholder_name(linear) or ""
            if name in (LINEAR, f"{LINEAR}+bias") and len(self.users[call.args[at]]) == 1 \
                    and not self.is_parameter(residual) and not residual.same_as(call.args[at]):
                *operands, fmt, gated = map(self.new, operands_of(linear))
                return placeholder(f"{name}+residual", [*operands, self.new(residual), fmt, gated], call.ty)
        return None


@tvm.transform.module_pass(opt_level=0, name="FuseResidual")
def FuseResidual(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    return _Rewriter(mod).run()
