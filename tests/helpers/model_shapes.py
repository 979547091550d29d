"""Published shapes of small models, without weights: what passes and plans are measured on."""

from __future__ import annotations

import math
from collections.abc import Mapping

from relaxpack.relax_models.config import ModelConfig, expected_tensors
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.weight_format import FORMATS, WeightFormat


def _config(architecture: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int,
            max_position: int, rope: RopeConfig, qkv_bias: bool = False, epsilon: float = 1e-5) -> ModelConfig:
    return ModelConfig(architecture, hidden, inner, layers, heads, kv_heads, hidden // heads, vocab, epsilon,
                       max_position, rope, (None,) * layers, True, qkv_bias, False, False, False)


SHAPES: dict[str, ModelConfig] = {
    "SmolLM2-135M": _config("llama", 576, 1536, 30, 9, 3, 49152, 8192, RopeConfig("default", 100000.0, 64, 8192)),
    "Qwen2.5-0.5B": _config("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, RopeConfig("default", 1e6, 64, 32768),
                            qkv_bias=True, epsilon=1e-6),
    "Llama-3.2-1B": _config("llama", 2048, 8192, 16, 32, 8, 128256, 131072, RopeConfig(
        "llama3", 500000.0, 64, 131072, 32.0, 8192, None, 1.0, 4.0)),
}
GEMMA_2B = ModelConfig("gemma", 2048, 16384, 18, 8, 1, 256, 256000, 1e-6, 8192, RopeConfig("default", 10000.0, 256, 8192),
                       (None,) * 18, True, False, False, False, False, "gelu_tanh", math.sqrt(2048))


def formats_of(config: ModelConfig, table: str, rest: str) -> Mapping[str, WeightFormat]:
    """The weight format of every matrix: `table` for embedding and head, `rest` for the layers."""
    return {name: FORMATS[table if name in ("model.embed_tokens.weight", "lm_head.weight") else rest]
            for name, shape in expected_tensors(config).items() if len(shape) == 2}
