"""FuseHeadSample (on request): the LM head and the sampling of its logits become one `relaxpack.head_sample`, in whose
kernel the blocks of the head also do the first stage of sampling.

Matches `sample(linear(x, w), settings, counters, counts)` where the provider has a kernel for these rows: in functions of
a bucket, so it runs after SpecializeBuckets, right before LowerKernels. Declines where tokens may be masked, and where
the settings are computed in the step. The logits stay a result: others read them too.

Operands of `head_sample`: x, buffers of w, settings, counters, counts, what the kernel keeps between runs, format name.
Result: logits, token ids, log-probabilities.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import KernelProvider, LinearSpec, SamplingSpec
from relaxpack.passes.rewrite import FunctionRewriter, operands_of, placeholder, placeholder_name
from relaxpack.placeholders import HEAD_SAMPLE, LINEAR, SAMPLE
from relaxpack.recipe import Filled
from relaxpack.weight_format import FORMATS
from tvm import relax
from tvm.relax.expr_functor import mutator


@mutator
class _Rewriter(FunctionRewriter):
    def __init__(self, mod: tvm.IRModule, provider: KernelProvider) -> None:
        super().__init__(mod)
        self.provider = provider
        self.fused: dict[Any, Any] = {}     # logits of the old function → the fused result

    def rewrite(self, call: Any) -> Any | None:
        name = placeholder_name(call)
        if name == LINEAR:
            return self._head(call)
        if name == SAMPLE and (fused := self.fused.get(operands_of(call)[0])) is not None:
            return relax.Tuple([self.emit(relax.TupleGetItem(fused, i)) for i in (1, 2)])
        return None

    def _head(self, call: Any) -> Any | None:
        logits = self.variable_of(call)
        draws = [value for _, value in self.users[logits] if placeholder_name(value) == SAMPLE]
        if len(draws) != 1:
            return None
        _, *settings = operands_of(draws[0])
        if len(settings) != 3 or any(var in self.definitions for var in settings):
            return None
        x, *buffers, fmt, _ = operands_of(call)
        kernel = self.provider.head_sample(*specs(call.ty, x, fmt))
        if kernel is None:
            return None
        kept = [self.parameter(f"head_sample.{name}", relax.TensorType(list(shape), dtype), Filled(shape, 0))
                for name, (shape, dtype) in kernel.persistent.items()]
        token_ids, logprobs = draws[0].ty.fields
        fused = self.emit(placeholder(HEAD_SAMPLE, [*map(self.new, [x, *buffers, *settings]), *kept, fmt],
                                      [call.ty, token_ids, logprobs]))
        self.fused[logits] = fused
        return relax.TupleGetItem(fused, 0)


def specs(logits: Any, x: Any, fmt: Any) -> tuple[LinearSpec, SamplingSpec]:
    """What is asked of the provider, by the type of the logits."""
    rows, vocab = logits.shape
    return (LinearSpec(int(vocab), int(x.ty.shape[1]), FORMATS[str(fmt.value)], "decode", str(x.ty.dtype),
                       str(logits.dtype), max_rows=int(rows) if isinstance(rows, tvm.tirx.IntImm) else None),
            SamplingSpec(int(vocab)))


def FuseHeadSample(provider: KernelProvider) -> Any:
    """The pass."""

    @tvm.transform.module_pass(opt_level=0, name="FuseHeadSample")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        return _Rewriter(mod, provider).run()

    return run


