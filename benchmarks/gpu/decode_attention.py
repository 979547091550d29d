"""Decode attention beyond even batches: leading pages that a batch shares, ragged batches, long contexts, every head_dim.

    python -m benchmarks.gpu.decode_attention build FOLDER             # anywhere with nvcc, no GPU needed
    python -m benchmarks.gpu.decode_attention run FOLDER --out FILE    # on the GPU: TVM runtime and torch

Every kernel against float64 first. `shared`: rope_append and attention of one layer, pages rotated beyond L2, with the
shared keys read once and without. `chain`: between the matmuls of 32 layers, as in fused_attention.py. `coverage`:
attention alone beside torch's SDPA and a plain read. `long`: one sequence of 32768 keys alone, the variants in turn. A
kernel `spread.MODEL.ROWS@VARIANT` is the rule but for this: `c` a merge of as few blocks as there may be cuts, `n` one of
as many blocks as stage one, `e` as many blocks as divide the tiles of one long sequence (`ec`: both); `h` reads shared keys
by wgmma (`h8`: 8 blocks share them), `2` without.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.fused_attention import HIDDEN, Bench

# rows, shared keys, own keys
SHARED = ((32, 8192, 512), (32, 0, 512), (8, 2048, 512), (32, 1024, 256), (64, 4096, 512), (16, 16384, 256),
          (128, 2048, 256), (4, 8192, 512), (8, 8192, 512))
CHAIN = ((8, "ragged"), (4, "ragged"), (1, 32768), (32, "ragged"), (1, 8192), (16, 8192), (8, 2048), (2, 16384), (4, 8192),
         (1, 512), (32, 512), (8, 512))
BUCKETS = tuple(sorted({rows for rows, _ in CHAIN}))
MOST = 24                 # calls in a graph, at least: its launch counts little then
VARIANTS = {1: ("n", "ec"), 4: ("n", "ec"), 8: ("c", "e", "ec")}            # by bucket
LONG = ((1, 32768), (1, 16384), (1, 8192), (4, 32768))
MODELS = "8b", "1b"
COVERAGE = ((1, 512), (16, 8192), (1, 32768))


def bucket_of(rows: int) -> int:
    """Whose kernels `long` takes for so many sequences."""
    return 1 if rows == 1 else 8


def varied(spec: Any, tuning: Any) -> dict[str, Any]:
    """What may be better than a tuning of the split and its merge, by label."""
    from relaxpack.schedules.kernels.cuda.attention_decode_tuning import shared_bytes
    even, compact = 1 << tuning.blocks.bit_length() - 1, dataclasses.replace(tuning, compact=True)
    found = {"n": dataclasses.replace(tuning, compact=False), "c": compact,
             "e": dataclasses.replace(tuning, compact=False, blocks=even), "ec": dataclasses.replace(compact, blocks=even)}
    return {label: one for label, one in found.items() if one != tuning
            and -(-one.blocks // 132) * (shared_bytes(spec, one) + 1024) <= 228 * 1024}


def varied_prefix(spec: Any, rows: int) -> dict[str, Any]:
    """The same of what reads the shared keys."""
    from relaxpack.schedules.kernels.cuda.attention_prefix import prefix_tuning
    from relaxpack.schedules.kernels.cuda.attention_prefix_hopper import HopperPrefixTuning, hopper_prefix_tuning
    if hopper_prefix_tuning(spec, rows, "sm_90a") is None:
        return {"h": HopperPrefixTuning(16)}
    return {"2": prefix_tuning(spec, rows, "sm_90a"), **({"h8": HopperPrefixTuning(8)} if rows in (8, 32) else {})}


def coverage_specs(spec: Any) -> dict[str, Any]:
    """Query heads over 8 KV heads (4 of head_dim 256), pages of 16 and 64, a window of 1024."""
    found = {f"d{dim}_p{page}": spec(32 if dim < 256 else 16, 8 if dim < 256 else 4, dim, page, 32768 // page)
             for dim in (64, 96, 128, 256) for page in (16, 64)}
    return found | {f"d{dim}_p16_w1024": spec(32, 8, dim, 16, 2048, window=1024) for dim in (64, 128)}


def build(folder: Path, only: str) -> None:
    from relaxpack.kernel_spec import LinearSpec
    from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention, spread_attention
    from relaxpack.schedules.kernels.cuda.attention_decode_tuning import spread_tuning
    from relaxpack.schedules.kernels.cuda.linear import linear
    from relaxpack.schedules.kernels.cuda.rope_append import rope_append
    from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
    from relaxpack.weight_format import FORMATS
    from tests.helpers import attention_builds as builds

    kernels: dict[str, tuple[Any, Any]] = {}
    for model, spec in {"8b": builds.LLAMA_8B, "1b": builds.LLAMA_1B}.items():
        kernels[f"rope.{model}"] = spec, rope_append(spec)
        kernels[f"decode.{model}"] = spec, decode_attention(spec)
        for rows in sorted({1, *BUCKETS, *(rows for rows, _, _ in SHARED)}):
            kernels[f"spread.{model}.{rows}"] = spec, spread_attention(spec, rows)
            for variant, tuning in varied(spec, spread_tuning(spec, rows, "sm_90a")).items():
                if variant in VARIANTS.get(rows, ()):
                    kernels[f"spread.{model}.{rows}@{variant}"] = spec, spread_attention(spec, rows, tuning=tuning)
        for rows in sorted({rows for rows, _, _ in SHARED}):
            for variant, prefix in varied_prefix(spec, rows).items():
                kernels[f"spread.{model}.{rows}@{variant}"] = spec, spread_attention(spec, rows, prefix=prefix)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        for rows in BUCKETS:
            kernels[f"fused.{model}.{rows}"] = spec, rope_append_attention(spec, rows)
            for name, n, k in (("qkv", width, HIDDEN[model]), ("o", HIDDEN[model], spec.num_heads * spec.head_dim)):
                kernels[f"{name}.{model}.{rows}"] = spec, linear(
                    LinearSpec(n, k, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=rows), "sm_90a")
    for name, spec in coverage_specs(builds.spec).items():
        kernels[f"alone.{name}"] = spec, decode_attention(spec)
        if spec.window is None:
            kernels[f"spread.{name}"] = spec, spread_attention(spec, 16)
    builds.build(folder, "sm_90a", kernels, only)


class DecodeBench(Bench):
    def candidates(self, model: str, batch: int) -> dict[str, tuple[str, ...]]:
        spread = {name.replace(f".{model}.{batch}", ""): (f"rope.{model}", name) for name in self.spread(model, batch)}
        return {**spread, "fused": (f"fused.{model}.{batch}",)}

    def spread(self, model: str, batch: int) -> list[str]:
        """The kernel of the bucket and its variants."""
        return [name for name in self.library.names(f"spread.{model}.") if name.split("@")[0].split(".")[2] == str(batch)]

    def check_all(self) -> None:
        for name in self.library.names("spread."):
            error, complaints = self.dev.check_spread(self.library, name)
            for complaint in complaints:
                self.require(False, complaint)
            self.record(kind="numbers", kernel=name, error=error)
        for name in (*self.library.names("decode."), *self.library.names("alone.")):
            spec, worst = self.library.spec(name), 0.0
            for lengths in ([1, 15, 16, 17, 63, 64, 65, 700, 0, 129], [8000, 1, 77], [3] * 70):
                case = self.dev.PagedCase(spec, lengths)
                launch = self.library.prepare(name, case.buffers(1))
                launch()
                different = self.dev.other_bits(launch, case.y)
                self.require(different == 0, f"{name} {lengths[:4]}: {different} of {self.dev.REPEATS} repeats differ")
                worst = max(worst, self.dev.relative_error(case.y, case.reference(1)))
            self.require(worst < 4e-3, f"{name}: error {worst:.2e}")
            self.record(kind="numbers", kernel=name, error=worst)

    def time_shared(self, model: str, rows: int, shared: int, own: int) -> None:
        """rope_append and attention of a layer, alone in a graph."""
        spec = self.library.spec(f"rope.{model}")
        token = spec["num_kv_heads"] * spec["head_dim"] * 4
        layers = max(4, min(32, math.ceil(400e6 / ((shared + rows * own) * token)) // 2 * 2))
        step = self.dev.DecodeStep(spec, [shared + own - i % 7 for i in range(rows)], layers, shared=[shared] * rows)
        held = [{**step.buffers(layer), "q": self.torch.empty_like(step.y)} for layer in range(layers)]
        common = {"kind": "shared", "model": model, "batch": rows, "shared": shared, "own": own}
        kinds = {"none": (f"rope.{model}", f"decode.{model}"), "fused": (f"fused.{model}.{rows}",)}
        kinds |= {name: (f"rope.{model}", name) for name in self.spread(model, rows)}
        expected = None
        for kernel, names in kinds.items():
            if names[0] not in self.library:
                continue
            step.y.fill_(float("nan"))
            turns = math.ceil(MOST / layers)
            calls = [self.library.prepare(name, held[layer]) for layer in range(layers) for name in names] * turns
            us = self.dev.graph_time([lambda calls=calls: [call() for call in calls]], 15) / layers / turns * 1e6
            expected = step.y.clone() if expected is None else expected
            error = self.dev.relative_error(step.y, expected.double())
            self.require(error < 6e-3, f"{kernel} {rows} x {shared}+{own}: differs from the first by {error:.2e}")
            self.record(**common, kernel=kernel, us=us, GBps=(shared + rows * own) * token / us / 1e3, difference=error)

    def time_long(self, model: str, rows: int, length: int) -> None:
        """Split and merge alone, no RoPE: what the share of a plain read is said of."""
        spec, bucket = self.library.spec(f"rope.{model}"), bucket_of(rows)
        moved = rows * length * spec["num_kv_heads"] * spec["head_dim"] * 4
        layers = max(2, math.ceil(400e6 / moved) // 2 * 2)
        case = self.dev.PagedCase(spec, [length] * rows, layers=layers)
        names = [f"decode.{model}", *self.spread(model, bucket)]
        calls = {name: [self.library.prepare(name, case.buffers(layer)) for layer in range(layers)] for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(5):                                # in turns: a warm GPU is a slower one
            for name in names:
                times[name].append(self.dev.graph_time(calls[name] * math.ceil(MOST / layers), 10) * 1e6)
        for name in names:
            us = sorted(times[name])[2]
            self.record(kind="long", model=model, batch=rows, length=length, kernel=name, us=us, GBps=moved / us / 1e3,
                        share=moved / us * 1e6 / self.ceiling, fastest=min(times[name]), slowest=max(times[name]))

    def time_coverage(self, name: str, rows: int, length: int) -> None:
        from benchmarks.gpu.attention_times import sdpa_decode
        spec = self.library.spec(name)
        seen = min(length, spec["window"] or length)
        moved = rows * seen * spec["num_kv_heads"] * spec["head_dim"] * 4
        held = rows * length * spec["num_kv_heads"] * spec["head_dim"] * 4
        layers = max(2, min(64, math.ceil(400e6 / held) // 2 * 2))
        case = self.dev.PagedCase(spec, [length] * rows, layers=layers)
        calls = [self.library.prepare(name, case.buffers(layer)) for layer in range(layers)]
        us = self.dev.graph_time(calls * math.ceil(MOST / layers), 10) * 1e6
        error = self.dev.relative_error(case.y[:2], case.reference(layers - 1)[:2])
        self.require(error < 4e-3, f"{name} {rows} x {length}: error {error:.2e}")
        values = {} if spec["window"] else {"sdpa_us": sdpa_decode(case, layers) * 1e6}
        self.record(kind="coverage", kernel=name, batch=rows, length=length, us=us, GBps=moved / us / 1e3,
                    share=moved / us * 1e6 / self.ceiling, error=error, **values)

    def run_parts(self, parts: list[str]) -> None:
        from benchmarks.gpu.attention_times import read_bandwidth
        self.ceiling = read_bandwidth()
        self.record(kind="ceiling", GBps=self.ceiling / 1e9)
        work: list[Any] = []
        if "check" in parts:
            work.append(self.check_all)
        if "shared" in parts:
            work += [lambda m=m, c=c: self.time_shared(m, *c) for c in SHARED for m in MODELS if self.spread(m, c[0])]
        if "long" in parts:
            work += [lambda m=m, c=c: self.time_long(m, *c) for c in LONG for m in MODELS if self.spread(m, bucket_of(c[0]))]
        if "chain" in parts:
            work += [lambda m=m, c=c: self.time_case(m, *c) for c in CHAIN for m in MODELS if self.spread(m, c[0])]
        if "coverage" in parts:
            work += [lambda n=n, c=c: self.time_coverage(n, *c) for c in COVERAGE for n in self.library.names("alone.")]
        for one in work:
            if time.monotonic() > self.end:
                self.record(kind="stopped")
                return
            one()
            self.torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build")
    command.add_argument("folder", type=Path)
    command.add_argument("--only", default="", help="parts of kernel names, with commas between")
    command = commands.add_parser("run")
    command.add_argument("folder", type=Path)
    command.add_argument("--out", type=Path, required=True, help="JSON file, written after every row")
    command.add_argument("--limit", type=float, default=100, help="seconds after which nothing new is begun")
    command.add_argument("--parts", default="check,long,shared,chain,coverage")
    args = parser.parse_args()
    if args.command == "build":
        build(args.folder, args.only)
        return 0
    bench = DecodeBench(args.folder, args.out, args.limit)
    bench.run_parts(args.parts.split(","))
    print("FAILURES:" if bench.failures else "all checks passed", *bench.failures, sep="\n")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
