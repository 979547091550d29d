"""What each pass is worth: kernels, bytes and memory of a step for published shapes, without weights.

    python benchmarks/passes.py --left-out [--model Llama-3.2-1B] [--target cpu|cuda:sm_90a]   each pass left out in turn
    python benchmarks/passes.py --added                                                        one pass after the other
    python benchmarks/passes.py --plans                                                        memory plans beside TVM's

Compiles no code, so it runs anywhere; the tables of docs/passes.md are its output. Bytes are those of the step table
(`passes/step_table.py`) at batch 1 and a context of 1024; kernels that are not fused count what they read and write.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from relaxpack.compile.kernels import attention_spec, kernel_provider
from relaxpack.compile.options import pipeline_config
from relaxpack.passes.config import ON_REQUEST, OPTIONAL
from relaxpack.passes.memory_plan import PLAN, arena_bytes
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.passes.step_table import step_table
from relaxpack.relax_models.export import BuildLimits, export_model
from relaxpack.schedules.rest import rest_rule
from relaxpack.step_costs import floor_bytes
from relaxpack.target import parse_target
from tests.helpers.model_shapes import SHAPES, formats_of

CONTEXT = 1024


@dataclass
class Measured:
    decode_kernels: int
    prefill_kernels: int
    decode_bytes: int
    prefill_flops: int
    floor: int
    arena: int
    live: int
    unscheduled: int
    seconds: float


# The optional passes in the order in which they run.
ORDER = ("ShareRopeTable", "FoldConstant", "EliminateCommonSubexpr", "SelectRowsEarly", "FoldScales",
         "CombineParallelMatmul", "FuseEpilogues", "FuseAddNorm", "FuseNormLinear", "FuseRopeAppendAttention", "FuseOps",
         "PlanMemory", "RewriteCUDAGraph")
assert sorted(ORDER) == sorted(OPTIONAL)
provider_for = functools.cache(lambda target: kernel_provider(parse_target(target)))     # kernels are made once


def measure(model: str, target: str, disabled: Iterable[str], tvm_plan: bool = False,
            enabled: Iterable[str] = (), only_batch_1: bool = False) -> Measured:
    """One run of all phases. `tvm_plan`: StaticPlanBlockMemory in the place of PlanMemory. `only_batch_1`: a GPU gets no
    other bucket, which is enough where decode is looked at."""
    config, spec = SHAPES[model], parse_target(target)
    cpu = spec.kind == "cpu"
    activation, kv = ("float32", "float16") if cpu else ("bfloat16", "bfloat16")
    limits = BuildLimits(4096)
    formats = formats_of(config, "q8_0", "q4_1") if cpu else formats_of(config, "bf16", "bf16")
    start = time.perf_counter()
    pipeline = replace(pipeline_config(spec, limits, frozenset(disabled)), enabled=frozenset(enabled))
    if only_batch_1 and not cpu:
        pipeline = replace(pipeline, decode_buckets=(1,), prefill_buckets=())
    all_phases = phases(provider_for(target), attention_spec(config, limits, activation, kv), formats, pipeline,
                        rest_rule(spec))
    if tvm_plan:
        from tvm import relax

        all_phases = [(name, [relax.transform.StaticPlanBlockMemory() if one.info.name == "PlanMemory" else one
                              for one in passes]) for name, passes in all_phases]
    steps: dict[str, list[dict[str, object]]] = {}
    final = run_phases(export_model(config, limits, activation, kv, device_sampling=not cpu), spec.to_tvm(), all_phases,
                       lambda name, mod, _: steps.update(step_table(mod)) if name == "lower" else None)
    seconds = time.perf_counter() - start
    plan = json.loads(str(final.attrs[PLAN]))
    decode = steps["decode" if cpu else "decode_1"]

    def cost(calls: list[dict[str, object]], kind: str, rows: int, context: int) -> int:
        return sum(c.get(f"weight_{kind}", 0) + (rows if c["rows"] == "t" else 1) * (
            c[f"row_{kind}"] + context * c[f"context_{kind}"]) for c in calls)  # type: ignore[operator]

    sources = [str(f.attrs.get("relaxpack.source")) for f in final.functions.values()
               if hasattr(f, "attrs") and f.attrs and "relaxpack.source" in f.attrs]
    return Measured(len(decode), len(steps["prefill"]), cost(decode, "bytes", 1, CONTEXT),
                    cost(steps["prefill"], "flops", 512, 256), floor_bytes(decode, 1, CONTEXT), arena_bytes(plan),
                    max(p["live_bytes"] for p in plan.values()), sum(s == "fallback" for s in sources), seconds)


def print_left_out(model: str, target: str) -> None:
    whole = measure(model, target, ())
    print(f"\n{model}, {target}: {whole}; {whole.decode_bytes / whole.floor:.4f} of the floor\n", flush=True)
    print("| left out | kernels decode | kernels prefill | MB decode | GFLOP prefill | intermediates MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    _print_row("nothing", whole)
    for name in ORDER:
        _print_row(name, measure(model, target, (name,)))
    _print_row("all of them (`-O0`)", measure(model, target, ORDER))
    for name in ON_REQUEST:
        _print_row(f"nothing, {name} added", measure(model, target, (), enabled=(name,)))


def _print_row(name: str, m: Measured) -> None:
    print(f"| {name} | {m.decode_kernels} | {m.prefill_kernels} | {m.decode_bytes / 1e6:.1f} | "
          f"{m.prefill_flops / 1e9:.1f} | {m.arena / 1e6:.2f} |", flush=True)


def print_added(models: Iterable[str], target: str) -> None:
    """One table: each row adds a pass to those above it."""
    models = list(models)
    print(f"\n{target}\n\n| pass added | " + " | ".join(f"{m} kernels | MB | of floor" for m in models) + " |")
    print("| --- |" + " --- | --- | --- |" * len(models))
    for count in range(len(ORDER) + 1):
        cells = []
        for model in models:
            m = measure(model, target, ORDER[count:], only_batch_1=True)
            cells += [str(m.decode_kernels), f"{m.decode_bytes / 1e6:.1f}", f"{m.decode_bytes / m.floor:.4f}"]
        print(f"| {ORDER[count - 1] if count else 'none (`-O0`)'} | {' | '.join(cells)} |", flush=True)


def print_plans(model: str, target: str) -> None:
    whole, theirs = measure(model, target, ()), measure(model, target, (), tvm_plan=True)
    print(f"| {model} | {target} | {theirs.arena / 1e6:.2f} | {whole.arena / 1e6:.2f} | "
          f"{whole.live / 1e6:.2f} | {whole.arena / whole.live:.3f} | {theirs.arena / whole.arena:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", choices=list(SHAPES))
    parser.add_argument("--target", action="append")
    for name, what in (("left-out", "each pass left out in turn"), ("added", "one pass after the other"),
                       ("plans", "memory plans beside TVM's")):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    args = parser.parse_args()
    for target in args.target or ["cpu", "cuda:sm_90a"]:
        models = args.model or list(SHAPES)
        if args.added:
            print_added(models, target)
        for model in models:
            if args.left_out or not (args.added or args.plans):
                print_left_out(model, target)
            if args.plans:
                print_plans(model, target)


if __name__ == "__main__":
    main()
