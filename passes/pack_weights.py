"""PackWeights: every weight takes the form its kernel reads; the float weight becomes `relaxpack.unpack(packed)`.

Matches parameters under `permute_dims` (linear layers) and `take` (embedding tables). The packed buffers become
parameters whose recipe records format and layout, so packing happens once, at build. Runs after combining and before
fusing: `FuseUnpackMatmul` then removes every unpack. A table used by both embedding and head is packed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import KernelProvider
from relaxpack.passes.rewrite import FunctionRewriter, is_op, placeholder
from relaxpack.placeholders import UNPACK
from relaxpack.recipe import Pack, matrix_tensors
from relaxpack.weight_format import WeightFormat
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, provider: KernelProvider, formats: Mapping[str, WeightFormat],
                 epilogues: bool) -> None:
        super().__init__(mod)
        self.provider, self.formats, self.epilogues = provider, formats, epilogues

    def rewrite(self, call: Any) -> Any | None:
        if is_op(call, "relax.permute_dims") and self.is_parameter(call.args[0]):
            return relax.op.permute_dims(self.emit(self._unpack(call.args[0], self.epilogues and self._feeds_glu(call))))
        if is_op(call, "relax.take") and self.is_parameter(call.args[0]):
            unpacked = self.emit(self._unpack(call.args[0], False))
            return relax.op.take(unpacked, self.new(call.args[1]), axis=0, mode="clip")
        return None

    def _unpack(self, weight: Any, gated: bool) -> Any:
        made_by = self.recipe_of(weight)
        (fmt,) = {self.formats[name] for name in matrix_tensors(made_by)}
        n, k = (int(dim) for dim in weight.ty.shape)
        layout = self.provider.weight_layout(fmt, n, k, gated)
        buffers = [
            self.parameter(f"{weight.name}@{fmt.name}{'.' + suffix if suffix else ''}",
                           relax.TensorType(list(shape), dtype), Pack(fmt.name, n, k, gated, suffix, made_by))
            for suffix, shape, dtype in layout.buffers]
        # Format and role ride along as operands: they are part of what is computed.
        facts = [tvm.ir.StringImm(fmt.name), relax.prim_value(int(gated))]
        return placeholder(UNPACK, [*buffers, *facts], weight.ty)

    def _feeds_glu(self, permute: Any) -> bool:
        """True if the matmul over this weight is split into gate and up."""
        follow = [var for var, value in self.users[self.variable_of(permute)] if is_op(value, "relax.matmul")]
        while len(follow) == 1:
            users = self.users[follow[0]]
            if any(is_op(value, "relax.split") for _, value in users):
                return True
            follow = [var for var, value in users if is_op(value, "relax.add") and self.is_parameter(value.args[1])]
        return False


def PackWeights(provider: KernelProvider, formats: Mapping[str, WeightFormat], epilogues: bool = True) -> Any:
    """The pass. `formats`: weight format of each checkpoint tensor that is a matrix. `epilogues`: gate and up rows are
    packed for a kernel that ends in a gated linear unit."""

    @tvm.transform.module_pass(opt_level=0, name="PackWeights")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return _Rewriter(mod, provider, formats, epilogues).run()

    return run
