"""What runs inside a `Worker` for a GPU: building a candidate, checking it, timing several in turn. Plain values in and
out.

A round is a replay of a graph whose calls walk over more data than the L2 cache holds. A matmul of few rows is timed with
its neighbour in a step beside it, a norm that is launched dependently: alone, a kernel that fills all multiprocessors looks
good though it keeps the next one from starting early. What breaks the GPU's context ends the process, and a fresh one goes
on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import EnvironmentProblem
from relaxpack.kernel_spec import Kernel, LinearSpec, NormSpec, Stage
from relaxpack.target import TargetSpec
from relaxpack.tuning.chain import Chain
from relaxpack.tuning.cuda_cases import GpuCase, check_cases, primfunc_gpu_case, stored, timing_cases
from relaxpack.tuning.cuda_chain import PlacedChain, Weights, time_chains
from relaxpack.tuning.cuda_device import Gpu
from relaxpack.tuning.cuda_stages import Stages, described, description_of, load_stages
from relaxpack.tuning.primfunc_cases import primfunc_case, primfunc_sets
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import Facts, Workload

BESIDE_ROWS = 128            # up to here a matmul is timed beside its neighbour
CALLS, LONG_US = 40, 150.0   # of a graph at least, where they are short: starting it is no part of a call's time
MOST_SETS = 40
ROTATE = 5                   # times the L2 cache
_FATAL = ("illegal", "unspecified launch", "misaligned", "cudaerrorassert", "sticky", "hardware stack")
ENTRY = "relaxpack_candidate"
Buffers = dict[str, Any]
_clocks: dict[str, Any] = {}


# ---- building ----

def compile_candidate(workload: Workload, choice: dict[str, Any], target: TargetSpec, path: str) -> None:
    """Write the shared library of one candidate, and beside it how its stages are called."""
    import tvm
    from relaxpack.schedules.cuda_compile import compile_module
    from relaxpack.tuning.candidates import prim_func

    kernel = prim_func(workload, choice, target)
    if workload.kind == "primfunc":
        kernel = Kernel((Stage(kernel, ENTRY, tuple(str(i) for i in range(len(kernel.params))), ()),), "primfunc")
    module = tvm.IRModule({stage.name: stage.func.with_attr("global_symbol", stage.name) for stage in kernel.stages})
    compile_module(module, target).export_library(path)
    description_of(path).write_text(json.dumps(described(kernel)))


def neighbour_of(workload: Workload, bucket: int) -> NormSpec | None:
    """The norm that is beside this matmul in a step, where its own kernel does not hold it."""
    if workload.kind == "primfunc":
        return None
    family, spec = family_and_spec(workload)
    if family != "cuda.linear" or bucket > BESIDE_ROWS or spec.norm_epsilon is not None or spec.prepares_norm:
        return None
    return NormSpec(spec.in_features if _norm_before(spec) else spec.out_features, 1e-5, spec.activation_dtype, False)


def _norm_before(spec: LinearSpec) -> bool:
    """Whether it is the norm that writes x, or the one that reads y: projections from the hidden state are the wide ones."""
    return spec.gated or spec.out_features > spec.in_features or spec.out_dtype != spec.activation_dtype


# ---- checking and timing ----

@lru_cache(maxsize=1)
def open_gpu() -> Gpu:
    """With the libraries that candidates may call, where they are there."""
    from relaxpack.runtime.library.cublaslt import register

    gpu = Gpu()
    with contextlib.suppress(EnvironmentProblem):
        register(gpu.device)
    return gpu


def prepare(workload: Workload, bucket: int, seed: int) -> None:
    """Inputs and references of a workload, which take a while for large ones: no candidate is to blame for that."""
    _checks(workload, bucket, seed)
    _timings(workload, bucket, seed)


def prepare_chain(chain: Chain, seed: int) -> None:
    """The same for a chain of layers."""
    _placed(chain, seed)


def check(path: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
    """(the largest error as a share of what is allowed, where it is). NaN and a second run with other bits are infinite."""
    return _guarded(_check, path, workload, bucket, seed)  # type: ignore[no-any-return]


def time_in_turn(paths: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int, seconds: float,
                 neighbour: str | None = None) -> list[Rounds]:
    """`rounds` rounds of every library, in turn; fewer where `seconds` are over before. One time a round: the geometric mean
    over the cases."""
    return _guarded(_time_in_turn, paths, workload, bucket, seed, rounds, seconds, neighbour)  # type: ignore[no-any-return]


def time_in_chain(paths: Sequence[str], work: Workload, chain: Chain, libraries: Mapping[str, str], seed: int, rounds: int,
                  seconds: float) -> list[Rounds]:
    """As `time_in_turn`, but of a layer of the chain, with each library in the place of `work`'s kernel. `libraries`: of the
    others, by the hash of their workload. What gives other results than the first one takes forever."""
    return _guarded(_time_in_chain, paths, work, chain, libraries, seed, rounds, seconds)  # type: ignore[no-any-return]


def clocks() -> Facts:
    """As they were right behind the last timing."""
    return dict(_clocks)


def _guarded(job: Callable[..., Any], *arguments: Any) -> Any:
    try:
        answer = job(*arguments)
        open_gpu().synchronize()       # so that what is wrong shows now
        return answer
    except Exception as error:
        if any(word in str(error).lower() for word in _FATAL):
            print(str(error).strip().splitlines()[-1], file=sys.stderr, flush=True)
            os._exit(1)                # nothing runs in this context any more
        raise


def _check(path: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
    gpu = open_gpu()
    stages, worst, where = load_stages(open_gpu(), path), 0.0, ""
    for case, placed in _checks(workload, bucket, seed):
        results = []
        for _ in range(2):
            for name in case.expected:
                gpu.write(placed[name], stored(case.buffers[name]))  # poisoned, or as it was before
            stages.bound(case.rows)(placed)
            results.append({name: gpu.numpy(placed[name]).view(case.buffers[name].dtype) for name in case.expected})
        for name in case.expected:
            first, second = (result[name] for result in results)
            share = case.share(name, first) if first.tobytes() == second.tobytes() else math.inf
            if share >= worst:
                worst, where = share, f"{name}, {case.rows} rows"
    return worst, where


def _time_in_turn(paths: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int, seconds: float,
                  neighbour: str | None) -> list[Rounds]:
    gpu = open_gpu()
    sets = _timings(workload, bucket, seed)
    beside = load_stages(gpu, neighbour) if neighbour is not None else None
    tracks: list[list[Callable[[], float]]] = []
    for path in paths:
        stages = load_stages(open_gpu(), path)
        tracks.append([_graph(gpu, _calls(stages, case, one, workload, beside)) for case, one in sets])
    times: list[list[float]] = [[] for _ in paths]
    end = time.perf_counter() + seconds
    for number in range(rounds + 1):                       # the first one warms up
        for graphs, own in zip(tracks, times, strict=True):
            took = [replay() for replay in graphs]
            if number:
                own.append(math.prod(took) ** (1 / len(took)))
        if number and time.perf_counter() > end:
            break
    _clocks.clear()
    _clocks.update(gpu.clocks())
    rotated = min(_rotated(case, len(one)) for case, one in sets)
    return [Rounds(tuple(own), (True,) * len(own), rotated) for own in times]


def _time_in_chain(paths: Sequence[str], work: Workload, chain: Chain, libraries: Mapping[str, str], seed: int, rounds: int,
                   seconds: float) -> list[Rounds]:
    gpu = open_gpu()
    placed = _placed(chain, seed)
    around = {key: load_stages(gpu, path) for key, path in libraries.items()}
    timed = time_chains(gpu, placed, [{**around, work.hash: load_stages(gpu, path)} for path in paths], rounds, seconds)
    _clocks.clear()
    _clocks.update(gpu.clocks())
    return [Rounds(one.times_us, (True,) * len(one.times_us), placed.rotated_bytes) for one in timed]


@lru_cache(maxsize=1)
def _placed(chain: Chain, seed: int) -> PlacedChain:
    gpu = open_gpu()
    return PlacedChain(gpu, chain, seed, ROTATE * gpu.l2_bytes(), Weights())


def _graph(gpu: Gpu, calls: list[Callable[[], object]]) -> Callable[[], float]:
    """Short calls are repeated, all sets over again, until there are enough."""
    once = gpu.captured(calls)
    once()
    return once if once() > LONG_US or len(calls) >= CALLS else gpu.captured(calls * -(-CALLS // len(calls)))


def _calls(stages: Stages, case: GpuCase, sets: Sequence[Buffers], workload: Workload,
           beside: Stages | None) -> list[Callable[[], object]]:
    launch = stages.bound(case.rows)
    if beside is None:
        return [partial(launch, one) for one in sets]
    gpu, (_, spec) = open_gpu(), family_and_spec(workload)
    before, hidden = _norm_before(spec), neighbour_of(workload, case.rows)
    assert hidden is not None
    given, written = ("x", "y") if before else ("y", "x")
    outer = gpu.place(np.ones((case.rows, hidden.hidden_size), case.buffers[given].dtype))
    other = {"weight": gpu.place(np.ones(hidden.hidden_size, np.float32)), written: sets[0][given],
             ("x" if written == "y" else "y"): outer}
    norm = partial(beside.bound(case.rows), other)

    def pair(one: Buffers) -> None:
        if before:
            norm()
        launch(one)
        if not before:
            norm()

    return [partial(pair, one) for one in sets]


@lru_cache(maxsize=1)
def _checks(workload: Workload, bucket: int, seed: int) -> list[tuple[GpuCase, Buffers]]:
    gpu = open_gpu()
    if workload.kind == "primfunc":
        cases = [primfunc_gpu_case(primfunc_case(workload, seed))]
    else:
        cases = check_cases(*family_and_spec(workload), bucket, seed)
    return [(case, {name: gpu.place(stored(value)) for name, value in case.buffers.items()}) for case in cases]


@lru_cache(maxsize=1)
def _timings(workload: Workload, bucket: int, seed: int) -> list[tuple[GpuCase, list[Buffers]]]:
    gpu, found = open_gpu(), []
    rotate = ROTATE * gpu.l2_bytes()
    if workload.kind == "primfunc":
        cases = [primfunc_gpu_case(primfunc_sets(workload, seed, 1))]
    else:
        cases = timing_cases(*family_and_spec(workload), bucket, seed, rotate)
    for case in cases:
        first = {name: gpu.place(stored(value)) for name, value in case.buffers.items()}
        variants = [{name: gpu.place(value) for name, value in one.items()} for one in case.variants] or [{}]
        count = max(2, min(MOST_SETS, -(-rotate // case.bytes_of_copy()))) if case.copied else 1
        sets = [{**first, **variant, **({name: gpu.clone(first[name]) for name in case.copied} if number else {})}
                for number in range(count) for variant in variants]
        found.append((case, sets))
    gpu.synchronize()
    return found


def _rotated(case: GpuCase, count: int) -> int:
    return count * (case.bytes_of_copy() if case.copied else case.read_bytes)
