"""FuseUnpackMatmul: unpacking (dequantising) disappears into the kernel that needs the weight.

    matmul(x, permute_dims(unpack(w)))                      → relaxpack.linear(x, w)
    ... + bias parameter                                     → relaxpack.linear+bias
    silu(split(linear)[0]) * split(linear)[1]                → relaxpack.linear+swiglu  (packed with gate/up together)
    gelu_tanh(split(linear)[0]) * split(linear)[1]           → relaxpack.linear+geglu
    astype(linear, float32)                                  → relaxpack.linear with float32 result
    take(unpack(w), ids)                                     → relaxpack.embedding(ids, w)
    take(unpack(w), ids) * constant                          → relaxpack.embedding(ids, w, constant)

Operands of `linear`: x, buffers of w, [bias], format name, gated flag. Needs PackWeights before; the inner forms die.
`FuseUnpackOnly` rewrites the first and the last form alone; it stands in where FuseEpilogues is disabled.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import FunctionRewriter, glu_of, is_op, operands_of, placeholder, placeholder_name, scalar_of
from relaxpack.placeholders import EMBEDDING, GLU, LINEAR, UNPACK
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, epilogues: bool) -> None:
        super().__init__(mod)
        self.epilogues = epilogues

    def rewrite(self, call: Any) -> Any | None:
        if is_op(call, "relax.matmul") or (self.epilogues and is_op(call, "relax.add")):
            return self._linear(call, call.ty, "")
        if self.epilogues and is_op(call, "relax.multiply"):
            fused = self._glu(call)
            return fused if fused is not None else self._scaled_embedding(call)
        if self.epilogues and is_op(call, "relax.astype") and str(call.ty.dtype) == "float32":
            return self._linear(self.definition(call.args[0]), call.ty, "")
        if is_op(call, "relax.take"):
            return self._embedding(call, call.ty)
        return None

    def _embedding(self, call: Any, out_ty: Any, *factor: Any) -> Any | None:
        table = self.definition(call.args[0])
        if placeholder_name(table) != UNPACK:
            return None
        return placeholder(EMBEDDING, [self.new(call.args[1]), *map(self.new, operands_of(table)), *factor], out_ty)

    def _scaled_embedding(self, call: Any) -> Any | None:
        rows, factor = self.definition(call.args[0]), scalar_of(call.args[1])
        if not is_op(rows, "relax.take") or factor is None:
            return None
        return self._embedding(rows, call.ty, relax.prim_value(factor))

    def _linear(self, value: Any, out_ty: Any, flags: str) -> Any | None:
        bias = None
        if is_op(value, "relax.add") and self.is_parameter(value.args[1]):
            value, bias = self.definition(value.args[0]), self.as_float32(value.args[1])
            flags = "+bias" + flags
        if not is_op(value, "relax.matmul"):
            return None
        transposed = self.definition(value.args[1])
        if not is_op(transposed, "relax.permute_dims"):
            return None
        unpack = self.definition(transposed.args[0])
        if placeholder_name(unpack) != UNPACK:
            return None
        *buffers, fmt, gated = operands_of(unpack)
        if bool(int(gated)) != any(f"+{glu}" in flags for glu in GLU):
            return None  # the half-way form of a gated linear unit; it dies when the product is rewritten
        operands = [self.new(value.args[0]), *map(self.new, buffers), *([bias] if bias is not None else [])]
        return placeholder(LINEAR + flags, [*operands, fmt, gated], out_ty)

    def _glu(self, call: Any) -> Any | None:
        active, up = self.definition(call.args[0]), self.definition(call.args[1])
        glu = glu_of(active)
        if glu is None or not isinstance(up, relax.TupleGetItem):
            return None
        gate = self.definition(active.args[0])
        if not isinstance(gate, relax.TupleGetItem) or (gate.index, up.index) != (0, 1) \
                or not gate.tuple_value.same_as(up.tuple_value):
            return None
        split = self.definition(gate.tuple_value)
        return self._linear(self.definition(split.args[0]), call.ty, f"+{glu}") if is_op(split, "relax.split") else None


@tvm.transform.module_pass(opt_level=0, name="FuseUnpackMatmul")
def FuseUnpackMatmul(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    return _Rewriter(mod, True).run()


@tvm.transform.module_pass(opt_level=0, name="FuseUnpackOnly")
def FuseUnpackOnly(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    """Without epilogues."""
    return _Rewriter(mod, False).run()
