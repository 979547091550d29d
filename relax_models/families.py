"""config.json of each supported architecture, read into a `ModelConfig`.

One row per architecture says what differs (biases, head norms, windows, defaults of its transformers class); the
common keys are read once. RoPE keys are `rope_import.py`; tokenizer keys `tokenizer_import.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.config import ModelConfig, check_layers
from relaxpack.relax_models.rope_import import LAYER_TYPES, read_rope


@dataclass(frozen=True)
class Family:
    """Defaults are those of the transformers class: they apply when the key is absent from config.json."""

    name: str
    class_name: str
    qkv_bias: bool | str = False       # a str names the config key that decides
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: str = "none"               # "none" | "all layers" | "switched" (use_sliding_window, max_window_layers)
    default_kv_heads: int | None = None   # None: as many as heads
    default_head_dim: int | None = None   # None: hidden_size / heads
    default_max_position: int = 2048
    activations: tuple[str, ...] = ("silu",)   # values of hidden_act that mean `activation`; the first is the default
    activation: str = "silu"           # "silu" | "gelu_tanh"
    default_tied: bool = False
    scaled_embedding: bool = False     # times the square root of the hidden size
    norms_from_one: bool = False       # norm weights are stored less one


FAMILIES = {f.name: f for f in (
    Family("llama", "LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias"),
    Family("mistral", "MistralForCausalLM", window="all layers", default_kv_heads=8, default_max_position=131072),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, window="switched", default_kv_heads=32,
           default_max_position=32768),
    Family("qwen3", "Qwen3ForCausalLM", "attention_bias", "attention_bias", qk_norm=True, window="switched",
           default_kv_heads=32, default_head_dim=128, default_max_position=32768),
    # "gelu" stands in Gemma's first files and means the approximation too.
    Family("gemma", "GemmaForCausalLM", "attention_bias", "attention_bias", default_kv_heads=16, default_head_dim=256,
           default_max_position=8192, activations=("gelu_pytorch_tanh", "gelu"), activation="gelu_tanh",
           default_tied=True, scaled_embedding=True, norms_from_one=True),
)}

# Harmless keys, by reason. Everything else is used or refused.
_IGNORED = {
    "training only": (
        "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout",
        "gradient_checkpointing", "output_router_logits", "problem_type", "finetuning_task", "task_specific_params",
        "id2label", "label2id", "unsloth_version", "unsloth_fixed", "unsloth_tokenizer_version"),
    "describes the file or another program, not the model": (
        "_name_or_path", "transformers_version", "architectures", "auto_map", "transformers.js_config", "use_cache",
        "return_dict", "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "tf_legacy_loss",
        "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_commit_hash",
        "tokenizer_class", "prefix", "is_llama_config", "chunk_size_feed_forward", "pruned_heads", "neuron",
        "_flash_attn_2_enabled", "use_flash_attn", "language", "tags"),
    "stored dtype is read from the tensors": ("torch_dtype", "dtype"),
    "splits a matmul in training code; the result is the same": ("pretraining_tp",),
    "padding is not used": ("pad_token_id",),
    "sampling defaults are read from generation_config.json": (
        "temperature", "top_p", "top_k", "typical_p", "do_sample", "num_beams", "num_beam_groups", "max_length",
        "min_length", "max_new_tokens", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "diversity_penalty", "early_stopping",
        "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
        "forced_eos_token_id", "exponential_decay_length_penalty", "output_scores", "return_dict_in_generate",
        "sep_token_id", "decoder_start_token_id"),
}


def find_family(config: KeyReader) -> Family:
    """By `architectures`, the class that transformers would run; `model_type` must not contradict it."""
    known = "; ".join(f"{f.name} ({f.class_name})" for f in FAMILIES.values())
    classes = config.take("architectures", None, list)
    model_type = config.take("model_type", None, str)
    if classes is not None:
        family = next((f for f in FAMILIES.values() if [f.class_name] == classes), None)
    else:
        family = FAMILIES.get(model_type or "")
    if family is None:
        given = f"architectures = {shorten(classes)}, model_type = {model_type!r}"
        raise ConfigError(f"{config.file}: unknown architecture ({given}); known: {known}")
    if model_type is not None and model_type != family.name:
        raise ConfigError(f"{config.file}: model_type = {model_type!r} contradicts architectures = {shorten(classes)}; "
                          f"known: {known}")
    return family


def read_config(config: KeyReader, family: Family) -> tuple[ModelConfig, bool]:
    """The config, and whether `tie_word_embeddings` was stated. Does not finish the reader: the caller may still
    take token ids from it."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    layers = config.integer("num_hidden_layers")
    check_layers(config.file, layers)
    if heads < 1:
        raise ConfigError(f"{config.file}: num_attention_heads = {heads} must be positive")
    # An absent key means the class default; null means "as many as attention heads", as in transformers.
    stated = "num_key_value_heads" in config.data or family.default_kv_heads is None
    kv_heads = config.integer("num_key_value_heads", heads if stated else family.default_kv_heads)
    head_dim = _head_dim(config, family, hidden, heads)
    max_position = config.integer("max_position_embeddings", family.default_max_position)
    windows = _windows(config, family, layers)
    layer_types = frozenset("full_attention" if w is None else "sliding_attention" for w in windows)
    config.require("hidden_act", family.activations, f"the gated MLP of {family.name} is computed with {family.activation}")
    if family.activation != "silu":
        config.require("hidden_activation", family.activations, "as hidden_act")
        config.require("use_bidirectional_attention", (False,), "decoders only")
    config.require("is_decoder", (True, False), "decoder-only models run the same with either value")
    for key in ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "cross_attention_hidden_size",
                "rope_interleaved"):
        config.require(key, (False,), "another computation")
    model = ModelConfig(
        architecture=family.name, hidden_size=hidden, intermediate_size=config.integer("intermediate_size"),
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=config.integer("vocab_size"), norm_epsilon=config.number("rms_norm_eps", 1e-6),
        max_position=max_position, rope=read_rope(config, head_dim, max_position, layer_types), layer_windows=windows,
        tie_embeddings=config.flag("tie_word_embeddings", family.default_tied),
        qkv_bias=_bias(config, family.qkv_bias, "attention_bias"),
        output_bias=config.flag(family.output_bias) if isinstance(family.output_bias, str) else family.output_bias,
        mlp_bias=_bias(config, family.mlp_bias, "mlp_bias"), qk_norm=family.qk_norm, activation=family.activation,
        embedding_scale=embedding_scale(family, hidden))
    for why, keys in _IGNORED.items():
        for key in keys:
            config.ignore(key, why)
    return model, "tie_word_embeddings" in config


def embedding_scale(family: Family, hidden: int) -> float:
    return math.sqrt(hidden) if family.scaled_embedding else 1.0


def _head_dim(config: KeyReader, family: Family, hidden: int, heads: int) -> int:
    if "head_dim" not in config.data and family.default_head_dim is not None:
        return family.default_head_dim
    if "head_dim" not in config and hidden % heads:
        raise ConfigError(f"{config.file}: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads} "
                          "and no head_dim is given")
    return config.integer("head_dim", hidden // heads)


def _bias(config: KeyReader, rule: bool | str, key: str) -> bool:
    if isinstance(rule, str):
        return config.flag(rule)
    config.require(key, (rule,), "this architecture has it fixed")
    return rule


def _windows(config: KeyReader, family: Family, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer."""
    if family.window == "none":
        config.ignore("use_sliding_window", "this architecture attends to everything")
        config.ignore("sliding_window", "this architecture attends to everything")
        types = _layer_types(config, layers)
        if types is not None and "sliding_attention" in types:
            raise ConfigError(f"{config.file}: layer_types has sliding_attention, which {family.name} does not have")
        return (None,) * layers
    # Absent means 4096, null means no window: the defaults of the transformers classes.
    window = config.integer("sliding_window", None if "sliding_window" in config.data else 4096)
    types = _layer_types(config, layers)
    if family.window == "all layers":
        if "sliding_window" not in config.data:
            config.audit.warn(f"{config.file}: gives no sliding_window; using 4096, the default of {family.name}")
        expected = "full_attention" if window is None else "sliding_attention"
        if types is not None and set(types) != {expected}:
            raise ConfigError(f"{config.file}: layer_types = {shorten(types)} contradicts sliding_window = {window} "
                              f"of {family.name}, where all layers are alike")
        return (window,) * layers
    switched_on, first = config.flag("use_sliding_window"), config.integer("max_window_layers", 28)
    if not switched_on or window is None:
        window = None
    if types is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    if window is None and "sliding_attention" in types:
        raise ConfigError(f"{config.file}: layer_types has sliding_attention but use_sliding_window and "
                          "sliding_window give no window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _layer_types(config: KeyReader, layers: int) -> list[str] | None:
    types = config.take("layer_types", None, list)
    if types is None:
        return None
    bad = [t for t in types if t not in LAYER_TYPES]
    if bad:
        raise ConfigError(f"{config.file}: layer_types has {bad[0]!r}; supported: {', '.join(LAYER_TYPES)}")
    if len(types) != layers:
        raise ConfigError(f"{config.file}: layer_types has {len(types)} entries for {layers} layers")
    return types
