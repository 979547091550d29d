"""Whole layers of a decode step on the GPU: the values of a `Chain`, and its time with other kernels in it. Works on what a
`Gpu` offers; used by `relaxpack tune` and by benchmarks/gpu/tune.py alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from relaxpack.errors import TuningError
from relaxpack.kernel_spec import LinearSpec
from relaxpack.tuning.chain import LEAST_LAYERS, Chain
from relaxpack.tuning.cuda_cases import GpuCase, step_case, stored
from relaxpack.tuning.cuda_stages import Stages
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import Workload

MOST_DIFFERENT = 0.1         # relative: what rounding may make of other orders of sums through several layers
_SHARED = ("pages", "rope_table", "positions", "slots", "page_table", "lengths")
_ONES = ("norm_weight", "q_norm", "k_norm")


@dataclass(frozen=True)
class Timed:
    """Microseconds of a layer, one a round. `difference`: of what comes out, relative to the first chain; infinite where a
    second run gives other bits, or where it is not finite."""

    times_us: tuple[float, ...]
    difference: float


class Weights:
    """Those of one model and weight format at a time: chains for other numbers of rows take them over."""

    def __init__(self) -> None:
        self._held: dict[Any, Any] = {}
        self._shapes: frozenset[Any] = frozenset()

    def keep_for(self, shapes: frozenset[Any]) -> None:
        if shapes != self._shapes:
            self._held.clear()
            self._shapes = shapes

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._held:
            self._held[key] = make()
        return self._held[key]


class PlacedChain:
    """As many layers, from LEAST_LAYERS on, as have weights of more than `rotate` bytes; every layer has weights of its own,
    and a layer of the pages."""

    def __init__(self, gpu: Any, chain: Chain, seed: int, rotate: int, weights: Weights) -> None:
        self.gpu, self.chain, self.rows = gpu, chain, chain.rows
        cases = {key: _case(work, chain.rows, seed) for key, work in chain.works().items()}
        one = sum(cases[call.work.hash].bytes_of_copy() for call in chain.calls if call.layer == 0)
        self.layers = min(chain.layers, max(LEAST_LAYERS, -(-rotate // max(one, 1))))
        self.rotated_bytes = self.layers * one
        self.calls = [call for call in chain.calls if call.layer < self.layers]
        shapes = {key: _weight_of(work) for key, work in chain.works().items()}
        weights.keep_for(frozenset(shape for shape in shapes.values() if shape is not None))
        self.values: dict[str, Any] = {}
        self._written: dict[str, np.ndarray] = {}
        shared: dict[str, Any] = {}          # by name in the contract: pages, positions, ...
        counts: dict[Any, int] = {}
        for call in self.calls:
            case, shape = cases[call.work.hash], shapes[call.work.hash]
            nth = counts[shape] = counts.get(shape, -1) + 1
            for buffer, value in call.buffers:
                if value in self.values:
                    continue
                place = partial(self._place, case, buffer)
                if buffer in case.copied:
                    self.values[value] = weights.get((shape, nth, buffer), place)
                elif buffer in _SHARED:
                    self.values[value] = shared[buffer] = shared[buffer] if buffer in shared else place()
                else:
                    self.values[value] = place()
                    if buffer in case.outputs or buffer == "q":
                        self._written[value] = case.buffers[buffer]
        last = self.calls[-1]
        self._end, self._dtype = self.values[dict(last.buffers)["y"]], cases[last.work.hash].buffers["y"].dtype
        gpu.synchronize()

    def _place(self, case: GpuCase, buffer: str) -> Any:
        value = case.buffers[buffer]
        return self.gpu.place(np.ones_like(value) if buffer in _ONES else stored(value))

    def poison(self) -> None:
        """What kernels write becomes NaN, so that none is right by what another one has left."""
        for value, array in self._written.items():
            self.gpu.write(self.values[value], stored(array))

    def result(self) -> np.ndarray:
        """What the last kernel has written."""
        wide: np.ndarray = self.gpu.numpy(self._end).view(self._dtype).astype(np.float64)
        return wide

    def bound(self, kernels: Mapping[str, Stages]) -> list[Callable[[], None]]:
        """The calls in order, with these kernels by the hash of their workload."""
        launches = {key: stages.bound(self.rows) for key, stages in kernels.items()}
        return [partial(launches[call.work.hash], {**{buffer: self.values[value] for buffer, value in call.buffers},
                                                   "layer": call.layer}) for call in self.calls]


def time_chains(gpu: Any, placed: PlacedChain, chains: Sequence[Mapping[str, Stages]], rounds: int, seconds: float,
                begin: Callable[[int], object] = lambda index: None) -> list[Timed]:
    """Each with its own kernels. All take turns, another one begins each round; fewer rounds where `seconds` are over.
    The first chain is the one that the others' results are compared with: raises TuningError where it gives none. `begin` is
    told which one runs for the first time."""
    replays, differences = [], []
    expected: np.ndarray | None = None
    for number, kernels in enumerate(chains):
        begin(number)
        calls = placed.bound(kernels)
        placed.poison()
        for call in calls:                   # so that nothing is loaded while capturing
            call()
        replay = gpu.captured(calls)
        replay()
        first = placed.result()
        replay()
        expected = first if expected is None else expected
        differences.append(_difference(first, placed.result(), expected))
        if math.isinf(differences[0]):
            raise TuningError("in a chain of layers the rule's kernels give numbers that are not finite, or others in a "
                              "second run")
        replays.append(partial(_per_layer, replay, len(calls) / placed.layers))
    times: list[list[float]] = [[] for _ in chains]
    end = time.perf_counter() + seconds
    for number in range(rounds + 1):         # the first one warms up
        for index in range(len(chains)):
            at = (index + number) % len(chains)
            took = replays[at]()
            if number:
                times[at].append(took if differences[at] <= MOST_DIFFERENT else math.inf)
        if number and time.perf_counter() > end:
            break
    return [Timed(tuple(own), difference) for own, difference in zip(times, differences, strict=True)]


def _per_layer(replay: Callable[[], float], calls: float) -> float:
    return replay() * calls


def _difference(first: np.ndarray, second: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(first).all() or not np.array_equal(first, second):
        return math.inf
    return float(np.linalg.norm(first - expected) / max(float(np.linalg.norm(expected)), 1e-30))


def _case(work: Workload, rows: int, seed: int) -> GpuCase:
    return step_case(*family_and_spec(work), rows, seed)


def _weight_of(work: Workload) -> Any:
    """What decides the bytes of a matmul's weight; None for other kernels."""
    _, spec = family_and_spec(work)
    return (spec.weight.name, spec.out_features, spec.in_features) if isinstance(spec, LinearSpec) else None
