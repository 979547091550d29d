"""Whole decode steps with tuning records against without: two builds of a model on the same weights, in turn.

    python benchmarks/gpu/build_models.py OUT --model llama-3.2-1b [--weights q4_1]                              # untuned
    python benchmarks/gpu/build_models.py OUT --model llama-3.2-1b [--weights q4_1] --db seed --gpu "NVIDIA H200"
    PYTHONPATH=.:SITE python benchmarks/gpu/tuned_steps.py OUT --stems llama-3.2-1b-bf16 --out RESULT.json --limit 60

On the GPU machine. Numbers come first: the logits of both must agree with a plain torch forward of the same weights. A round
is some steps of each build; what counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
from run_models import Pages, Reference, load, make_parameters, relative_error

from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import device_for

STEPS, ROUNDS = 24, 9
WRONG = 0.05            # relative error of logits; bfloat16 alone makes 0.01 to 0.02 of it


class Build:
    """One library with its pages. `ids`: tokens by step and sequence."""

    def __init__(self, library: Path, description: dict[str, Any], tensors: list[Any], pages: int) -> None:
        self.runner = load(library, description, tensors, pages)
        self.runner.warm_up()

    def error(self, reference: Reference, prompts: list[list[int]]) -> float:
        """Of a prefill and a decode step of all prompts."""
        pages, worst = Pages(self.runner), 0.0
        tables = [pages.take(len(p) + 8) for p in prompts]
        for upto in (-1, None):
            plan = tuple(SequenceStep(p[:-1] if upto else p[-1:], 0 if upto else len(p) - 1, t, [len(p) - 2 if upto else 0])
                         for p, t in zip(prompts, tables, strict=True))
            rows = self.runner.forward(StepPlan(plan))
            worst = max([worst, *(relative_error(rows[i], reference(p[:upto])[-1]) for i, p in enumerate(prompts))])
        return worst

    def prepare(self, batch: int, context: int) -> None:
        pages = Pages(self.runner)
        self.tables = [pages.take(context + STEPS + 8) for _ in range(batch)]
        self.ids = np.random.default_rng(1).integers(0, self.runner.vocab_size, (STEPS, batch)).tolist()
        self.context = context

    def milliseconds(self) -> float:
        """Of a step, in a run of steps that nobody waits for in between."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for k, ids in enumerate(self.ids):
            self.runner.decode([SequenceStep([token], self.context + k, table, [0])
                                for token, table in zip(ids, self.tables, strict=True)])
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / STEPS


def compare(folder: Path, stem: str, batches: list[int], contexts: list[int], end: float, write: Any) -> dict[str, Any]:
    descriptions = [json.loads((folder / f"{name}.json").read_text()) for name in (stem, f"{stem}-tuned")]
    keys = [[(p["name"], p["shape"], p["dtype"]) for p in one["parameters"]] for one in descriptions]
    assert keys[0] == keys[1], "tuning changes no layout"
    tensors, plain = make_parameters(descriptions[0])
    pages = 64 + max(batches) * (max(contexts) + STEPS + 24) // 16
    builds = [Build(folder / f"{name}.so", one, tensors, pages)
              for name, one in zip((stem, f"{stem}-tuned"), descriptions, strict=True)]
    sources = [str(kernel["source"]) for kernel in descriptions[1]["kernels"]]
    result: dict[str, Any] = {"kernels": len(sources), "tuned_kernels": sum(s.startswith("tuned:") for s in sources)}
    if not any("@q" in p["name"] for p in descriptions[0]["parameters"]):
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, builds[0].runner.vocab_size, n).tolist() for n in (9, 6)]      # of the smallest prefill
        result["errors"] = [build.error(Reference(descriptions[0], plain), prompts) for build in builds]
        assert max(result["errors"]) < WRONG, result["errors"]
    del plain
    result["decode"] = []
    for context in contexts:
        for batch in batches:
            if time.monotonic() > end:
                result["left_out"] = True
                return result
            for build in builds:
                build.prepare(batch, context)
                build.milliseconds()
            rounds = [[build.milliseconds() for build in builds] for _ in range(ROUNDS)]
            untuned, tuned = (statistics.median(times) for times in zip(*rounds, strict=True))
            ratios = sorted(b / a for a, b in rounds)
            result["decode"].append({"batch": batch, "context": context, "untuned_ms": round(untuned, 4),
                                     "tuned_ms": round(tuned, 4), "ratio": round(statistics.median(ratios), 4),
                                     "ratios": [round(ratios[0], 4), round(ratios[-1], 4)]})
            print(stem, result["decode"][-1], flush=True)
            write(stem, result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stems", nargs="+", default=["llama-3.2-1b-bf16", "llama-3.1-8b-bf16"])
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="512")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=90)
    args = parser.parse_args()
    end = time.monotonic() + args.limit
    device_for("cuda")
    results: dict[str, Any] = {"what": "decode steps with tuning records and without, in turn; benchmarks/gpu/tuned_steps",
                               "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                               "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "models": {}}

    def write(stem: str, result: dict[str, Any]) -> None:
        results["models"][stem] = result
        args.out.write_text(json.dumps(results, indent=1) + "\n")

    for stem in args.stems:
        if time.monotonic() < end:
            write(stem, compare(args.folder, stem, [int(b) for b in args.batches.split(",")],
                                [int(c) for c in args.contexts.split(",")], end, write))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
