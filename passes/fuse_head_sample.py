"""FuseHeadSample (on request): the LM head and the sampling of its logits become one `relaxpack.head_sample`, in whose
kernel the blocks of the head also do the first stage of sampling.

Matches `sample(linear(x, w), settings, counters, counts, drawn)`, where the linear layer may have a norm inside
(FuseNormLinear), if the provider has a kernel for these rows: in functions of a bucket, so it runs right before
LowerKernels. Declines where tokens may be masked, and where the settings are computed in the step. The logits stay a
result: others read them.

Operands of `head_sample`: those of the linear layer, then settings, counters, counts, drawn, and what the kernel keeps
between runs. Result: logits and what was drawn.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import KernelProvider, SamplingSpec
from relaxpack.passes.linear_call import NORM, phase_of, read_linear
from relaxpack.passes.rewrite import FunctionRewriter, operands_of, placeholder, placeholder_name
from relaxpack.placeholders import HEAD_SAMPLE, LINEAR, SAMPLE
from relaxpack.recipe import Filled
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, provider: KernelProvider) -> None:
        super().__init__(mod)
        self.provider = provider
        self.function = ""
        self.fused: dict[Any, Any] = {}     # logits of the old function → the fused result

    def _rewrite_function(self, name: str, func: relax.Function) -> relax.Function:
        self.function = name
        return super()._rewrite_function(name, func)

    def rewrite(self, call: Any) -> Any | None:
        name = placeholder_name(call)
        if name in (LINEAR, f"{LINEAR}+{NORM}"):
            return self._head(call, name)
        if name == SAMPLE and (fused := self.fused.get(operands_of(call)[0])) is not None:
            return relax.TupleGetItem(fused, 1)
        return None

    def _head(self, call: Any, name: str) -> Any | None:
        logits = self.variable_of(call)
        draws = [value for _, value in self.users[logits] if placeholder_name(value) == SAMPLE]
        if len(draws) != 1:
            return None
        _, *settings = operands_of(draws[0])
        if len(settings) != 4 or any(var in self.definitions for var in settings):
            return None
        operands = operands_of(call)
        read = read_linear(call, operands, phase_of(self.function, operands[0]))
        kernel = self.provider.head_sample(read.spec, SamplingSpec(read.spec.out_features))
        if kernel is None:
            return None
        kept = [self.parameter(f"head_sample.{buffer}", relax.TensorType(list(shape), dtype), Filled(shape, 0))
                for buffer, (shape, dtype) in kernel.persistent.items()]
        fused = self.emit(placeholder(HEAD_SAMPLE + name.removeprefix(LINEAR),
                                      [*map(self.new, [*operands, *settings]), *kept], [call.ty, draws[0].ty]))
        self.fused[logits] = fused
        return relax.TupleGetItem(fused, 0)


def split_operands(operands: list[Any]) -> tuple[list[Any], list[Any]]:
    """Operands of a `head_sample`: those of the linear layer, which end in its format and one flag, and the others."""
    end = next(i for i, operand in enumerate(operands) if isinstance(operand, tvm.ir.StringImm)) + 2
    return operands[:end], operands[end:]


def FuseHeadSample(provider: KernelProvider) -> Any:
    """The pass."""

    @tvm.transform.module_pass(opt_level=0, name="FuseHeadSample")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return _Rewriter(mod, provider).run()

    return run


