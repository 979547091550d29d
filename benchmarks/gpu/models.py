"""Published shapes of the models the GPU benchmarks use; weights come from a seed on the device.

Sources: the config.json files of meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B, Qwen/Qwen2.5-7B, Qwen/Qwen3-8B,
microsoft/phi-4 (as a Llama of its shapes), google/gemma-2b (RoPE scaling left out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.weight_format import FORMATS, WeightFormat


def _model(architecture: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int,
           vocab: int, theta: float, tie: bool, qkv_bias: bool = False, qk_norm: bool = False, **more: Any) -> ModelConfig:
    rope = RopeConfig("default", theta, head_dim, 131072)
    return ModelConfig(architecture, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, 1e-5, 131072, rope,
                       (None,) * layers, tie, qkv_bias, False, False, qk_norm, **more)


MODELS = {
    "llama-3.2-1b": _model("llama", 2048, 8192, 16, 32, 8, 64, 128256, 500000.0, True),
    "llama-3.1-8b": _model("llama", 4096, 14336, 32, 32, 8, 128, 128256, 500000.0, False),
    "qwen2.5-7b": _model("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 1000000.0, False, qkv_bias=True),
    "qwen3-8b": _model("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 1000000.0, False, qk_norm=True),
    "llama-3.2-3b": _model("llama", 3072, 8192, 28, 24, 8, 128, 128256, 500000.0, True),
    "phi-4": _model("llama", 5120, 17920, 40, 40, 10, 128, 100352, 250000.0, False),
    "gemma-2b": _model("gemma", 2048, 16384, 18, 8, 1, 256, 256000, 10000.0, True, activation="gelu_tanh",
                       embedding_scale=2048**0.5),
}


class OneFormat(Mapping[str, WeightFormat]):
    """Every matrix in one format, embedding table and head in theirs."""

    def __init__(self, weight: str) -> None:
        self._weight = FORMATS[weight]
        self._table = FORMATS["q8_0"] if self._weight.quantized else self._weight

    def __getitem__(self, name: str) -> WeightFormat:
        return self._table if name in ("model.embed_tokens.weight", "lm_head.weight") else self._weight

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(())

    def __len__(self) -> int:
        return 0
