"""Stands in for a GPU where tuning for one is tested without: buffers are NumPy arrays, kernels are written in NumPy and
called with the buffers that the real ones would be given, and times come out of a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from relaxpack.tuning import cuda_jobs, cuda_measure, measure
from relaxpack.tuning.cuda_cases import Repeated
from relaxpack.tuning.cuda_stages import described, description_of
from relaxpack.tuning.worker import CandidateFailed
from relaxpack.tuning_record import Facts

Kernel = Callable[..., None]
L2_BYTES = 1 << 16


class StandInGpu:
    """`kernel_of(function)`: what it does to its buffers, by name; `time_of(function)`: microseconds of a call."""

    def __init__(self, kernel_of: Callable[[str], Kernel], time_of: Callable[[str], float]) -> None:
        self.kernel_of, self.time_of, self.called = kernel_of, time_of, list[str]()

    def load(self, path: str) -> Mapping[str, Any]:
        told = json.loads(description_of(path).read_text())
        return {stage["function"]: self._function(stage["function"], stage["arguments"]) for stage in told["stages"]}

    def _function(self, name: str, names: Sequence[str]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.called.append(name)
            given = {("b" + key if key.isdigit() else key.replace(".", "_")): value
                     for key, value in zip(names, arguments, strict=True)}
            self.kernel_of(name)(**given)

        return call

    def l2_bytes(self) -> int:
        return L2_BYTES

    def place(self, value: Any) -> Any:
        return np.resize(value.block, value.shape) if isinstance(value, Repeated) else (
            value.copy() if isinstance(value, np.ndarray) else value)

    def clone(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.copy()

    def numpy(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.copy()

    def write(self, tensor: np.ndarray, array: np.ndarray) -> None:
        tensor[...] = array

    def synchronize(self) -> None:
        pass

    def captured(self, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """Runs every call once, to learn which functions it is made of; one that is repeated counts as often."""
        took, replays, known = 0.0, 0, dict[int, float]()
        for call in calls:
            if id(call) not in known:
                self.called.clear()
                call()
                known[id(call)] = sum(map(self.time_of, self.called))
            took += known[id(call)] / len(calls)

        def replay() -> float:
            nonlocal replays
            replays += 1
            return took * (1 + 0.001 * (replays % 3))

        return replay

    def clocks(self) -> Facts:
        return {"sm_mhz": 1980, "memory_mhz": 3201}


class InProcess:
    """A `Worker` that is none."""

    def call(self, function: str, *arguments: Any, timeout: float) -> Any:
        _, _, name = function.partition(":")
        try:
            return getattr(cuda_jobs, name)(*arguments)
        except Exception as error:
            raise CandidateFailed(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        pass


def _make_only(workload: Any, choice: dict[str, Any], target: Any, path: str) -> None:
    """The kernel is made as always, and not compiled."""
    from relaxpack.tuning.candidates import prim_func

    description_of(path).write_text(json.dumps(described(prim_func(workload, choice, target))))


def use(patch: pytest.MonkeyPatch, gpu: StandInGpu) -> None:
    """`CudaMeasurer` works on this one, in this process."""
    for module in (measure, cuda_measure):
        patch.setattr(module, "Worker", InProcess)
    patch.setattr(cuda_jobs, "open_gpu", lambda: gpu)
    patch.setattr(cuda_jobs, "compile_candidate", _make_only)
    for remembered in (cuda_jobs._checks, cuda_jobs._timings):
        remembered.cache_clear()


# ---- kernels ----

def norm(x: np.ndarray, weight: np.ndarray, y: np.ndarray, residual: np.ndarray | None = None,
         total: np.ndarray | None = None) -> None:
    if residual is not None and total is not None:
        total[...] = x.astype(np.float32) + residual.astype(np.float32)
        x = total
    wide = x.astype(np.float64)
    y[...] = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight


def linear(x: np.ndarray, weight: np.ndarray, y: np.ndarray, squares: np.ndarray | None = None,
           residual: np.ndarray | None = None, norm_weight: np.ndarray | None = None,
           scaled: np.ndarray | None = None) -> None:
    """Weights as in a row layout; a y of half the width is that of SwiGLU."""
    z = x.astype(np.float64) @ weight.astype(np.float64).T
    if squares is not None and scaled is None:
        z /= np.sqrt(squares.sum(-1, keepdims=True) / x.shape[1] + 1e-5)
    if y.shape[1] * 2 == z.shape[1]:
        gate, up = np.moveaxis(z.reshape(len(z), -1, 2, 8), 2, 0).reshape(2, len(z), -1)
        z = gate / (1 + np.exp(-gate)) * up
    if residual is not None:
        z = z + residual.astype(np.float64)
    y[...] = z
    if scaled is not None and squares is not None and norm_weight is not None:
        scaled[...] = z * norm_weight
        squares[...] = (z.reshape(len(z), -1, 16) ** 2).sum(-1)


def fused_attention(qkv: np.ndarray, rope_table: np.ndarray, positions: np.ndarray, slots: np.ndarray, layer: int,
                    pages: np.ndarray, page_table: np.ndarray, lengths: np.ndarray, y: np.ndarray) -> None:
    """Something of every token that is no attention: chains need none."""
    assert 0 <= layer < len(pages) and len(positions) == len(slots) == len(page_table) == len(lengths) == len(y)
    assert rope_table.shape[1] == pages.shape[-1]
    y[...] = qkv[:, :y.shape[1]].astype(np.float64) / 2


def wrong(**buffers: Any) -> None:
    buffers["y"][...] = 0
