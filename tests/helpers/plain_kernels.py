"""A kernel provider of plain loops for float32: the slowest correct one. Pass tests use it, so that they depend on no
schedule; weights stay `[N, K]`, gate rows before up rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relaxpack.kernel_spec import (
    NORM_GROUP,
    AttentionSpec,
    EmbeddingSpec,
    Kernel,
    LinearSpec,
    NormSpec,
    SamplingSpec,
    Stage,
    WeightLayout,
)
from relaxpack.weight_format import QuantizedTensor, WeightFormat
from tests.helpers.plain_attention import attention_loops, rope_append_loops
from tests.helpers.plain_linear import (
    add_loops,
    add_norm_loops,
    embedding_loops,
    linear_loops,
    norm_loops,
    normed_loops,
    prepare_loops,
)
from tests.helpers.plain_sampling import arrive_loops, sample_loops, top_logprobs_loops


def _kernel(func: Any, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...],
            inplace: tuple[str, ...] = ()) -> Kernel:
    return Kernel((Stage(func, name, inputs, outputs, inplace),), "rule:plain")


class PlainKernels:
    """`relaxpack.kernel_spec.KernelProvider` for float32 weights, activations and pages."""

    def weight_layout(self, weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
        assert weight.name == "f32"
        return WeightLayout("plain", (("", (out_features, in_features), "float32"),))

    def pack(self, layout: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
        assert isinstance(weight, np.ndarray)
        return {"": weight}

    def linear(self, spec: LinearSpec) -> Kernel:
        n, k = spec.out_features, spec.in_features
        name = f"linear_{n}x{k}{'_bias' * spec.bias}{'_' + spec.glu if spec.glu else ''}"
        first, x = [], "x"
        temporaries: dict[str, Any] = {}
        if spec.norm_epsilon is not None:
            first, x = [Stage(normed_loops(k, spec.norm_epsilon), f"normed_{k}", ("x", "squares"), ("normed",))], "normed"
            temporaries["normed"] = (("t", k), "float32")
        inputs = (x, "weight", "bias") if spec.bias else (x, "weight")
        linear = linear_loops(n, k, spec.bias, spec.glu)
        if not spec.residual:
            return Kernel((*first, Stage(linear, name, inputs, ("y",))), "rule:plain", temporaries)
        temporaries["product"] = (("t", n), "float32")
        stages = [*first, Stage(linear, name, inputs, ("product",)),
                  Stage(add_loops(n), f"add_{n}", ("product", "residual"), ("y",))]
        if spec.prepares_norm:
            stages.append(Stage(prepare_loops(n), f"prepare_{n}", ("y", "norm_weight"), ("scaled", "squares")))
        return Kernel(tuple(stages), "rule:plain", temporaries)

    def folds_norm(self, spec: LinearSpec) -> bool:
        return (spec.out_features if spec.prepares_norm else spec.in_features) % NORM_GROUP == 0

    def embedding(self, spec: EmbeddingSpec) -> Kernel:
        gather = embedding_loops(spec.vocab_size, spec.hidden_size, spec.factor)
        return _kernel(gather, "embedding", ("token_ids", "weight"), ("y",))

    def norm(self, spec: NormSpec) -> Kernel:
        h, eps = spec.hidden_size, spec.epsilon
        if spec.residual:
            return _kernel(add_norm_loops(h, eps), "add_rms_norm", ("x", "residual", "weight"), ("total", "y"))
        return _kernel(norm_loops(h, eps), "rms_norm", ("x", "weight"), ("y",))

    def rope_append(self, spec: AttentionSpec) -> Kernel:
        return _kernel(rope_append_loops(spec), "rope_append", ("qkv", "rope_table", "positions", "slots", "pages", "layer"),
                       ("q",), ("pages",))

    def spread_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        """For more than one row."""
        if rows < 2:
            return None
        return _kernel(attention_loops(spec, "spread"), "spread_attention",
                       ("q", "pages", "page_table", "lengths", "shared", "layer"), ("y",))

    def decode_attention(self, spec: AttentionSpec) -> Kernel:
        return _kernel(attention_loops(spec, "decode"), f"decode_attention_{spec.window}",
                       ("q", "pages", "page_table", "lengths", "layer"), ("y",))

    def prefill_attention(self, spec: AttentionSpec) -> Kernel:
        return _kernel(attention_loops(spec, "prefill"), f"prefill_attention_{spec.window}",
                       ("q", "pages", "page_table", "query_start", "lengths", "layer"), ("y",))

    def head_sample(self, spec: LinearSpec, sampling: SamplingSpec) -> Kernel | None:
        if spec.max_rows is None or spec.max_rows > 2:
            return None
        linear, n = self.linear(spec), spec.out_features
        *before, head = linear.stages
        (draw,) = self.sample(sampling).stages
        return Kernel((*before, replace(head, outputs=("product",)),
                       Stage(arrive_loops(n), f"arrive_{n}", ("product", "arrived"), ("y",), ("arrived",)),
                       replace(draw, inputs=("y", *draw.inputs[1:]))), "rule:plain",
                      {**linear.temporaries, "product": (("t", n), "float32")}, {"arrived": ((1,), "int32")})

    def rope_append_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        """Two stages with the queries between them, for up to two rows."""
        if rows > 2:
            return None
        append, attend = self.rope_append(spec).stages[0], self.decode_attention(spec).stages[0]
        return Kernel((replace(append, name="fused_append"), replace(attend, name=f"fused_attention_{spec.window}")),
                      "rule:plain", {"q": (("t", spec.num_heads * spec.head_dim), "float32")})

    def sample(self, spec: SamplingSpec) -> Kernel:
        """No filters. The noise of a draw is another one than a GPU's."""
        masked = ("allowed",) if spec.constrained else ()
        return _kernel(sample_loops(spec.vocab_size, spec.constrained), "sample_constrained" if masked else "sample",
                       ("logits", "settings", "counters", "counts", *masked, "drawn"), (), ("counts", "drawn"))

    def top_logprobs(self, vocab_size: int) -> Kernel:
        return _kernel(top_logprobs_loops(vocab_size), "top_logprobs", ("logits", "counters"), ("top_ids", "top_logprobs"))
