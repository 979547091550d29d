"""transformers on the same GPU, random bf16 weights in true shapes: time to the first token and decode speed by batch,
eager, as it comes.

    python benchmarks/gpu/peer_transformers.py --model llama-3.2-1b --batches 1,8,32 --out PEER.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True}}


def measure(model: Any, device: str, batch: int, prompt: int, new: int) -> dict[str, float]:
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device=device)

    def generate(tokens: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin
    generate(2)
    first = min(generate(1) for _ in range(2))
    whole = min(generate(new) for _ in range(2))
    return {"batch": batch, "first_token_ms": first * 1e3, "tokens_per_second": batch * (new - 1) / (whole - first)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = transformers.LlamaConfig(**SHAPES[args.model], max_position_embeddings=16384)
    with torch.device(args.device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.inference_mode():
        rows = [measure(model, args.device, int(batch), args.prompt, args.new) for batch in args.batches.split(",")]
    args.out.write_text(json.dumps({"model": args.model, "transformers": transformers.__version__,
                                    "torch": torch.__version__, "prompt": args.prompt, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
