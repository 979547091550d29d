"""Time the engine itself: Python per decode step on a device that answers at once, and the NumPy sampler per batch.

    python benchmarks/engine_overhead.py [--batch 64] [--json > benchmarks/results/engine_overhead-$(date +%F).json]

The step number is what a GPU would wait for between two launches; the goal is under 300 us at batch 64.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable

import numpy as np

from relaxpack.bench.report import environment
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampler import SamplingState, sample, sequence_key
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import StepPlan, StepResult, StepSampling


class CountingDevice:
    """Answers every step at once; also the runner, since only its sizes are read."""

    page_size, max_context, vocab_size, prefill_chunk = 16, 1 << 20, 49_152, 8192

    def __init__(self, batch: int, tokens: int) -> None:
        self.max_batch = batch
        self.num_pages = 2 + batch * (tokens // self.page_size + 2)

    def forward(self, plan: StepPlan) -> np.ndarray:
        raise NotImplementedError("steps go through submit")

    def submit(self, plan: StepPlan, sampling: StepSampling) -> CountingDevice:
        self._rows = len(sampling.rows)
        return self

    def result(self) -> StepResult:
        return StepResult([7] * self._rows)


def step_overhead(batch: int, steps: int = 600, prompt: int = 512) -> dict[str, float]:
    """Microseconds per decode step with `batch` running sequences, prefix cache on, page boundaries included.

    On a busy machine mean and p99 are mostly other processes' time; `cpu_mean` is not.
    """
    device = CountingDevice(batch, prompt + steps + 10)
    engine = Engine(device, executor=device, end_token_ids=[2])
    for i in range(batch):
        engine.add([i % 1000 + 3] * prompt, SamplingParams(temperature=0.0, max_tokens=steps + 5))
    while any(not r.sequences[0].output_ids for r in engine._requests.values()):
        engine.step()
    gc.collect()
    times, cpu = [], time.thread_time()
    for _ in range(steps - 5):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    cpu = (time.thread_time() - cpu) / len(times)
    engine.scheduler.check()
    times.sort()
    return {"median": 1e6 * times[len(times) // 2], "mean": 1e6 * sum(times) / len(times),
            "p99": 1e6 * times[int(0.99 * len(times))], "cpu_mean": 1e6 * cpu}


def sampler_time(batch: int, vocab: int, repeat: int = 15, flat: bool = False, **settings: float) -> float:
    """Microseconds to sample one step of `batch` rows, best of `repeat`; `flat`: 95 % of the mass in thousands of
    tokens instead of tens."""
    params = [SamplingParams(seed=i, **settings) for i in range(batch)]     # type: ignore[arg-type]
    states = [SamplingState(p, sequence_key(i, 0), list(range(200)), 100) for i, p in enumerate(params)]
    logits = (3 * np.random.default_rng(0).standard_normal((batch, vocab))).astype(np.float32)
    if not flat:
        logits[:, 100:4100:100] += np.linspace(12, 18, 40, dtype=np.float32)
    return 1e6 * best(lambda: sample(logits, range(batch), states), repeat)


def best(function: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = [step_overhead(args.batch) for _ in range(args.runs)]
    step = min(runs, key=lambda r: r["median"])
    settings: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0.0},
        "greedy + 5 logprobs": {"temperature": 0.0, "logprobs": 5},
        "temperature": {},
        "top_k 50": {"top_k": 50},
        "top_p 0.95": {"top_p": 0.95},
        "top_p 0.95, flat": {"top_p": 0.95, "flat": True},
        "top_k + top_p": {"top_k": 50, "top_p": 0.95},
        "min_p 0.05": {"min_p": 0.05},
        "repetition + top_p": {"repetition_penalty": 1.1, "top_p": 0.95},
    }
    sampler = {
        f"{name}, batch {batch}, vocabulary {vocab}": sampler_time(batch, vocab, **s)
        for vocab in (49_152, 151_936) for batch in (1, args.batch) for name, s in settings.items()
    }
    if args.json:
        print(json.dumps({"batch": args.batch, "step_us": step, "sampler_us": sampler, "environment": environment()},
                         indent=2))
        return
    print(f"engine step at batch {args.batch}: median {step['median']:.0f} us, mean {step['mean']:.0f} us, "
          f"p99 {step['p99']:.0f} us, mean of processor time {step['cpu_mean']:.0f} us (best of {args.runs} runs)")
    for name, value in sampler.items():
        print(f"sampler {name}: {value:.0f} us")


if __name__ == "__main__":
    main()
