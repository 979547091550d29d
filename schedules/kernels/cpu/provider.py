"""`CpuKernels`: answers the compiler's kernel questions for one x86 CPU. Choosing kernels and naming them happens here;
the kernels themselves are one file each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import (
    AttentionSpec,
    EmbeddingSpec,
    Kernel,
    LinearSpec,
    NormSpec,
    SamplingSpec,
    Stage,
    WeightLayout,
)
from relaxpack.model_info import FP8
from relaxpack.schedules.tuning.tuned import TunedKernels
from relaxpack.spread_costs import SpreadCosts
from relaxpack.target import TargetSpec
from relaxpack.weight_format import FORMATS, QuantizedTensor, WeightFormat

from . import layout, layout_fp8
from .attention_decode import decode_attention
from .attention_prefill import prefill_attention
from .embedding import embedding
from .embedding_fp8 import embedding_fp8
from .isa import Isa
from .linear_float import linear_float
from .linear_fp8 import linear_fp8
from .linear_quantized import linear_quantized
from .norm import norm
from .rope_append import rope_append

_KV_SUFFIX = {"float32": "", "float16": "_f16kv", FP8: "_e4m3kv"}     # of a kernel's name

Spec = LinearSpec | EmbeddingSpec | NormSpec | AttentionSpec


class CpuKernels:
    """`KernelProvider` for a CPU target. Equal specs give the very same Kernel. `tuned` knows better parameters than the
    rule's for some of them."""

    def __init__(self, target: TargetSpec, tuned: TunedKernels | None = None) -> None:
        if target.kind != "cpu":
            raise CompileError(f"target {target.name} is not a CPU")
        self.target = target
        self.isa = Isa.of(target)
        self._tuned = tuned
        self._kernels: dict[tuple[str, Spec], Kernel] = {}

    def asked(self) -> list[tuple[str, Spec, Kernel]]:
        """The questions so far: operation, spec and answer."""
        return [(operation, spec, kernel) for (operation, spec), kernel in self._kernels.items()]

    def weight_layout(self, weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
        module = layout_fp8 if weight.e4m3 else layout
        return module.weight_layout(weight, out_features, in_features, gated)

    def pack(self, layout_: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
        packed_as = FORMATS[layout_.name.split(".")[1]]
        return (layout_fp8 if packed_as.e4m3 else layout).pack(layout_, weight)

    def linear(self, spec: LinearSpec) -> Kernel:
        _only_float32("linear", spec.activation_dtype, spec.out_dtype)
        spec = replace(spec, weight=layout.stored_as(spec.weight))
        extras = (["bias"] if spec.bias else []) + (["residual"] if spec.residual else [])
        name = "_".join(["linear", spec.weight.name, f"{spec.out_features}x{spec.in_features}", *extras,
                         *([spec.glu] if spec.glu else []), spec.phase])
        make = linear_fp8 if spec.weight.e4m3 else linear_quantized if spec.weight.quantized else linear_float
        return self._kernel("linear", spec, name, lambda: make(self.isa, spec), ("x", "weight", *extras), ("y",))

    def folds_norm(self, spec: LinearSpec) -> bool:
        return False

    def require_attention(self, spec: AttentionSpec) -> None:
        _only_float32("attention", spec.activation_dtype)
        if spec.kv_dtype not in _KV_SUFFIX:
            raise CompileError(f"KV dtype {spec.kv_dtype} has no CPU kernel; known: {', '.join(_KV_SUFFIX)}")
        if spec.num_heads % spec.num_kv_heads:
            raise CompileError(f"{spec.num_heads} heads are not a multiple of {spec.num_kv_heads} KV heads")
        if spec.rotary_dim % 2 or not 0 <= spec.rotary_dim <= spec.head_dim:
            raise CompileError(f"rotary_dim {spec.rotary_dim} must be even and at most head_dim {spec.head_dim}")

    def embedding(self, spec: EmbeddingSpec) -> Kernel:
        _only_float32("embedding", spec.activation_dtype)
        spec = replace(spec, weight=layout.stored_as(spec.weight))
        name = f"embedding_{spec.weight.name}_{spec.vocab_size}x{spec.hidden_size}" + (
            "" if spec.factor == 1 else "_times" + _number(spec.factor))
        make = embedding_fp8 if spec.weight.e4m3 else embedding
        return self._kernel("embedding", spec, name, lambda: make(spec), ("token_ids", "weight"), ("y",))

    def norm(self, spec: NormSpec) -> Kernel:
        _only_float32("norm", spec.activation_dtype)
        spec = replace(spec, many_rows=False)       # one kernel for any number
        name = f"{'add_' if spec.residual else ''}rms_norm_{spec.hidden_size}_eps" + _number(spec.epsilon)
        inputs = ("x", "residual", "weight") if spec.residual else ("x", "weight")
        overwrites = (("residual", "total"), ("x", "y")) if spec.residual else (("x", "y"),)
        return self._kernel("norm", spec, name, lambda: norm(self.isa, spec), inputs,
                            ("total", "y") if spec.residual else ("y",), overwrites=overwrites)

    def rope_append(self, spec: AttentionSpec) -> Kernel:
        norms = ("q_norm", "k_norm") if spec.qk_norm_epsilon is not None else ()
        return self._attention("rope_append", spec, rope_append,
                               ("qkv", "rope_table", "positions", "slots", *norms, "pages", "layer"), ("q",), ("pages",))

    def decode_attention(self, spec: AttentionSpec) -> Kernel:
        return self._attention("decode_attention", spec, decode_attention,
                               ("q", "pages", "page_table", "lengths", "layer"), ("y",))

    def prefill_attention(self, spec: AttentionSpec) -> Kernel:
        return self._attention("prefill_attention", spec, prefill_attention,
                               ("q", "pages", "page_table", "query_start", "lengths", "layer"), ("y",))

    def head_sample(self, spec: LinearSpec, sampling: SamplingSpec) -> None:
        return None

    def spread_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        return None         # cores take rows in turn, and every row stays the same bits in any batch

    def spread_costs(self, spec: AttentionSpec, rows: int) -> SpreadCosts:
        raise CompileError("on a CPU there is one way to compute decode attention")

    def rope_append_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        return None         # a launch is a function call here

    def sample(self, spec: SamplingSpec) -> Kernel:
        raise CompileError("on a CPU tokens are sampled by the runtime")

    def top_logprobs(self, vocab_size: int) -> Kernel:
        raise CompileError("on a CPU the likeliest tokens are found by the runtime")

    def _attention(self, operation: str, spec: AttentionSpec, make: Callable[[Isa, AttentionSpec], Any],
                   inputs: tuple[str, ...], outputs: tuple[str, ...], inplace: tuple[str, ...] = ()) -> Kernel:
        self.require_attention(spec)
        name = (f"{operation}_{spec.num_heads}q{spec.num_kv_heads}kv{spec.head_dim}_page{spec.page_size}"
                + (f"_window{spec.window}" if spec.window is not None else "")
                + _KV_SUFFIX[spec.kv_dtype])
        return self._kernel(operation, spec, name, lambda: make(self.isa, spec), inputs, outputs, inplace)

    def _kernel(self, operation: str, spec: Spec, name: str, make: Callable[[], Any], inputs: tuple[str, ...],
                outputs: tuple[str, ...], inplace: tuple[str, ...] = (),
                overwrites: tuple[tuple[str, str], ...] = ()) -> Kernel:
        key = (operation, spec)
        if key not in self._kernels:
            taken = {stage.name for kernel in self._kernels.values() for stage in kernel.stages}
            unique, count = name, 2
            while unique in taken:
                unique, count = f"{name}_v{count}", count + 1
            found = self._tuned.kernel(operation, spec, unique) if self._tuned is not None else None
            func, source = found or (make(), f"rule:cpu.{operation}")
            self._kernels[key] = Kernel((Stage(func, unique, inputs, outputs, inplace, overwrites),), source)
        return self._kernels[key]


def _number(value: float) -> str:
    return f"{value:g}".replace("-", "m").replace(".", "p").replace("+", "")


def _only_float32(operation: str, *dtypes: str) -> None:
    for dtype in dtypes:
        if dtype != "float32":
            raise CompileError(f"{operation}: CPU kernels take float32 activations, got {dtype}")
