"""A whole bundle of what `build_models.py` made, with weights from a seed: so that loading, start and serving can be
measured in a model's true size where no checkpoint is.

    python benchmarks/gpu/random_bundle.py FOLDER/llama-3.1-8b-bf16 OUT.bundle

Works without a compiler. Numbers repeat every 16 MiB; loading and matmuls take as long as with any others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.integrity import canonical_json
from relaxpack.dist.manifest import Manifest, TargetEntry, WeightsSummary
from relaxpack.dist.params import numpy_dtype
from relaxpack.model_info import ModelInfo
from relaxpack.recipe import RopeTable, from_json
from relaxpack.step_interface import STEP_INTERFACE
from relaxpack.target import TargetSpec

_BLOCK = 1 << 23     # numbers


def tokenizer_json(vocab_size: int) -> bytes:
    """Words `t0`, `t1`, ...: a tokenizer of any size."""
    vocab = {f"t{i}": i for i in range(vocab_size)}
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                       "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                       "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}}).encode()


class Weights:
    """Arrays from a seed, cut out of one block of numbers for each dtype."""

    def __init__(self, seed: int = 0) -> None:
        self._normal = np.random.default_rng(seed).standard_normal(_BLOCK, np.float32)
        self._blocks: dict[tuple[str, float], np.ndarray] = {}

    def make(self, name: str, shape: list[int], dtype: str) -> np.ndarray:
        if dtype == "uint32":       # codes of a quantised weight
            return np.resize(self._normal.view(np.uint32), shape)
        scale = 0.002 if "@q" in name else 0.1 if dtype == "float32" else 0.02
        if (dtype, scale) not in self._blocks:
            self._blocks[dtype, scale] = (self._normal * np.float32(scale)).astype(numpy_dtype(dtype))
        array = np.resize(self._blocks[dtype, scale], shape)
        return array + np.ones((), array.dtype) if dtype == "float32" and "norm" in name else array


def write(stem: Path, out: Path) -> Manifest:
    description: dict[str, Any] = json.loads(Path(f"{stem}.json").read_text())
    info = ModelInfo.from_json(description["info"])
    target = TargetSpec.from_json(description["target"])
    weights = Weights()
    with BundleWriter(out, force=True) as writer:
        writer.add_file(f"lib/{target.file_stem}.so", f"{stem}.so")
        writer.add_bytes("tokenizer/tokenizer.json", tokenizer_json(info.vocab_size))
        writer.add_bytes("tokenizer/text.json", b"{}")
        writer.add_bytes("explain.json", canonical_json(description["explain"]))
        size = 0
        with writer.params(target.file_stem) as params:
            for p in description["parameters"]:
                recipe = from_json(p["recipe"])
                array = (recipe.numbers() if isinstance(recipe, RopeTable)
                         else weights.make(p["name"], p["shape"], p["dtype"]))
                size += array.nbytes
                params.add(p["name"], {"": array})
        entry = TargetEntry(target, f"lib/{target.file_stem}.so", target.file_stem,
                            tuple(p["name"] for p in description["parameters"]),
                            ("prefill", "decode", "sample", "top_logprobs"), {},
                            {name: tuple(sizes) for name, sizes in description["buckets"].items()},
                            {**description["memory"], "weight_bytes": size}, activation_dtype=info.activation_dtype,
                            kv_dtype=info.kv_dtype, spread=description.get("spread", {}),
                            step_interface=STEP_INTERFACE["cuda"])
        return writer.finish(Manifest("benchmark", "0" * 64, info, WeightsSummary({"random": size}), (entry,), {},
                                      {"name": info.name, "kind": "random weights"}, {}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", type=Path, help="FOLDER/NAME of NAME.so and NAME.json")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write(args.stem, args.out)
