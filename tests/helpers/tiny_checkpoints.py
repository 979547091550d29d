"""Writes small random-weight Hugging Face folders of every family, with a real small tokenizer. Same seed, same bytes.

`write_checkpoint(folder, "qwen3")` is a whole checkpoint that both relaxpack and transformers load; keyword arguments
change config keys, storage dtype, sharding and the chat template.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END, TURN_START, TURN_END = range(3)
VOCAB_SIZE = 512

CHAT_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
                 "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

_TEXT = (
    "The quick brown fox jumps over the lazy dog. A language model reads text as tokens and writes one token after "
    "another. for i in range(10):\n    print(i, i * i)\n\ndef main() -> None:\n    return None\n Once upon a time "
    "there was a small compiler that lived in a wheel. The answer to the question is that there are many answers. "
    "What is the capital of France? The capital of France is Paris. Zwölf Boxkämpfer jagen Viktor quer über den "
    "Sylter Deich. 今天天气如何 ďábelské 1234567890 3.14159 https://example.org/a?b=c&d=e ")

_BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": END,
    "eos_token_id": TURN_END, "torch_dtype": "float32", "initializer_range": 0.02, "use_cache": True}

# family name -> keys on top of _BASE. "llama_bias" and "head_dim" are shapes, not architectures.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama_bias": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True,
                   "mlp_bias": True},
    "head_dim": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "head_dim": 32},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
              "max_window_layers": 1, "sliding_window": 32},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
              "tie_word_embeddings": True},
    "gemma": {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "head_dim": 32, "num_key_value_heads": 1,
              "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE of 512 tokens trained on a few sentences: encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[AddedToken(t, special=True) for t in
                                                                         SPECIAL_TOKENS],
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer.to_str()


def make_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json as a dict; a change to ... removes the key."""
    config = {**_BASE, **FAMILIES[family], **changes}
    return {key: value for key, value in config.items() if value is not ...}


def make_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors under Hugging Face names, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, (config.get("num_key_value_heads") or heads) * dim
    kind = config["model_type"]
    qkv_bias = kind == "qwen2" or bool(config.get("attention_bias"))
    o_bias = kind != "qwen2" and bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))
    tensors: dict[str, np.ndarray] = {}

    def linear(name: str, out: int, fan_in: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = rng.normal(0, fan_in ** -0.5, (out, fan_in))
        if bias:
            tensors[f"{name}.bias"] = rng.normal(0, 0.2, out)

    def norm(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = (kind != "gemma") + rng.normal(0, 0.1, width)

    tensors["model.embed_tokens.weight"] = rng.normal(0, 1, (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        for part, width in (("q", q), ("k", kv), ("v", kv)):
            linear(f"{prefix}.self_attn.{part}_proj", width, hidden, qkv_bias)
        if kind == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", dim)
            norm(f"{prefix}.self_attn.k_norm", dim)
        linear(f"{prefix}.self_attn.o_proj", hidden, q, o_bias)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", kind == "gemma"):
        linear("lm_head", config["vocab_size"], hidden)
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def write_checkpoint(folder: Path, family: str = "llama", *, seed: int = 0, shards: int = 1, dtype: str = "float32",
                     tensors: dict[str, np.ndarray] | None = None, chat_template: str | None = CHAT_TEMPLATE,
                     tokenizer_config: dict[str, Any] | None = None,
                     generation_config: dict[str, Any] | None = None, **config_changes: Any) -> Path:
    """Writes the folder and returns it. `dtype`: float32, float16 or bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(family, **{"torch_dtype": dtype, **config_changes})
    write_json(folder / "config.json", config)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[END],
        "eos_token": SPECIAL_TOKENS[TURN_END], "pad_token": SPECIAL_TOKENS[TURN_END], "model_max_length": 256,
        "clean_up_tokenization_spaces": False, **({"chat_template": chat_template} if chat_template else {}),
        **(tokenizer_config or {})})
    write_json(folder / "generation_config.json", generation_config or {
        "bos_token_id": END, "eos_token_id": [TURN_END, END], "do_sample": True, "temperature": 0.7, "top_p": 0.9})
    storage = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = tensors if tensors is not None else make_tensors(config, seed)
    write_weights(folder, {name: value.astype(storage) for name, value in values.items()}, shards)
    return folder


def write_weights(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> None:
    """One model.safetensors, or `shards` files with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(value.nbytes for value in tensors.values())
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
