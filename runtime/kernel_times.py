"""Times of the kernels of a decode step on this machine's CPU, in launch order, by an instrument in TVM's VM.

Each kernel is timed on its own between two calls of Python, so small ones look a microsecond or two slower than they
are. The best of several steps counts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from relaxpack.dist.bundle import Bundle
from relaxpack.runtime.load import load_runner
from relaxpack.runtime.model_runner import CpuModelRunner
from relaxpack.runtime.step_plan import SequenceStep, StepPlan


class _Stopwatch:
    def __init__(self, names: set[str]) -> None:
        self.names, self.times = names, list[tuple[str, float]]()
        self._start = 0.0

    def __call__(self, func: Any, name: str, before_run: bool, ret_value: Any, *args: Any) -> None:
        if name in self.names:
            if before_run:
                self._start = time.perf_counter()
            else:
                self.times.append((name, time.perf_counter() - self._start))


def decode_kernel_times(path: Path, names: set[str], context: int, steps: int = 12) -> list[tuple[str, float]]:
    """(kernel, seconds) in launch order for one sequence with `context` tokens, by the bundle's best CPU target."""
    bundle = Bundle.open(path)
    pages = -(-(context + 1) // bundle.manifest.model_info.page_size)
    runner = load_runner(bundle, "cpu", num_pages=pages + 1)
    assert isinstance(runner, CpuModelRunner)
    watch = _Stopwatch(names)
    step = StepPlan((SequenceStep([1], context - 1, list(range(1, pages + 1)), [0]),))
    runner.forward(step)
    runner.instrument(watch)
    best: list[tuple[str, float]] = []
    for _ in range(steps):
        watch.times = []
        runner.forward(step)
        best = [(name, min(seconds, known)) for (name, seconds), (_, known) in zip(
            watch.times, best or watch.times, strict=True)]
    return best
