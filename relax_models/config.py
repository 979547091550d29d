"""`ModelConfig`: the shape of a decoder in our own words, and the tensors such a decoder has.

Nothing downstream of the importers sees a foreign key. Reading foreign configs is `families.py` and `gguf_import.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from relaxpack.errors import ConfigError
from relaxpack.relax_models.rope import RopeConfig

MAX_LAYERS = 10_000  # a damaged count must not become a list of billions


def check_layers(file: str, layers: int) -> None:
    if not 1 <= layers <= MAX_LAYERS:
        raise ConfigError(f"{file}: the number of layers must be between 1 and {MAX_LAYERS}, got {layers}")


@dataclass(frozen=True)
class ModelConfig:
    """`layer_windows[i]` is how many last tokens (itself included) a query of layer i attends to; None: all."""

    architecture: str  # a name of `families.FAMILIES`
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    max_position: int
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    activation: str = "silu"        # of the MLP's gate: "silu" | "gelu_tanh"
    embedding_scale: float = 1.0    # of what the embedding table gives

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "max_position"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"the number of attention heads ({self.num_heads}) must be a multiple of the number of "
                              f"key/value heads ({self.num_kv_heads})")
        if self.rope.rotary_dim > self.head_dim:
            raise ConfigError(f"RoPE rotates {self.rope.rotary_dim} dimensions but a head has {self.head_dim}")
        if not 0 < self.norm_epsilon < 1:
            raise ConfigError(f"the RMSNorm epsilon must be in (0, 1), got {self.norm_epsilon}")
        if len(self.layer_windows) != self.num_layers:
            raise ConfigError(f"{len(self.layer_windows)} attention windows given for {self.num_layers} layers")
        for window in self.layer_windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ConfigError(f"a sliding window must be a positive number of tokens, got {window!r}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the decoder needs, with the names of Hugging Face checkpoints."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}"
        projections = {
            "self_attn.q_proj": (q, c.hidden_size, c.qkv_bias), "self_attn.k_proj": (kv, c.hidden_size, c.qkv_bias),
            "self_attn.v_proj": (kv, c.hidden_size, c.qkv_bias), "self_attn.o_proj": (c.hidden_size, q, c.output_bias),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
        }
        for name, (out, inner, bias) in projections.items():
            tensors[f"{prefix}.{name}.weight"] = (out, inner)
            if bias:
                tensors[f"{prefix}.{name}.bias"] = (out,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = (c.hidden_size,)
        if c.qk_norm:
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{norm}.weight"] = (c.head_dim,)
    tensors["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_embeddings:
        tensors["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return tensors
