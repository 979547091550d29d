"""Writes small GGUF files with the `gguf` package, laid out as llama.cpp's converter does.

`write_gguf(path, hf_folder)` converts a folder of `tiny_checkpoints`; K-quants, which that package cannot make from
floats, get random block bytes. `replace_metadata` and `drop` make the defective files of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.relax_models.gguf_import import _LAYER, _TOP

Type = gguf.GGMLQuantizationType
K_QUANTS = {Type.Q4_K: (144, (0, 2)), Type.Q5_K: (176, (0, 2)), Type.Q6_K: (210, (208,))}  # block bytes, float16 at
_GGUF_LAYER = {theirs: ours for ours, theirs in _LAYER.items()}
_GGUF_TOP = {theirs: ours for ours, theirs in _TOP.items()}


def random_k_blocks(kind: Type, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid blocks: random codes and sub-scales, small positive float16 scales. uint8 `[rows, bytes]`."""
    size, halves = K_QUANTS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    for at in halves:
        scale = rng.uniform(1e-4, 1e-2, (rows, columns // 256, 1)).astype(np.float16)
        blocks[..., at:at + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def interleaved_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to q and k of the llama architecture: half order to pair order."""
    dim = array.shape[0] // heads
    out = np.empty_like(array)
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = array[head * dim + i]
            out[head * dim + 2 * i + 1] = array[head * dim + dim // 2 + i]
    return out


def gguf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    stem, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER[stem]}.{suffix}"


def write_gguf(path: Path, folder: Path, kind_of: Callable[[str], Type] = lambda name: Type.F32, *,
               replace_metadata: dict[str, Any] | None = None, drop: tuple[str, ...] = (),
               extra_tensors: dict[str, np.ndarray] | None = None, leave_out: str | None = None) -> Path:
    """`kind_of`: Hugging Face tensor name -> GGUF type of its matrix (vectors stay F32); tensors whose name ends in
    `leave_out` are not written."""
    checkpoint = open_checkpoint(folder)
    c = checkpoint.config
    a = "llama" if c.architecture == "mistral" else c.architecture
    tokenizer = json.loads(checkpoint.assets.files["tokenizer.json"])
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda row: row[1])
    special = {t["content"] for t in tokenizer["added_tokens"]}
    metadata: dict[str, Any] = {
        f"{a}.block_count": c.num_layers, f"{a}.context_length": c.max_position,
        f"{a}.embedding_length": c.hidden_size, f"{a}.feed_forward_length": c.intermediate_size,
        f"{a}.attention.head_count": c.num_heads, f"{a}.attention.head_count_kv": c.num_kv_heads,
        f"{a}.attention.key_length": c.head_dim, f"{a}.attention.value_length": c.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": c.norm_epsilon, f"{a}.rope.freq_base": c.rope.theta,
        f"{a}.rope.dimension_count": c.rope.rotary_dim, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [t for t, _ in vocab],
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t, _ in vocab],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": checkpoint.assets.chat_template, **(replace_metadata or {})}
    writer = gguf.GGUFWriter(path, a)
    for key, value in metadata.items():
        if key not in drop and value is not None:
            _add(writer, key, value)
    for name in checkpoint.tensors:
        if leave_out is not None and name.endswith(leave_out):
            continue
        value = np.asarray(checkpoint.read(name)).astype(np.float32)
        part = name.split(".")[-2]
        if a == "llama" and part in ("q_proj", "k_proj"):
            value = interleaved_rows(value, c.num_heads if part == "q_proj" else c.num_kv_heads)
        kind = kind_of(name) if value.ndim == 2 else Type.F32
        if kind in K_QUANTS:
            data = random_k_blocks(kind, *value.shape)
        else:
            data = quantize(value, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, value in (extra_tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
