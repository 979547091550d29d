"""Milliseconds of a decode step by what is asked of its sampling, the engine and its Python in the loop, over a GPU bundle.

    python benchmarks/gpu/sampling_steps.py BUNDLE --out STEPS.json [--batches 1,32] [--limit SECONDS]

Before anything is timed, greedy tokens with penalties must equal those of the host sampler. The results are written after
each of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from relaxpack.dist.bundle import Bundle
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.load import load_runner
from relaxpack.runtime.sampling_params import Grammar, SamplingParams

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k, top_p": {"top_k": 40, "top_p": 0.9},
    "penalties": {"temperature": 0.0, **PENALTIES},
    "penalties, top_p": {"top_p": 0.9, **PENALTIES},
    "bias, min_tokens": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(20), 1.0), "min_tokens": 30,
                         "stop_token_ids": (5,)},
    "typical_p": {"typical_p": 0.9},
    "grammar": {"temperature": 0.0, "grammar": Grammar("regex", "even or odd")},
    "top_logprobs": {"temperature": 0.0, "logprobs": 5},
}
ON_HOST = ("greedy", "penalties", "top_k, top_p", "grammar", "top_logprobs")        # and on the host sampler, for comparison


class EvenOrOdd:
    """A grammar that costs nothing to follow, so that the time is that of its mask's way to the device."""

    complete = False

    def __init__(self, vocab: int) -> None:
        self.masks = [np.arange(vocab) % 2 == k for k in range(2)]
        self.packed = [np.packbits(mask, bitorder="little") for mask in self.masks]
        self.turn = 0

    def mask(self) -> np.ndarray:
        return self.masks[self.turn]

    def bits(self) -> np.ndarray:
        return self.packed[self.turn]

    def accept(self, token_id: int) -> bool:
        self.turn = 1 - self.turn
        return True

    def fork(self) -> EvenOrOdd:
        other = EvenOrOdd(len(self.masks[0]))
        other.turn = self.turn
        return other


def engine(runner: CudaModelRunner, on_device: bool) -> Engine:
    return Engine(runner, executor=CudaExecutor(runner) if on_device else HostExecutor(runner), prefix_caching=False,
                  make_constraint=lambda grammar: EvenOrOdd(runner.vocab_size))


def step_ms(made: Engine, batch: int, settings: dict[str, Any], steps: int) -> tuple[float, list[list[int]]]:
    """Median time of a step after the first few, and the tokens."""
    rng = np.random.default_rng(batch)
    requests = [made.add(rng.integers(0, made.runner.vocab_size, 16).tolist(),
                         SamplingParams(**settings, seed=i, max_tokens=steps, ignore_eos=True)) for i in range(batch)]
    took = []
    while made.has_work:
        begin = time.perf_counter()
        made.step()
        took.append(time.perf_counter() - begin)
    return float(np.median(took[steps // 4:-2])) * 1e3, [r.sequences[0].output_ids for r in requests]


def measure(runner: CudaModelRunner, batches: Sequence[int] = (1, 32), steps: int = 48,
            done: Callable[[dict[str, Any]], bool] = lambda result: True) -> dict[str, Any]:
    """`done` is called after each number; when it says False the rest is left out."""
    result: dict[str, Any] = {"steps": steps, "vocab_size": runner.vocab_size, "device": {}, "host": {}}
    for batch in [b for b in batches if b <= runner.max_batch]:
        device, host = (step_ms(engine(runner, on), batch, SETTINGS["penalties"], 12)[1] for on in (True, False))
        if device != host:
            raise SystemExit(f"batch {batch}: tokens with penalties differ from those of the host sampler")
        for where, names in (("device", tuple(SETTINGS)), ("host", ON_HOST)):
            for name in names:
                made = engine(runner, where == "device")
                result[where].setdefault(name, {})[str(batch)] = min(
                    step_ms(made, batch, SETTINGS[name], steps)[0] for _ in range(2))
                if not done(result):
                    return result
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--limit", type=float, default=60.0)
    args = parser.parse_args()
    begin = time.monotonic()
    runner = load_runner(Bundle.open(args.bundle), "cuda", 320)
    if not isinstance(runner, CudaModelRunner):
        parser.error(f"{args.bundle} has nothing for a GPU")

    def write(result: dict[str, Any]) -> bool:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        return time.monotonic() - begin < args.limit

    found = measure(runner, [int(b) for b in args.batches.split(",")], done=write)
    for where in ("device", "host"):
        for name, times in found[where].items():
            print(f"{where:8s}{name:20s}" + "".join(f"{batch:>5s}: {ms:7.3f} ms" for batch, ms in times.items()))


if __name__ == "__main__":
    main()
