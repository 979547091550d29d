"""`CudaKernels`: answers the compiler's kernel questions for one NVIDIA GPU architecture. Naming and caching happen here,
choosing matmul kernels in `linear_rules.py`, the kernels are one file each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import (
    AttentionSpec,
    EmbeddingSpec,
    FusedAttentionSpec,
    Kernel,
    LinearSpec,
    NormSpec,
    SamplingSpec,
    Stage,
    WeightLayout,
)
from relaxpack.schedules.kernels.cuda import attention_decode_tuning, attention_prefill, packing
from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention, spread_attention
from relaxpack.schedules.kernels.cuda.attention_prefill import prefill_attention
from relaxpack.schedules.kernels.cuda.embedding import embedding
from relaxpack.schedules.kernels.cuda.fragments import check_pages
from relaxpack.schedules.kernels.cuda.head_sample import head_sample
from relaxpack.schedules.kernels.cuda.library import library_linear
from relaxpack.schedules.kernels.cuda.linear import folds_norm, linear, rounds_activations
from relaxpack.schedules.kernels.cuda.linear_rules import rule_plan
from relaxpack.schedules.kernels.cuda.norm import norm_kernel
from relaxpack.schedules.kernels.cuda.rope_append import lanes_per_head, rope_append
from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
from relaxpack.schedules.kernels.cuda.sampling import sample
from relaxpack.schedules.kernels.cuda.spread_costs import spread_costs
from relaxpack.schedules.kernels.cuda.top_logprobs import top_logprobs
from relaxpack.schedules.tuning.tuned import TunedKernels
from relaxpack.spread_costs import SpreadCosts
from relaxpack.target import TargetSpec
from relaxpack.weight_format import QuantizedTensor, WeightFormat


def _number(value: float) -> str:
    return f"{value:g}".replace("-", "m").replace(".", "p").replace("+", "")


class CudaKernels:
    """`KernelProvider` for a CUDA target. Equal specs give the very same Kernel. `library_for`: the library that is to
    compute a matmul instead of a kernel of ours (see `library.py`), None for none; by default there is none. `tuned` knows
    better choices than the rules' for some kernels, libraries among them. `activations`: "fp8" where products of fp8 weights
    may round them."""

    def __init__(self, target: TargetSpec, library_for: Callable[[LinearSpec], str | None] = lambda spec: None,
                 tuned: TunedKernels | None = None, activations: str = "float") -> None:
        if target.kind != "cuda":
            raise CompileError(f"target {target.name} is not a GPU")
        self.target, self.arch, self.activations = target, target.arch, activations
        self._library_for, self._tuned = library_for, tuned
        self._kernels: dict[Hashable, Kernel] = {}
        self._fused: dict[Hashable, Kernel | None] = {}
        self._recorded: dict[Hashable, Kernel | None] = {}

    def weight_layout(self, weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
        return packing.weight_layout(weight, out_features, in_features, gated)

    def pack(self, layout: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
        return packing.pack(layout, weight)

    def linear(self, spec: LinearSpec) -> Kernel:
        library = self._library_for(spec)
        if library is not None:
            return self._cached(("linear", library, spec), lambda: library_linear(spec, library))
        if self.activations == "fp8" and rounds_activations(spec, self.arch):    # not what records are about
            return self._cached(("linear", spec), lambda: linear(spec, self.arch, "fp8"))
        return self._cached(("linear", spec), lambda: self._found("linear", spec) or linear(spec, self.arch))

    def folds_norm(self, spec: LinearSpec) -> bool:
        """Decided by the plan: the kernel without the norm is not made to be asked for its name."""
        plain = spec.without_norm()
        if spec.max_rows is None or self._library_for(plain) is not None or (
                self.activations == "fp8" and rounds_activations(plain, self.arch)):
            return False
        found = self._found("linear", plain)
        return folds_norm(spec, found.stages[-1].name if found is not None else rule_plan(plain, self.arch)[0])

    def require_attention(self, spec: AttentionSpec) -> None:
        check_pages("attention", spec)
        lanes_per_head(spec.head_dim, spec.rotary_dim)
        for tuning in (attention_decode_tuning.default_tuning, attention_prefill.default_tuning):
            tuning(spec, self.arch)

    def embedding(self, spec: EmbeddingSpec) -> Kernel:
        name = f"embedding_{spec.weight.name}_{spec.vocab_size}x{spec.hidden_size}_{spec.activation_dtype}" + (
            "" if spec.factor == 1 else "_times" + _number(spec.factor))
        layout = self.weight_layout(spec.weight, spec.vocab_size, spec.hidden_size, False)
        buffers = tuple("weight" + (f".{suffix}" if suffix else "") for suffix, _, _ in layout.buffers)
        return self._cached(("embedding", spec), lambda: Kernel(
            (Stage(embedding(spec, name=name), name, ("token_ids", *buffers), ("y",)),), "rule:cuda.embedding"))

    def norm(self, spec: NormSpec) -> Kernel:
        return self._cached(("norm", spec), lambda: self._found("norm", spec) or norm_kernel(spec, self.arch))

    def rope_append(self, spec: AttentionSpec) -> Kernel:
        return self._cached(("rope_append", spec), lambda: rope_append(spec, self.arch))

    def decode_attention(self, spec: AttentionSpec) -> Kernel:
        return self._cached(("decode_attention", spec),
                            lambda: self._found("decode_attention", spec) or decode_attention(spec, self.arch))

    def prefill_attention(self, spec: AttentionSpec) -> Kernel:
        return self._cached(("prefill_attention", spec),
                            lambda: self._found("prefill_attention", spec) or prefill_attention(spec, self.arch))

    def spread_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        key = ("spread_attention", rows, spec)
        if key not in self._kernels and (kernel := spread_attention(spec, rows, self.arch)) is not None:
            self._kernels[key] = kernel
        return self._kernels.get(key)

    def spread_costs(self, spec: AttentionSpec, rows: int) -> SpreadCosts:
        return spread_costs(spec, rows, self.arch)

    def rope_append_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        asked = FusedAttentionSpec(spec, rows)
        key = ("rope_append_attention", asked)
        if key not in self._kernels:
            kernel = self._found("rope_append_attention", asked) or rope_append_attention(spec, rows, self.arch)
            if kernel is None:
                return None
            self._kernels[key] = kernel
        return self._kernels[key]

    def sample(self, spec: SamplingSpec) -> Kernel:
        return self._cached(("sample", spec), lambda: sample(spec, self.arch))

    def top_logprobs(self, vocab_size: int) -> Kernel:
        return self._cached(("top_logprobs", vocab_size), lambda: top_logprobs(vocab_size, self.arch))

    def head_sample(self, spec: LinearSpec, sampling: SamplingSpec) -> Kernel | None:
        if self._library_for(spec) is not None or self._found("linear", spec) is not None:
            return None     # what was chosen or measured for the head stays
        key = ("head_sample", spec, sampling)
        if key not in self._fused:
            self._fused[key] = head_sample(spec, sampling, self.arch)
        return self._fused[key]

    def asked(self) -> list[tuple[str, Any, Kernel]]:
        """The questions so far: operation, spec and answer."""
        return [(key[0], key[-1], kernel) for key, kernel in self._kernels.items() if isinstance(key, tuple)]

    def _found(self, operation: str, spec: LinearSpec | NormSpec | AttentionSpec | FusedAttentionSpec) -> Kernel | None:
        """The kernel of a tuning record, looked up once. One of a library keeps its source, by which a bundle says what it
        needs."""
        if self._tuned is None:
            return None
        key = (operation, spec)
        if key not in self._recorded:
            self._recorded[key] = self._recorded_kernel(self._tuned, operation, spec)
        return self._recorded[key]

    def _recorded_kernel(self, tuned: TunedKernels, operation: str, spec: Any) -> Kernel | None:
        label = f"{operation}_{spec.out_features}x{spec.in_features}" if isinstance(spec, LinearSpec) else operation
        found = tuned.kernel(operation, spec, label)
        if found is None:
            return None
        kernel, source = found
        return kernel if kernel.source.startswith("library:") else replace(kernel, source=source)

    def _cached(self, key: Hashable, make: Callable[[], Kernel]) -> Kernel:
        if key not in self._kernels:
            self._kernels[key] = make()
        return self._kernels[key]
