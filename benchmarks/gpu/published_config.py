"""A model's config.json as its publisher writes it, from shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relaxpack.model_info import ModelInfo
    from relaxpack.relax_models.config import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_json(shape: ModelInfo | ModelConfig, intermediate_size: int, rope_theta: float, tie_embeddings: bool
                ) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[shape.architecture]], "model_type": shape.architecture,
        "hidden_size": shape.hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": tie_embeddings, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}
