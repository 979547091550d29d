"""Attention over e4m3 pages beside 16-bit ones: decode attention one by one and fused, prefill attention, and torch's SDPA,
checked and then timed alone in CUDA graphs whose layers rotate beyond L2.

    python -m benchmarks.gpu.kv_fp8 build FOLDER              # anywhere with nvcc, no GPU needed
    python -m benchmarks.gpu.kv_fp8 run FOLDER --out FILE     # on the GPU: TVM runtime and torch
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.attention_report import FAILURES, require
from relaxpack.model_info import FP8, kv_item_bytes

Variant = tuple[int, ...]
# batch, context of every sequence
DECODE = ((16, 8192), (1, 512), (8, 512), (32, 2048), (2, 512), (4, 2048), (1, 32768), (64, 512), (8, 2048), (1, 8192),
          (64, 8192), (16, 512), (2, 8192), (32, 512), (4, 512), (4, 32768), (1, 2048))
PREFILL = ((512, 512), (2048, 2048), (8192, 8192), (512, 8192))          # queries, keys
BATCHES = (1, 2, 4, 8, 16, 64)                                           # whose fused choices are built
# what may be better for e4m3 pages. fused: cluster, warps, stages, key tiles, blocks that may share a multiprocessor
FUSED: dict[int, tuple[Variant, ...]] = {
    1: ((8, 4, 4, 2, 1),), 2: ((8, 4, 2, 2, 1), (4, 4, 3, 2, 1), (4, 8, 2, 2, 1)),
    4: ((4, 4, 3, 2, 1), (2, 4, 4, 2, 1), (2, 8, 2, 2, 1)), 8: ((2, 8, 2, 1, 1), (2, 8, 2, 2, 1)),
    64: ((2, 8, 3, 2, 0), (1, 8, 3, 2, 0), (2, 8, 2, 4, 0), (2, 4, 3, 4, 0), (1, 8, 2, 4, 0)),
}
# one by one: warps, stages, blocks a multiprocessor, key tiles
SPLIT: tuple[Variant, ...] = ((8, 3, 2, 1),)
ROWS: tuple[Variant, ...] = ((4, 2, 32), (8, 1, 64))                     # prefill by mma.sync: warps, row tiles, keys
# prefill by wgmma, e4m3 tiles converted in shared memory: consumers, keys, stages, tiles of queries, tiles to be converted
HOPPER: dict[str, tuple[Variant, ...]] = {
    "8b": ((2, 128, 2, 1, 4),), "1b": ((2, 128, 2, 2, 4), (3, 96, 2, 1, 4))}
LARGEST = 24e9                                                           # bytes of pages of one case


def label(kind: str, variant: Variant) -> str:
    names = {"fused": "cwskb", "split": "wsbk", "rows": "wrk", "hopper": "cksqr"}[kind]
    return "".join(f"{n}{v}" for n, v in zip(names, variant, strict=True) if v)


def fused_variants(batch: int) -> tuple[Variant, ...]:
    return next(some for most, some in FUSED.items() if batch <= most)


# where code is built

def hopper_tuning(variant: Variant) -> Any:
    from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import HopperTuning
    consumers, keys, stages, query_stages, raw_stages = variant
    return HopperTuning(consumers, keys, stages, query_stages, raw_stages=raw_stages)


def build(folder: Path, variants: bool, prefill: bool, only: str = "") -> None:
    from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention
    from relaxpack.schedules.kernels.cuda.attention_decode_tuning import DecodeTuning
    from relaxpack.schedules.kernels.cuda.attention_prefill import PrefillTuning, default_tuning, prefill_attention
    from relaxpack.schedules.kernels.cuda.rope_append import rope_append
    from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
    from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import FusedTuning, reserve
    from tests.helpers import attention_builds as builds

    kernels: dict[str, tuple[Any, Any]] = {}
    models = {"8b": builds.LLAMA_8B, "1b": builds.LLAMA_1B,
              "8b_p64": dataclasses.replace(builds.LLAMA_8B_64, max_position=32768),
              "h256": builds.spec(16, 8, 256, 16, 2048)}
    for model, wide in models.items():
        for kv, spec in (("bf16", wide), ("fp8", dataclasses.replace(wide, kv_dtype=FP8))):
            kernels[f"decode.{model}.{kv}"] = spec, decode_attention(spec)
            for rows in BATCHES:
                kernels[f"fused.{model}.{kv}@{rows}"] = spec, rope_append_attention(spec, rows)
            if prefill:
                kernels[f"prefill.{model}.{kv}"] = spec, prefill_attention(spec)
        if variants and model != "8b_p64":
            for v in sorted({v for some in FUSED.values() for v in some}):
                tuning = FusedTuning(*v[:4], reserve("sm_90a", v[4]) if v[4] else 0)
                if tuning.shared_bytes(spec) <= 227 * 1024:
                    kernels[f"fused.{model}.fp8.{label('fused', v)}"] = spec, rope_append_attention(spec, 1, tuning=tuning)
            for v in SPLIT:
                split = DecodeTuning(v[0], v[1], 132 * v[2], v[3])
                kernels[f"decode.{model}.fp8.{label('split', v)}"] = spec, decode_attention(spec, tuning=split)
            for v in ROWS if prefill else ():
                name = f"prefill.{model}.fp8.{label('rows', v)}"
                kernels[name] = spec, prefill_attention(spec, tuning=PrefillTuning(*v))
        for v in HOPPER.get(model, ()) if prefill else ():
            name = f"prefill.{model}.fp8.wgmma_{label('hopper', v)}"
            kernels[name] = spec, prefill_attention(spec, tuning=hopper_tuning(v))
    small = {"d64_norm": builds.spec(8, 2, 64, norm=1e-6), "d96_w": builds.spec(6, 2, 96, window=100),
             "d128_p64_f16": builds.spec(8, 1, 128, 64, 160, "float16"), "d256": builds.spec(4, 4, 256),
             "d128_g16_w": builds.spec(16, 1, 128, 64, 160, window=700), "d64_g7": builds.spec(7, 1, 64)}
    for name, spec in small.items():
        spec = dataclasses.replace(spec, kv_dtype=FP8)
        kernels[f"rope.{name}.fp8"] = spec, rope_append(spec)
        kernels[f"decode.{name}.fp8"] = spec, decode_attention(spec)
        for cluster, warps, stages in ((8, 4, 2), (1, 4, 2)):
            tuning = FusedTuning(cluster, warps, stages)
            kernels[f"fused.{name}.fp8.c{cluster}"] = spec, rope_append_attention(spec, 1, tuning=tuning)
        if prefill:
            kernels[f"prefill.{name}.fp8"] = spec, prefill_attention(spec)
            kernels[f"prefill.{name}.fp8.mma"] = spec, prefill_attention(spec, tuning=default_tuning(spec, "sm_90a"))
    begin = time.perf_counter()
    builds.build(folder, "sm_90a", kernels, only)
    print(f"up to {len(kernels)} kernels in {time.perf_counter() - begin:.0f} s")


# where the GPU is

class Bench:
    def __init__(self, folder: Path, out: Path, limit: float) -> None:
        import torch

        from benchmarks.gpu import attention_checks
        from tests.helpers import attention_device
        self.torch, self.dev, self.checks = torch, attention_device, attention_checks
        self.library = attention_device.Library(folder)
        self.out, self.end = out, time.monotonic() + limit
        self.rows: list[dict[str, Any]] = []
        self.wrong: set[str] = set()                     # kernels that failed a check are not timed

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def record(self, **values: Any) -> None:
        self.rows.append(values)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()), flush=True)
        self.save()

    def save(self) -> None:
        self.out.write_text(json.dumps({"device": self.torch.cuda.get_device_name(), "rows": self.rows,
                                        "failures": FAILURES}, indent=1) + "\n")

    def check(self, name: str) -> None:
        """Float64 over what the pages hold, poisoned outputs, equal repeats; rope and fused: what they write too."""
        before, kind = len(FAILURES), name.split(".")[0]
        if kind == "fused":
            error, complaints = self.dev.check_fused(self.library, name)
            for complaint in complaints:
                require(False, complaint)
            self.record(kind="numbers", kernel=name, error=error)
        elif kind == "rope":
            self.checks.check_rope(_Only(self.library, name))
        else:
            self.checks.check_attention(_Only(self.library, name), kind, "")
        if len(FAILURES) > before:
            self.wrong.add(name)
        self.save()

    def ceiling(self) -> float:
        """Bytes a second of a plain read."""
        torch = self.torch
        x = torch.empty((8, 2**28), dtype=torch.float32, device=self.dev.DEVICE)
        x.zero_()
        return float(x[0].numel() * 4 / self.dev.graph_time([lambda i=i: x[i].sum() for i in range(8)], 10))

    def decode(self, model: str, batch: int, length: int, ceiling: float) -> None:
        for kv in ("bf16", "fp8"):
            names = [n for n in self.library.names(f"decode.{model}.{kv}") + self.library.names(f"fused.{model}.{kv}")
                     if n not in self.wrong and self.wanted(n, batch)]
            if not names:
                continue
            spec = self.library.spec(names[0])
            read = 2 * batch * length * spec["num_kv_heads"] * spec["head_dim"] * kv_item_bytes(spec["kv_dtype"])
            layers = int(max(2, min(16, LARGEST // read))) // 2 * 2
            if length > spec["page_size"] * spec["max_pages"]:
                continue
            step = self.dev.DecodeStep({**spec, "max_position": 8192}, [length] * batch, layers + (layers == 2) * 2)
            for name in names:
                if self.over:
                    return
                calls = [self.library.prepare(name, step.buffers(i)) for i in range(layers)]
                if name == names[0]:
                    self.dev.graph_time(calls, 12)           # a GPU that was busy with something else measures too much
                seconds = self.dev.graph_time(calls, 12)
                self.record(kind="decode", model=model, batch=batch, length=length, kv=kv, kernel=name, us=seconds * 1e6,
                            gbs=read / seconds / 1e9, share=read / seconds / ceiling)
            if kv == "bf16":
                self.sdpa(model, step, batch, length, layers)
            del step
            self.torch.cuda.empty_cache()

    def sdpa(self, model: str, step: Any, batch: int, length: int, layers: int) -> None:
        """torch's, over contiguous keys."""
        torch, spec = self.torch, step.spec
        heads, kv, dim = spec["num_heads"], spec["num_kv_heads"], spec["head_dim"]
        q = step.case.q.reshape(batch, heads, 1, dim)
        keys = torch.randn((layers, 2, batch, kv, length, dim), device=self.dev.DEVICE, dtype=q.dtype)
        calls = [lambda i=i: torch.nn.functional.scaled_dot_product_attention(q, keys[i, 0], keys[i, 1], enable_gqa=True)
                 for i in range(layers)]
        try:
            self.record(kind="decode", model=model, batch=batch, length=length, kv="bf16", kernel="sdpa",
                        us=self.dev.graph_time(calls, 12) * 1e6)
        except RuntimeError as error:
            print("sdpa:", str(error)[:200])

    def wanted(self, name: str, batch: int) -> bool:
        kind, _, *rest = name.split(".")
        if kind == "fused":
            if "@" in name:
                return int(name.split("@")[1]) == min(b for b in BATCHES if b >= batch)
            return rest[-1] in {label("fused", v) for v in fused_variants(batch)}
        return True

    def prefill(self, model: str, queries: int, length: int) -> None:
        for kv in ("bf16", "fp8"):
            names = [name for name in self.library.names(f"prefill.{model}.{kv}") if name not in self.wrong]
            if not names or self.over:
                continue
            self.prefill_of(names, queries, length)

    def prefill_of(self, names: list[str], queries: int, length: int) -> None:
        for name in names:
            _, model, kv = name.split(".")[:3]
            spec = self.library.spec(name)
            case = self.dev.PagedCase(spec, [length], [queries], layers=4)
            calls = [self.library.prepare(name, case.buffers(i)) for i in range(4)]
            self.dev.graph_time(calls, 12)
            seconds = self.dev.graph_time(calls, 12)
            pairs = queries * length - queries * (queries - 1) // 2
            self.record(kind="prefill", model=model, queries=queries, length=length, kv=kv, kernel=name, us=seconds * 1e6,
                        tflops=4 * spec["head_dim"] * spec["num_heads"] * pairs / seconds / 1e12)

    def run(self, models: list[str]) -> None:
        names = list(self.library.manifest)
        for name in [n for n in names if ".fp8" in n]:
            if not self.over:
                self.check(name)
        ceiling = self.ceiling()
        self.record(kind="ceiling", gbs=ceiling / 1e9)
        for i in range(max(len(DECODE), len(PREFILL))):
            for model in models:
                if i < len(DECODE) and not self.over:
                    self.decode(model, *DECODE[i], ceiling)
                if i < len(PREFILL) and not self.over:
                    self.prefill(model, *PREFILL[i])


class _Only:
    """A library of one kernel."""

    def __init__(self, library: Any, name: str) -> None:
        self._library, self._name = library, name

    def names(self, prefix: str) -> list[str]:
        return [self._name] if self._name.startswith(prefix) else []

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._library, attribute)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build")
    command.add_argument("folder", type=Path)
    command.add_argument("--variants", action="store_true", help="also tunings beside the default choices")
    command.add_argument("--no-prefill", action="store_true")
    command.add_argument("--only", default="", help="parts of kernel names, with commas between: \"prefill.\"")
    command = commands.add_parser("run")
    command.add_argument("folder", type=Path)
    command.add_argument("--out", type=Path, required=True, help="JSON file, written after every row")
    command.add_argument("--limit", type=float, default=100, help="seconds after which nothing new is begun")
    command.add_argument("--models", default="8b,1b,8b_p64")
    args = parser.parse_args()
    if args.command == "build":
        build(args.folder, args.variants, not args.no_prefill, args.only)
        return 0
    bench = Bench(args.folder, args.out, args.limit)
    bench.run(args.models.split(","))
    print("FAILURES:" if FAILURES else "all checks passed", *FAILURES, sep="\n")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    raise SystemExit(main())
