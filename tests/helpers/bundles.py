"""Small bundles for tests: valid in every respect, with a library that is not code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.canary import Canary, CanarySet
from relaxpack.dist.integrity import canonical_json
from relaxpack.dist.manifest import Manifest, TargetEntry, WeightsSummary
from relaxpack.model_info import ModelInfo
from relaxpack.target import TargetSpec

INFO = ModelInfo(name="tiny", architecture="llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2,
                 head_dim=16, vocab_size=100, max_context=128, page_size=16, kv_dtype="float32",
                 activation_dtype="float32", max_batch=4, prefill_chunk=64,
                 bos_token_id=1, end_token_ids=(2, 7), add_bos=False)
STEM = "cpu-x86-64-v3"
LIBRARY = f"lib/{STEM}.so"
SHARD = f"params/{STEM}/00001.safetensors"
CANARIES = CanarySet(1e-3, (Canary("hello", (1, 5, 9), (3, 4), (2.5, 1.0), (3, 3), (1.5, 0.5)),))


def parameters() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {"embed.weight": {"": rng.standard_normal((100, 64)).astype(np.float16)},
            "layers.0.qkv.weight": {"codes": rng.integers(0, 255, (128, 32), dtype=np.uint8),
                                    "scales": rng.standard_normal((128, 2)).astype(np.float16)},
            "norm.weight": {"": rng.standard_normal(33).astype(np.float32)}}


def target_entry(param_order: list[str], target: TargetSpec | None = None) -> TargetEntry:
    return TargetEntry(target or TargetSpec("cpu", "x86-64-v3", ("avx2", "fma")), LIBRARY, STEM, tuple(param_order),
                       ("prefill", "decode"), {"t": 64, "b": 4, "p": 33}, {"decode": (1, 2, 4)},
                       {"arena_bytes": 4096}, {"rule": 5, "fallback": 0})


def make_manifest(*targets: TargetEntry) -> Manifest:
    return Manifest(relaxpack_version="0.1.0", key="0" * 64, model_info=INFO, weights=WeightsSummary({"q4_1": 4608}),
                    targets=targets, compiler={"apache-tvm": "0.27.0.post1"},
                    source={"name": "some model", "kind": "gguf"}, build_options={"weights": "as-is"})


def write_bundle(path: Path, force: bool = False, target: TargetSpec | None = None) -> Manifest:
    with BundleWriter(path, force=force) as writer:
        writer.add_bytes(LIBRARY, b"\x7fELF not really" + bytes(range(256)))
        with writer.params(STEM) as params:
            for name, buffers in parameters().items():
                params.add(name, buffers)
        writer.add_bytes("canary.json", CANARIES.to_bytes())
        writer.add_bytes("audit.json", canonical_json({"entries": [
            {"file": "config.json", "key": "hidden_size", "value": "64", "status": "used", "why": ""},
            {"file": "config.json", "key": "use_cache", "value": "True", "status": "ignored", "why": "always on"}],
            "warnings": ["lm_head.weight is tied"]}))
        return writer.finish(make_manifest(target_entry(params.names, target)))
