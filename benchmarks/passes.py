"""What each pass is worth, by leaving it out: kernels, bytes and memory of a step for published shapes, without weights.

    python benchmarks/passes.py [--model Llama-3.2-1B] [--target cpu|cuda:sm_90a] [--markdown]

Compiles no code, so it takes seconds and runs anywhere; the tables of docs/passes.md are its output. Bytes are those of the
step table (`passes/step_table.py`) at batch 1 and a context of 1024; "unfused" kernels count what they read and write.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from relaxpack.compile import kernel_provider, pipeline_config
from relaxpack.lowering import attention_spec
from relaxpack.passes.memory_plan import PLAN, arena_bytes
from relaxpack.passes.pipeline import OPTIONAL, phases, run_phases
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


def measure(model: str, target: str, disabled: Iterable[str], tvm_plan: bool = False) -> Measured:
    """One run of all phases. `tvm_plan`: StaticPlanBlockMemory in the place of PlanMemory."""
    config, spec = SHAPES[model], parse_target(target)
    cpu = spec.kind == "cpu"
    activation, kv = ("float32", "float16") if cpu else ("bfloat16", "bfloat16")
    limits = BuildLimits(4096)
    formats = formats_of(config, "q8_0", "q4_1") if cpu else formats_of(config, "bf16", "bf16")
    start = time.perf_counter()
    all_phases = phases(kernel_provider(spec), attention_spec(config, limits, activation, kv), formats,
                        pipeline_config(spec, limits, frozenset(disabled)), rest_rule(spec))
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", choices=list(SHAPES))
    parser.add_argument("--target", action="append")
    parser.add_argument("--plans", action="store_true", help="only compare memory plans with TVM's")
    args = parser.parse_args()
    for target in args.target or ["cpu", "cuda:sm_90a"]:
        for model in args.model or list(SHAPES):
            whole = measure(model, target, ())
            if args.plans:
                theirs = measure(model, target, (), tvm_plan=True)
                print(f"| {model} | {target} | {theirs.arena / 1e6:.2f} | {whole.arena / 1e6:.2f} | "
                      f"{whole.live / 1e6:.2f} | {whole.arena / whole.live:.3f} | {theirs.arena / whole.arena:.2f} |",
                      flush=True)
                continue
            print(f"\n{model}, {target}: {whole}; {whole.decode_bytes / whole.floor:.4f} of the floor\n", flush=True)
            print("| left out | kernels decode | kernels prefill | MB decode | GFLOP prefill | intermediates MB |")
            print("| --- | --- | --- | --- | --- | --- |")
            for name, out in [("nothing", ()), *((name, (name,)) for name in OPTIONAL), ("all", tuple(OPTIONAL))]:
                m = measure(model, target, out) if out else whole
                print(f"| {name} | {m.decode_kernels} | {m.prefill_kernels} | {m.decode_bytes / 1e6:.1f} | "
                      f"{m.prefill_flops / 1e9:.1f} | {m.arena / 1e6:.2f} |", flush=True)


if __name__ == "__main__":
    main()
