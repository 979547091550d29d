"""Requests that begin alike, through the whole engine, with the second graph of the decode buckets and without: it is taken,
the logits agree, greedy tokens are equal but for ties, what a step takes, and what the second graphs cost at the start.

    python benchmarks/gpu/build_models.py FOLDER --model llama-3.2-1b --max-batch 32 --enable SpreadDecode   # with nvcc
    python benchmarks/gpu/shared_steps.py FOLDER --model llama-3.2-1b --out FILE                             # on the GPU
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from check_bundle import first_gap
from run_models import Pages, load, make_parameters

from relaxpack.runtime import cuda_memory
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.spread import SPREAD, Spread
from relaxpack.runtime.step_plan import SequenceStep, StepPlan

OWN = 16
TURNS = 3


def warm_up(runner: CudaModelRunner) -> dict[str, float]:
    """Capture everything; seconds and device bytes of the second graphs, between those of decode and prefill."""
    marks: list[tuple[float, int]] = []

    def note(done: int = 0, total: int = 0) -> None:
        cuda_memory.synchronize()
        marks.append((time.perf_counter(), cuda_memory.free_and_total()[0]))

    note()
    runner.warm_up(note)
    decode = len(runner.buckets["decode"])
    (begin, before), (end, after) = marks[decode], marks[decode + len(runner.buckets.get(SPREAD, ()))]
    return {"seconds": round(marks[-1][0] - marks[0][0], 2), "second_graphs_seconds": round(end - begin, 2),
            "second_graphs_bytes": before - after}


def logits_difference(runner: CudaModelRunner, rows: int, shared: int) -> float:
    """The largest difference of a logit between a step through one graph and through the other."""
    rng, pages = np.random.default_rng(1), Pages(runner)
    common, prefix = rng.integers(0, runner.vocab_size, shared).tolist(), pages.take(shared)
    runner.forward(StepPlan((SequenceStep(common, 0, prefix, [shared - 1]),)))
    tables = [prefix + pages.take(OWN) for _ in range(rows)]
    for table in tables:
        runner.forward(StepPlan((SequenceStep(rng.integers(0, runner.vocab_size, OWN - 1).tolist(), shared, table, [0]),)))
    steps = [SequenceStep([5 + i], shared + OWN - 1, table, [0]) for i, table in enumerate(tables)]
    apart, together = (runner.read_rows(runner.decode(steps, spread=spread)[0], range(rows))
                       for spread in (None, Spread(shared, range(rows))))
    assert np.isfinite(together).all() and np.abs(apart).max() > 0
    return float(np.abs(apart - together).max())


def drive(runner: CudaModelRunner, rows: int, shared: int, new: int) -> dict[str, Any]:
    engine, before = Engine(runner, executor=CudaExecutor(runner), end_token_ids=()), runner.graph_steps[SPREAD]
    rng = np.random.default_rng(7)
    common = rng.integers(0, runner.vocab_size, shared).tolist()
    prompts = [common + rng.integers(0, runner.vocab_size, OWN).tolist() for _ in range(rows)]
    engine.generate([common], SamplingParams(temperature=0.0, max_tokens=1))
    requests = [engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=new)) for prompt in prompts]
    while not all(r.first_token_time for r in requests):
        engine.step()
    begin, had = time.perf_counter(), sum(len(r.sequences[0].output_ids) for r in requests)
    while not any(r.finished for r in requests):
        engine.step()
    seconds, decoded = time.perf_counter() - begin, sum(len(r.sequences[0].output_ids) for r in requests) - had
    while engine.has_work:
        engine.step()
    return {"prompts": prompts, "tokens": [list(r.sequences[0].output_ids) for r in requests],
            "step_ms": seconds / decoded * rows * 1e3, "spread_steps": runner.graph_steps[SPREAD] - before,
            "cached_tokens": engine.metrics.cached_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="32x8192,32x2048,8x8192,32x512", help="sequences x shared tokens")
    args = parser.parse_args()
    stem = args.folder / f"{args.model}-bf16-SpreadDecode"
    description = json.loads(Path(f"{stem}.json").read_text())
    tensors, _ = make_parameters(description)
    both, first = (load(Path(f"{stem}.so"), {**description, "buckets": {
        name: sizes for name, sizes in description["buckets"].items() if with_spread or name != SPREAD}}, tensors, 8192)
        for with_spread in (True, False))
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "model": args.model,
                              "layers": description["info"]["num_layers"], "start": warm_up(both), "cases": []}
    warm_up(first)
    print(result["start"], flush=True)
    failures = []
    for rows, shared in (map(int, case.split("x")) for case in args.cases.split(",")):
        difference = logits_difference(both, rows, shared)
        turns = [(drive(first, rows, shared, 64), drive(both, rows, shared, 64)) for _ in range(TURNS)]
        apart, together = turns[0]
        gaps = [gap for prompt, a, b in zip(apart["prompts"], apart["tokens"], together["tokens"], strict=True)
                if (gap := first_gap(first, prompt, a, b)) is not None]
        row = {"sequences": rows, "shared": shared, "logit_difference": difference, "answers_that_part": len(gaps),
               "largest_gap_where_they_part": max(gaps, default=0.0), "spread_steps": together["spread_steps"],
               "cached_tokens": together["cached_tokens"], "step_ms": round(min(turn[1]["step_ms"] for turn in turns), 4),
               "step_ms_without": round(min(turn[0]["step_ms"] for turn in turns), 4)}
        print(row, flush=True)
        if apart["spread_steps"] or (rows * shared >= 32 * 2048 and not together["spread_steps"]):
            failures.append(f"{rows}x{shared}: {together['spread_steps']} steps with, {apart['spread_steps']} without")
        if not max(gaps, default=0.0) <= 4 * difference + 1e-3:
            failures.append(f"{rows}x{shared}: answers part where logits are {max(gaps):.4f} apart")
        result["cases"].append(row)
        args.out.write_text(json.dumps({**result, "failures": failures}, indent=1) + "\n")
    print("FAILURES:" if failures else "all checks passed", *failures, sep="\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
