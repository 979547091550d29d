"""The largest activation of a model while it runs on a CPU, with the kernel and the layer it came from: what tells
whether the model fits into float16. By an instrument in TVM's VM, kernel by kernel. And whether its keys and values fit into
e4m3 pages, by what stands in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxpack.dist.canary import CanarySet
from relaxpack.runtime.model_runner import CpuModelRunner
from relaxpack.runtime.vm import as_array

LARGEST_E4M3 = 0x7E         # 448


@dataclass(frozen=True)
class Extreme:
    """`layer`: attention kernels that ran before in this step, less one; None before the first."""

    value: float
    kernel: str
    layer: int | None

    def __str__(self) -> str:
        where = "before the first attention" if self.layer is None else f"layer {self.layer}"
        return f"a value of {self.value:.3g} in {where}, from {self.kernel}"


class Watch:
    """Keeps the first value beyond any float16, else the largest so far."""

    LIMIT = 65504.0

    def __init__(self) -> None:
        self.extreme: Extreme | None = None
        self._attention = 0

    def __call__(self, func: Any, name: str, before_run: bool, ret_value: Any, *args: Any) -> None:
        if before_run:
            if name.startswith("embedding"):     # a step begins
                self._attention = 0
            return
        if "attention" in name:
            self._attention += 1
        if self.extreme is not None and self.extreme.value > self.LIMIT:
            return
        for argument in args:
            value = _largest(argument)
            if value is not None and (self.extreme is None or value > self.extreme.value):
                self.extreme = Extreme(value, name, self._attention - 1 if self._attention else None)


def _largest(argument: Any) -> float | None:
    """Of activations: float32 matrices, a row for each token. Weights are packed otherwise or are vectors."""
    shape = getattr(argument, "shape", None)
    if shape is None or len(shape) != 2 or str(argument.dtype) != "float32" or 0 in shape:
        return None
    array = np.abs(as_array(argument))
    return float("inf") if not np.isfinite(array).all() else float(array.max())


def beyond_e4m3(runner: Any, canaries: CanarySet) -> str:
    """Which keys or values were cut to 448 when canaries were answered last, in words; empty: none."""
    longest = max(len(canary.prompt_ids) + len(canary.greedy_ids) for canary in canaries.canaries)
    last = min(-(-longest // runner.page_size), runner.num_pages - 1)                   # page 0 is scratch
    pages = runner.read_pages(list(range(1, 1 + last)))                                 # [n, layers, 2, ...]
    cut = ((pages & 0x7F) == LARGEST_E4M3).any(axis=(0, 3, 4, 5))
    if not cut.any():
        return ""
    layer, which = np.argwhere(cut)[0]
    return f"{('keys', 'values')[which]} of layer {layer}"


@contextmanager
def watch_values(runner: CpuModelRunner) -> Iterator[Watch]:
    """Watch every kernel that the runner calls inside the `with`."""
    watch = Watch()
    runner.instrument(watch)
    try:
        yield watch
    finally:
        runner.instrument(lambda *_: None)
