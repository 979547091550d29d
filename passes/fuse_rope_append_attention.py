"""FuseRopeAppendAttention: decode attention with its rotation and append becomes one kernel where the provider has one.

Matches `relaxpack.decode_attention` whose rows are a constant, so it runs after SpecializeBuckets: where launches are what
a step costs is a matter of the bucket. What is left as it was, LowerKernels gives two kernels.

Operands: those of `relaxpack.decode_attention`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import AttentionSpec, KernelProvider
from relaxpack.passes.rewrite import FunctionRewriter, operands_of, placeholder, placeholder_name
from relaxpack.placeholders import DECODE_ATTENTION, ROPE_APPEND_ATTENTION
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, provider: KernelProvider, attention: AttentionSpec) -> None:
        super().__init__(mod)
        self.provider, self.attention = provider, attention

    def rewrite(self, call: Any) -> Any | None:
        if placeholder_name(call) != DECODE_ATTENTION or not isinstance(rows := call.ty.shape[0], tvm.tirx.IntImm):
            return None
        operands = operands_of(call)
        spec = replace(self.attention, window=int(operands[-1]) or None)
        if self.provider.rope_append_attention(spec, int(rows)) is None:
            return None
        return placeholder(ROPE_APPEND_ATTENTION, [self.new(operand) for operand in operands], call.ty)


def FuseRopeAppendAttention(provider: KernelProvider, attention: AttentionSpec) -> Any:
    """The pass. `attention` describes the model's attention; the window comes from each layer's call."""

    @tvm.transform.module_pass(opt_level=0, name="FuseRopeAppendAttention")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return _Rewriter(mod, provider, attention).run()

    return run
