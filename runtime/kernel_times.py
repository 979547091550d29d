"""Times of the kernels of a decode step on this machine, in launch order, by an instrument in TVM's VM.

On a CPU each kernel is timed where it stands in the step, between two calls of Python (small ones look a microsecond or two
slower than they are), and the best of several steps counts. On a GPU a kernel is short against its launch, so where the step
first comes to it, it is run some times by itself between two events of the device, with the caches flushed before each run
(that also hides the launch). Such a time holds what an event costs, one to two microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relaxpack.dist.bundle import Bundle
from relaxpack.runtime.load import load_runner
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import Library

FLUSH_BYTES = 256 << 20     # more than the L2 of any GPU we build for
REPEATS = 20
Times = list[tuple[str, float]]


class _Stopwatch:
    """Seconds of each kernel where it stands."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.times = names, Times()
        self._start = 0.0

    def __call__(self, func: Any, name: str, before_run: bool, ret_value: Any, *args: Any) -> None:
        if name in self.names:
            if before_run:
                self._start = time.perf_counter()
            else:
                self.times.append((name, time.perf_counter() - self._start))


class TimedAlone:
    """Seconds of each kernel run by itself on the arguments of its first call; later calls of it count the same."""

    def __init__(self, names: set[str], library: Library, flush_bytes: int) -> None:
        self.names, self._library, self._flush_bytes = names, library, flush_bytes
        self.times = Times()
        self._known: dict[str, float] = {}

    def __call__(self, func: Any, name: str, before_run: bool, ret_value: Any, *args: Any) -> None:
        if name in self.names and before_run:
            if name not in self._known:
                self._known[name] = self._library.time_kernel(name, args, REPEATS, self._flush_bytes)
            self.times.append((name, self._known[name]))


def decode_kernel_times(path: Path, names: set[str], context: int, steps: int = 12, kind: str = "cpu",
                        alone: bool | None = None, flush_bytes: int = FLUSH_BYTES) -> Times:
    """(kernel, seconds) in launch order for one sequence with `context` tokens. `kind`: of the target that is run.
    `alone`: time kernels by themselves; None: on a GPU."""
    bundle = Bundle.open(path)
    pages = -(-(context + 1) // bundle.manifest.model_info.page_size)
    runner = load_runner(bundle, kind, num_pages=pages + 1, graphs=False)
    step = StepPlan((SequenceStep([1], context - 1, list(range(1, pages + 1)), [0]),))
    runner.forward(step)
    if alone is None:
        alone = kind != "cpu"
    if alone:
        each = TimedAlone(names, runner.library, flush_bytes)
        runner.library.instrument(each)
        runner.forward(step)
        return each.times
    watch = _Stopwatch(names)
    runner.library.instrument(watch)
    best: Times = []
    for _ in range(steps):
        watch.times = []
        runner.forward(step)
        best = _best(watch.times, best)
    return best


def _best(times: Sequence[tuple[str, float]], known: Sequence[tuple[str, float]]) -> Times:
    return [(name, min(seconds, before)) for (name, seconds), (_, before) in zip(times, known or times, strict=True)]
