"""GGUF metadata and tensor names, read as our config and Hugging Face tensor names.

GGUF files of the llama architecture keep the rows of q and k in the order of interleaved RoPE; reading undoes that by
moving rows, which loses nothing. The container is `gguf_file.py`, the tokenizer `gguf_tokenizer.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from relaxpack.errors import CheckpointError, ConfigError
from relaxpack.relax_models.audit import KeyReader
from relaxpack.relax_models.config import ModelConfig, check_layers
from relaxpack.relax_models.contents import TensorInfo
from relaxpack.relax_models.families import FAMILIES, embedding_scale
from relaxpack.relax_models.gguf_file import GgufFile
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.relax_models.safetensors_folder import equal_in_chunks
from relaxpack.weight_format import QuantizedTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma")  # Mistral is stored as llama
_DEFAULT_THETA = 10000.0  # what GGUF readers assume when the key is absent

_LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
          "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
          "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
          "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufTensors:
    """A `TensorSource` over one GGUF file. `q_heads`, `kv_heads`: 0 where rows need no reordering."""

    def __init__(self, file: GgufFile, q_heads: int, kv_heads: int) -> None:
        self.file = file
        self._heads = {"q_proj": q_heads, "k_proj": kv_heads}
        self._source: dict[str, str] = {}  # Hugging Face name -> GGUF name
        for name in file.tensors:
            if name not in _ROPE_TENSORS:
                self._source[huggingface_name(name) or name] = name

    def infos(self) -> dict[str, TensorInfo]:
        return {ours: TensorInfo(ours, self.file.tensors[theirs].shape, self.file.tensors[theirs].kind.format)
                for ours, theirs in self._source.items()}

    def read(self, name: str) -> np.ndarray | QuantizedTensor:
        value = self.file.read(self._source[name])
        heads = self._heads.get(name.split(".")[-2], 0)
        if not heads:
            return value
        if isinstance(value, np.ndarray):
            return half_split_rows(value, heads)
        return replace(value, codes=half_split_rows(value.codes, heads), scales=half_split_rows(value.scales, heads),
                       minimums=None if value.minimums is None else half_split_rows(value.minimums, heads))

    def same_bytes(self, one: str, other: str) -> bool:
        a, b = (self.file.tensors[self._source[name]] for name in (one, other))
        return (a.kind, a.shape) == (b.kind, b.shape) and equal_in_chunks(self.file.raw(a.name), self.file.raw(b.name))


def huggingface_name(name: str) -> str | None:
    """Our name of a GGUF tensor; None if it has none."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER:
        return f"model.layers.{int(parts[1])}.{_LAYER[parts[2]]}.{parts[3]}"
    return None


def half_split_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pair order (2i, 2i+1 rotate together) to half order (i, i + d/2 rotate together)."""
    rows = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)


def read_config(file: GgufFile, metadata: KeyReader) -> ModelConfig:
    """Takes the architecture's keys; tokenizer keys and `finish` are left to the caller."""
    architecture = metadata.take("general.architecture", kind=str)
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{file.name}: unknown architecture general.architecture = {architecture!r}; known: "
                          f"{', '.join(ARCHITECTURES)}")
    _ignore_general(metadata)
    if metadata.integer("split.count", 1) > 1:
        raise CheckpointError(f"{file.name} is one of {metadata.data['split.count']} parts of a split GGUF; merge them "
                              "with llama-gguf-split --merge first")
    a = architecture
    hidden, heads = metadata.integer(f"{a}.embedding_length"), _uniform(metadata, f"{a}.attention.head_count")
    layers = metadata.integer(f"{a}.block_count")
    check_layers(file.name, layers)
    if heads < 1:
        raise ConfigError(f"{file.name}: the number of attention heads must be positive, got {heads}")
    head_dim = metadata.integer(f"{a}.attention.key_length", hidden // heads)
    metadata.require(f"{a}.attention.value_length", (head_dim,), "keys and values must be equally wide")
    for key in ("expert_count", "expert_used_count"):
        metadata.require(f"{a}.{key}", (0,), "mixture of experts")
    for key in ("logit_scale", "residual_scale", "embedding_scale"):
        metadata.require(f"{a}.{key}", (1.0,), "another computation")
    metadata.require(f"{a}.attention.scale", (head_dim ** -0.5,), "another computation")
    metadata.require(f"{a}.attention.causal", (True,), "decoders only")
    metadata.require(f"{a}.use_parallel_residual", (False,), "another computation")
    tensors = file.tensors
    embedding = tensors.get("token_embd.weight")
    vocab = metadata.integer(f"{a}.vocab_size", embedding.shape[0] if embedding else 0)
    metadata.ignore(f"{a}.tensor_data_layout", "the row order follows from the architecture")
    max_position = metadata.integer(f"{a}.context_length")
    window = metadata.integer(f"{a}.attention.sliding_window", 0) or None
    family = FAMILIES[a]

    def bias(rule: bool | str, name: str) -> bool:
        """Fixed by the architecture, or (where config.json has a key for it) told by the file's tensors."""
        return rule if isinstance(rule, bool) else f"blk.0.{name}.bias" in tensors

    return ModelConfig(
        architecture=a, hidden_size=hidden, intermediate_size=_uniform(metadata, f"{a}.feed_forward_length"),
        num_layers=layers, num_heads=heads, num_kv_heads=_uniform(metadata, f"{a}.attention.head_count_kv", heads),
        head_dim=head_dim, vocab_size=vocab, norm_epsilon=_decimal(
            metadata.number(f"{a}.attention.layer_norm_rms_epsilon")),
        max_position=max_position, rope=_rope(file, metadata, a, head_dim, max_position),
        layer_windows=(window,) * layers, tie_embeddings="output.weight" not in tensors,
        qkv_bias=bias(family.qkv_bias, "attn_q"), output_bias=bias(family.output_bias, "attn_output"),
        mlp_bias=bias(family.mlp_bias, "ffn_up"), qk_norm=family.qk_norm, activation=family.activation,
        embedding_scale=embedding_scale(family, hidden))


def _ignore_general(metadata: KeyReader) -> None:
    metadata.take("general.alignment", None, int)
    metadata.require("general.type", ("model",), "adapters and projectors are not models")
    for key in metadata.data:
        if key.startswith(("general.", "quantize.", "split.", "imatrix.", "mradermacher.", "modelinfo.")):
            metadata.ignore(key, "describes the file, not the model")


def _uniform(metadata: KeyReader, key: str, default: int | None = None) -> int:
    """Some files give one number per layer; all must be equal."""
    value = metadata.take(key, default, (int, list)) if default is not None else metadata.take(key, kind=(int, list))
    values = value if isinstance(value, list) else [value]
    if len(set(values)) != 1 or not isinstance(values[0], int):
        raise ConfigError(f"{metadata.file}: {key} = {value} differs between layers, which is not supported")
    return values[0]


def _decimal(value: float) -> float:
    """GGUF keeps float32: 1e-5 reads as 9.99999974e-06. Take the shortest decimal that float32 rounds alike."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, metadata: KeyReader, a: str, head_dim: int, max_position: int) -> RopeConfig:
    theta = metadata.number(f"{a}.rope.freq_base", None)
    if theta is None:
        theta = _DEFAULT_THETA
        metadata.audit.warn(f"{file.name}: gives no rope.freq_base; using {theta:g}")
    theta = _decimal(theta)
    rotary = metadata.integer(f"{a}.rope.dimension_count", head_dim)
    if a == "llama" and rotary != head_dim:
        raise ConfigError(f"{file.name}: {a}.rope.dimension_count = {rotary} differs from the head size {head_dim}; "
                          "not supported for this architecture")
    factors = {name: _factors(file, name) for name in _ROPE_TENSORS if name in file.tensors}
    kind = metadata.take(f"{a}.rope.scaling.type", None, str)
    old_linear = metadata.number(f"{a}.rope.scale_linear", None)
    if old_linear not in (None, 0.0, 1.0):
        if kind is not None:
            raise ConfigError(f"{file.name}: rope.scale_linear = {old_linear:g} contradicts rope.scaling.type = "
                              f"{kind!r}")
        return RopeConfig("linear", theta, rotary, max_position, factor=old_linear)
    fields: dict[str, Any] = {}
    scaling = {key: metadata.number(f"{a}.rope.scaling.{key}", None) for key in (
        "factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor", "yarn_ext_factor")}
    original = metadata.integer(f"{a}.rope.scaling.original_context_length", 0)
    metadata.require(f"{a}.rope.scaling.yarn_log_multiplier", (0.0,), "DeepSeek's attention scale")
    metadata.ignore(f"{a}.rope.scaling.finetuned", "says how the model was made, not how it is run")
    factor = scaling["factor"] or 0.0
    if "rope_freqs.weight" in factors:
        if kind not in (None, "none"):
            raise ConfigError(f"{file.name}: has rope_freqs.weight and rope.scaling.type = {kind!r}; only one of them "
                              "is supported")
        return RopeConfig("factors", theta, rotary, max_position, short_factors=factors["rope_freqs.weight"])
    if len(factors) == 2 or kind == "longrope":
        if len(factors) != 2 or not original:
            raise ConfigError(f"{file.name}: longrope needs rope_factors_long.weight, rope_factors_short.weight and "
                              "rope.scaling.original_context_length")
        return RopeConfig("longrope", theta, rotary, max_position, factor=max_position / original,
                          original_max_position=original, attention_factor=scaling["attn_factor"],
                          short_factors=factors["rope_factors_short.weight"],
                          long_factors=factors["rope_factors_long.weight"])
    match kind:
        case None | "none":
            # llama.cpp stretches linearly when a factor stands without a type.
            kind = "linear" if kind is None and factor not in (0.0, 1.0) else "default"
        case "linear" | "yarn" if not factor:
            raise ConfigError(f"{file.name}: rope.scaling.type = {kind!r} without rope.scaling.factor")
        case "linear":
            pass
        case "yarn":
            if scaling["yarn_ext_factor"] not in (None, 1.0):
                raise ConfigError(f"{file.name}: rope.scaling.yarn_ext_factor = {scaling['yarn_ext_factor']} is not "
                                  "supported; supported: 1.0")
            if not original:
                raise ConfigError(f"{file.name}: yarn needs rope.scaling.original_context_length")
            fields = {"original_max_position": original, "beta_fast": scaling["yarn_beta_fast"] or 32.0,
                      "beta_slow": scaling["yarn_beta_slow"] or 1.0}
            extra = scaling["yarn_attn_factor"] or scaling["attn_factor"]
            if extra not in (None, 1.0):  # multiplies the formula's factor
                fields["attention_factor"] = extra * (1 + 0.1 * float(np.log(factor)) if factor > 1 else 1.0)
        case _:
            raise ConfigError(f"{file.name}: rope.scaling.type = {kind!r} is not supported; supported: none, linear, "
                              "yarn, longrope")
    return RopeConfig(kind, theta, rotary, max_position, factor=factor or 1.0, **fields)


def _factors(file: GgufFile, name: str) -> tuple[float, ...]:
    value = file.read(name)
    if isinstance(value, QuantizedTensor):
        raise CheckpointError(f"{file.name}: {name} is quantised; the file is damaged")
    return tuple(value.astype(np.float64).ravel().tolist())
