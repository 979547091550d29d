"""A checkpoint of a model's true shapes without its weights: config, tensor names and sizes, and a file that is one hole.
For what reads shapes alone (`relaxpack tune`, `build --dry-run`), on machines where no checkpoint is.

    python benchmarks/gpu/hollow_checkpoint.py llama-3.2-1b FOLDER
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.models import MODELS
from benchmarks.gpu.published_config import config_json
from benchmarks.gpu.random_bundle import tokenizer_json


def write(name: str, folder: Path) -> None:
    model = MODELS[name]
    family, hidden = model.architecture, model.hidden_size
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json(model, model.intermediate_size, model.rope.theta, model.tie_embeddings)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer_json(model.vocab_size))
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [model.vocab_size, hidden], "model.norm.weight": [hidden]}
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = [model.vocab_size, hidden]
    for i in range(model.num_layers):
        layer = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden],
                 "self_attn.q_proj": [q, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
                 "self_attn.o_proj": [hidden, q], "mlp.gate_proj": [model.intermediate_size, hidden],
                 "mlp.up_proj": [model.intermediate_size, hidden], "mlp.down_proj": [hidden, model.intermediate_size]}
        if family == "qwen3":
            layer |= {"self_attn.q_norm": [model.head_dim], "self_attn.k_norm": [model.head_dim]}
        shapes |= {f"model.layers.{i}.{part}.weight": shape for part, shape in layer.items()}
        if family == "qwen2":
            shapes |= {f"model.layers.{i}.self_attn.{part}_proj.bias": [size]
                       for part, size in (("q", q), ("k", kv), ("v", kv))}
    header, at = {}, 0
    for tensor, shape in shapes.items():
        size = 2
        for dim in shape:
            size *= dim
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write(args.model, args.folder)
