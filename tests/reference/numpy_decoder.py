"""The decoder in plain float32 NumPy: what every kernel, pass and exported function is compared with.

One sequence, no cache, no batching, no cleverness. It takes an open checkpoint, so that it also defines what the
imported config means; it is itself compared with transformers in tests/unit/relax_models/test_against_transformers.py.
"""

from __future__ import annotations

import numpy as np

from relaxpack.relax_models.checkpoint import Checkpoint
from relaxpack.relax_models.rope import inv_freq
from relaxpack.weight_format import QuantizedTensor


def weight(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """float32, dequantised."""
    value = checkpoint.read(name)
    return value.dequantize() if isinstance(value, QuantizedTensor) else value.astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(epsilon)) * scale


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """`x` [t, heads, dim]; dimension i and i + r/2 of the first r = 2 * len(cos[0]) turn together."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Causal, `window` last tokens or all; q [t, heads, dim], k and v [t, kv_heads, dim] -> [t, heads * dim]."""
    t, heads, dim = q.shape
    group = heads // k.shape[1]
    position = np.arange(t)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    out = np.empty_like(q)
    for head in range(heads):
        score = q[:, head] @ k[:, head // group].T * np.float32(dim ** -0.5)
        score = np.where(visible, score, -np.inf)
        p = np.exp(score - score.max(axis=1, keepdims=True))
        out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, head // group]
    return out.reshape(t, heads * dim)


def forward(checkpoint: Checkpoint, token_ids: list[int], max_context: int) -> np.ndarray:
    """Logits float32 `[t, vocab]`. `max_context` decides length-dependent RoPE as a build would."""
    head = "model.embed_tokens.weight" if checkpoint.config.tie_embeddings else "lm_head.weight"
    return hidden_states(checkpoint, token_ids, max_context) @ weight(checkpoint, head).T


def hidden_states(checkpoint: Checkpoint, token_ids: list[int], max_context: int) -> np.ndarray:
    """float32 `[t, hidden]` after the final norm."""
    c = checkpoint.config
    frequencies, attention_factor = inv_freq(c.rope, max_context)
    angle = np.arange(len(token_ids), dtype=np.float32)[:, None] * frequencies
    cos, sin = (f(angle) * np.float32(attention_factor) for f in (np.cos, np.sin))

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ weight(checkpoint, f"{name}.weight").T
        return y + weight(checkpoint, f"{name}.bias") if f"{name}.bias" in checkpoint.tensors else y

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, weight(checkpoint, f"{name}.weight"), c.norm_epsilon)

    x = weight(checkpoint, "model.embed_tokens.weight")[token_ids] * np.float32(c.embedding_scale)
    for layer in range(c.num_layers):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(h, f"{at}.self_attn.{part}_proj").reshape(len(token_ids), -1, c.head_dim) for part in "qkv")
        if c.qk_norm:
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        o = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, c.layer_windows[layer])
        x = x + linear(o, f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(ACTIVATIONS[c.activation](gate) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return norm(x, "model.norm")
