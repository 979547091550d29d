"""Decode and prefill of several CPU bundles in turns, so that what else runs on the machine hits all alike.

    python benchmarks/compare_bundles.py a.bundle b.bundle [--context 200] [--prefill 512] [--rounds 15]

Prints the best and the median of each, in milliseconds: for the effect of a pass, build with and without it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from relaxpack.dist.bundle import Bundle
from relaxpack.runtime.load import load_runner
from relaxpack.runtime.step_plan import SequenceStep, StepPlan

DECODE_STEPS = 10     # in one measurement


def cases(path: Path, context: int, prefill: int) -> dict[str, Callable[[], None]]:
    """Name → one measurement's work."""
    bundle = Bundle.open(path)
    pages = list(range(1, 2 + max(context, prefill) // bundle.manifest.model_info.page_size))
    runner = load_runner(bundle, "cpu", num_pages=len(pages) + 1)
    one = StepPlan((SequenceStep([1], context - 1, pages, [0]),))
    prompt = StepPlan((SequenceStep([1 + i % 100 for i in range(prefill)], 0, pages, [prefill - 1]),))

    def decode() -> None:
        for _ in range(DECODE_STEPS):
            runner.forward(one)

    def whole_prompt() -> None:
        runner.forward(prompt)

    return {f"decode at {context}": decode, f"prefill of {prefill}": whole_prompt}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    work = {path: cases(path, args.context, args.prefill) for path in args.bundles}
    for name in next(iter(work.values())):
        times: dict[Path, list[float]] = {path: [] for path in args.bundles}
        for turn in range(args.rounds + 1):
            order = args.bundles if turn % 2 else args.bundles[::-1]
            for path in order:
                start = time.perf_counter()
                work[path][name]()
                if turn:                                  # the first one warms up
                    times[path].append((time.perf_counter() - start) / (DECODE_STEPS if "decode" in name else 1))
        for path in args.bundles:
            print(f"{name:16} {path.name:40} best {min(times[path]) * 1e3:8.3f} ms, median "
                  f"{statistics.median(times[path]) * 1e3:8.3f} ms", flush=True)


if __name__ == "__main__":
    main()
