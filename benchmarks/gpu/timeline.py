"""On a GPU machine: when each kernel of a captured step starts and ends, read by CUPTI (through torch's profiler).

    PYTHONPATH=.:SITE python benchmarks/gpu/timeline.py FOLDER --model llama-3.2-1b --batches 1,8 --out RESULT.json

Gives the step, the sum of its kernels' times, the time in which no kernel ran, and per kernel how much the step grew by it:
from the end of the kernels before to its own end. Kernels that start early (dependent launch) overlap, so the times alone
add up to more than the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from run_models import Pages, load, make_parameters

from relaxpack.runtime.step_plan import SequenceStep

STEPS = 12


def kernels_of_steps(runner: Any, batch: int, context: int) -> list[tuple[str, float, float]]:
    """(name, start, end) in microseconds of every kernel of STEPS decode steps, in order of their ends."""
    pages = Pages(runner)
    tables = [pages.take(context + STEPS + 8) for _ in range(batch)]

    def step(k: int) -> None:
        runner.decode([SequenceStep([k + 1], context + k, table, [0]) for table in tables])
    for k in range(3):
        step(k)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for k in range(STEPS):
            step(3 + k % 4)
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    found = [(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") == "kernel"]
    return sorted(found, key=lambda e: e[2])


def split(kernels: list[tuple[str, float, float]]) -> list[list[tuple[str, float, float]]]:
    """By step: equally many kernels in each."""
    each, rest = divmod(len(kernels), STEPS)
    if rest:
        raise SystemExit(f"{len(kernels)} kernels in {STEPS} steps")
    return [kernels[i * each:(i + 1) * each] for i in range(STEPS)]


def summary(steps: list[list[tuple[str, float, float]]]) -> dict[str, Any]:
    rows = []
    for kernels in steps:
        end, idle, grown = kernels[0][1], 0.0, []
        for _, start, stop in kernels:
            idle += max(0.0, start - end)
            grown.append(max(0.0, stop - end))
            end = max(end, stop)
        rows.append({"step_us": end - kernels[0][1], "kernels_us": sum(b - a for _, a, b in kernels), "idle_us": idle,
                     "grown": grown})
    names = [name for name, _, _ in steps[0]]
    by_name: dict[str, list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    for i, name in enumerate(names):
        by_name[name].append(statistics.median(row["grown"][i] for row in rows))
        alone[name].append(statistics.median(step[i][2] - step[i][1] for step in steps))
    return {"kernels": len(names), **{key: round(statistics.median(row[key] for row in rows), 2)
                                      for key in ("step_us", "kernels_us", "idle_us")},
            "by_kernel": [{"name": name, "count": len(grown), "step_grows_us": round(statistics.mean(grown), 2),
                           "total_us": round(sum(grown), 1), "own_us": round(statistics.mean(alone[name]), 2)}
                          for name, grown in sorted(by_name.items(), key=lambda item: -sum(item[1]))]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    stem = args.folder / f"{args.model}-{args.weights}"
    description = json.loads(Path(f"{stem}.json").read_text())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")       # CUPTI must be there before graphs are made
    tensors, _ = make_parameters(description)
    runner = load(Path(f"{stem}.so"), description, tensors, 8192)
    result: dict[str, Any] = {"model": args.model, "weights": args.weights, "context": args.context, "batches": {}}
    for batch in map(int, args.batches.split(",")):
        found = summary(split(kernels_of_steps(runner, batch, args.context)))
        result["batches"][batch] = found
        args.out.write_text(json.dumps(result, indent=1))
        print(args.model, args.weights, "batch", batch, {k: v for k, v in found.items() if k != "by_kernel"})
        for row in found["by_kernel"][:14]:
            print(f"   {row['count']:4d} x {row['step_grows_us']:8.2f} us (own {row['own_us']:8.2f}) {row['name']}",
                  flush=True)


if __name__ == "__main__":
    main()
