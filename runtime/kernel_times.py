"""Times of the kernels of a decode step on this machine, in launch order, by an instrument in TVM's VM.

On a CPU each kernel is timed where it stands in the step, between two calls of Python (small ones look a microsecond or two
slower than they are), and the best of several steps counts. On a GPU a kernel is short against its launch, so where the step
first comes to it, it is run some times by itself between two events of the device, with the caches flushed before each run
(that also hides the launch). What two events cost with nothing between them is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
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


class _Largest:
    """Remembers the kernel call that reads the largest weight."""

    def __init__(self, names: set[str], library: Library) -> None:
        self.names, self._library, self.name, self.bytes = names, library, "", 0
        self._arguments: tuple[Any, ...] = ()

    def __call__(self, func: Any, name: str, before_run: bool, ret_value: Any, *args: Any) -> None:
        size = max((_bytes(a) for a in args if self._library.is_parameter(a)), default=0)
        if name in self.names and before_run and 0 < size >= self.bytes:   # of two readers of a table the head
            self.name, self.bytes, self._arguments = name, size, args

    def again(self) -> Callable[[], object]:
        """Runs it on copies of all its tensors but the weights, so that nothing of a step is written to."""
        kernel, library = self._library.kernel(self.name), self._library
        arguments = [library.copy_of(a) if _bytes(a) and not library.is_parameter(a) else a for a in self._arguments]
        return lambda: kernel(*arguments)


def _bytes(argument: Any) -> int:
    shape = getattr(argument, "shape", None)
    return 0 if shape is None else prod(int(d) for d in shape) * int(argument.dtype.itemsize)


class TimedAlone:
    """Seconds of each kernel run by itself on the arguments of its first call; later calls of it count the same. `flush`
    puts other things into the caches; None: `flush_bytes` are written."""

    def __init__(self, names: set[str], library: Library, flush_bytes: int,
                 flush: Callable[[], object] | None = None) -> None:
        self.names, self._library, self._flush_bytes, self._flush = names, library, flush_bytes, flush
        self.times = Times()
        self._known: dict[str, float] = {}

    def __call__(self, func: Any, name: str, before_run: bool, ret_value: Any, *args: Any) -> None:
        if name in self.names and before_run:
            if name not in self._known:
                self._known[name] = self._library.time_kernel(name, args, REPEATS, self._flush_bytes, self._flush)
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
        # Written bytes would have to leave the cache before what a kernel reads can come; bytes that were read would not.
        largest = _Largest(names, runner.library)
        runner.library.instrument(largest)
        runner.forward(step)
        flush = largest.again() if largest.bytes >= flush_bytes else None
        each = TimedAlone(names, runner.library, flush_bytes, flush)
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
