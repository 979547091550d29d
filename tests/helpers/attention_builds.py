"""Builds a set of attention and sampling kernels into one library plus a manifest, for a GPU machine that has only
TVM's runtime; `attention_device.py` is the other half and imports no compiler.

`python -m tests.helpers.attention_builds FOLDER [--arch sm_90a]`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from relaxpack.kernel_spec import AttentionSpec, Kernel, SamplingSpec
from relaxpack.model_info import FP8
from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention, spread_attention
from relaxpack.schedules.kernels.cuda.attention_prefill import default_tuning as mma_tuning
from relaxpack.schedules.kernels.cuda.attention_prefill import prefill_attention
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import HopperTuning
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import default_tuning as hopper_tuning
from relaxpack.schedules.kernels.cuda.rope_append import rope_append
from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
from relaxpack.schedules.kernels.cuda.sampling import sample
from relaxpack.schedules.kernels.cuda.top_logprobs import top_logprobs
from tests.helpers import cuda_harness


def spec(heads: int, kv_heads: int, head_dim: int, page_size: int = 16, max_pages: int = 512, dtype: str = "bfloat16",
         window: int | None = None, norm: float | None = None, rotary_dim: int | None = None) -> AttentionSpec:
    return AttentionSpec(2, heads, kv_heads, head_dim, rotary_dim or head_dim, page_size, max_pages, 8192, dtype, dtype,
                         head_dim ** -0.5, window, norm)


LLAMA_8B_64 = spec(32, 8, 128, 64, 512)
LLAMA_8B, LLAMA_1B, QWEN_7B = spec(32, 8, 128, 16, 2048), spec(32, 8, 64, 16, 2048), spec(28, 4, 128, 16, 2048)
# small ones for numerics: every head_dim, page size, dtype, group size, with and without a window
SMALL = {
    "d64_p16": spec(8, 2, 64), "d96_p16_w": spec(6, 2, 96, window=100), "d128_p64_f16": spec(8, 1, 128, 64, 160, "float16"),
    "d256_p16": spec(4, 4, 256), "d128_p8": spec(12, 4, 128, 8, 1100), "d80_p16": spec(4, 1, 80),
    "d128_g16": spec(16, 1, 128, 64, 160), "d128_p64_w": spec(8, 2, 128, 64, 160, window=700),
}


E4M3 = {f"{name}_e4m3": replace(SMALL[name], kv_dtype=FP8)
        for name in ("d64_p16", "d96_p16_w", "d128_p64_f16", "d256_p16", "d128_g16")}


def builds(tune: bool, mma: bool = True, arch: str = "sm_90a") -> dict[str, tuple[Any, Kernel]]:
    """Name → (spec, kernel). With `tune` also the variants of the search spaces worth timing."""
    found: dict[str, tuple[Any, Kernel]] = {}
    for name, s in {**SMALL, **E4M3, "8b": LLAMA_8B, "1b": LLAMA_1B, "7b": QWEN_7B}.items():
        found[f"decode.{name}"] = s, decode_attention(s, arch)
        found[f"prefill.{name}"] = s, prefill_attention(s, arch)
        if name in {**SMALL, **E4M3} and mma:                      # the version for other architectures, on this one
            found[f"prefill.{name}@mma"] = s, prefill_attention(s, arch, mma_tuning(s, arch))
    for name, s in (("8b", LLAMA_8B), ("norm", spec(8, 2, 128, norm=1e-6)), ("partial", spec(4, 2, 96, rotary_dim=32)),
                    ("f16", spec(4, 1, 64, 64, 160, "float16", rotary_dim=24)),
                    ("e4m3", replace(spec(8, 2, 128, norm=1e-6), kv_dtype=FP8))):
        found[f"rope.{name}"] = s, rope_append(s, arch)
    for name, s in {**SMALL, **E4M3, "d64_norm": spec(8, 2, 64, norm=1e-6), "d64_g7": spec(7, 1, 64),
                    "d128_r32_norm": spec(8, 2, 128, norm=1e-6, rotary_dim=32)}.items():
        for rows in (1, 16):                                        # one of the largest clusters, one of the smallest
            if (fused := rope_append_attention(s, rows, arch)) is not None:
                found[f"fused.{name}@{rows}"] = s, fused
    for name, s in SMALL.items():
        for rows in (1, 16):
            if (spread := spread_attention(s, rows, arch)) is not None:
                found[f"spread.{name}@{rows}"] = s, spread
    found["sample.128256"] = SamplingSpec(128256), sample(SamplingSpec(128256), arch)
    found["sample.5003c"] = SamplingSpec(5003, True), sample(SamplingSpec(5003, True), arch)
    found["top.128256"] = SamplingSpec(128256), top_logprobs(128256, arch)
    if tune:
        found["decode.8b@p64"] = LLAMA_8B_64, decode_attention(LLAMA_8B_64, arch)
        found["prefill.8b@mma"] = LLAMA_8B, prefill_attention(LLAMA_8B, arch, mma_tuning(LLAMA_8B, arch))
        found["prefill.8b@free"] = LLAMA_8B, prefill_attention(LLAMA_8B, "sm_90a", HopperTuning(ping_pong=False))
    return found


# what benchmarks/gpu/prefill_attention.py times: changes of the default tuning
PREFILL_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "8b": {"free": {"ping_pong": False}, "own_heads": {"packed": False}, "3_stages": {"stages": 3, "query_stages": 1},
           "160_keys": {"keys": 160, "query_stages": 1}, "block_a_tile": {"blocks": 0}},
    "1b": {"2_consumers": {"consumers": 2}, "4_stages": {"stages": 4}}, "7b": {"own_heads": {"packed": False}},
    "d256": {"80_keys": {"keys": 80}},
}


def prefill_builds() -> dict[str, tuple[Any, Kernel]]:
    """Hopper's prefill attention: small ones for numerics, the models', and variants of these."""
    small = {"d64_p16": spec(8, 2, 64), "d128_p64_f16": spec(8, 1, 128, 64, 160, "float16"), "d256_p16": spec(4, 4, 256),
             "d128_p8": spec(12, 4, 128, 8, 1100), "d64_g7_w": spec(14, 2, 64, window=700),
             "d128_p256_w": spec(8, 2, 128, 256, 160, window=100)}
    found = {f"prefill.{name}": (s, prefill_attention(s, "sm_90a")) for name, s in small.items()}
    for model, s in {"8b": LLAMA_8B, "1b": LLAMA_1B, "7b": QWEN_7B, "d256": spec(16, 8, 256, 16, 2048)}.items():
        default = hopper_tuning(s)
        for name, change in {"": {}, **PREFILL_VARIANTS[model]}.items():
            full = f"prefill.{model}@{name}" if name else f"prefill.{model}"
            found[full] = s, prefill_attention(s, "sm_90a", replace(default, **change) if name else None)
    return found


def build(folder: Path, arch: str, kernels: dict[str, tuple[Any, Kernel]], only: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    funcs: dict[str, Any] = {}
    manifest: dict[str, Any] = {"arch": arch, "kernels": {}}
    for name, (s, kernel) in kernels.items():
        if only and not any(part in name for part in only.split(",")):
            continue
        stages = []
        for i, stage in enumerate(kernel.stages):
            function = f"{name}.{i}".replace(".", "_").replace("@", "_")
            funcs[function] = stage.func
            stages.append({"function": function, "inputs": stage.inputs, "outputs": stage.outputs})
        manifest["kernels"][name] = {"spec": dataclasses.asdict(s), "stages": stages, "temporaries": kernel.temporaries}
    executable = cuda_harness.lower(funcs, arch)
    executable.export_library(str(folder / "kernels.so"))
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(f"{len(funcs)} functions in {time.perf_counter() - start:.0f} s, "
          f"{(folder / 'kernels.so').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-mma", action="store_true", help="leave out prefill for other architectures")
    parser.add_argument("--only", default="")
    parser.add_argument("--prefill", action="store_true", help="only Hopper's prefill attention and its variants")
    args = parser.parse_args()
    wanted = prefill_builds() if args.prefill else builds(args.tune, not args.no_mma, args.arch)
    build(args.folder, args.arch, wanted, args.only)
