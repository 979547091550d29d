"""What runs inside a `Worker`: building a candidate, checking it, timing several in turn. Plain values in and out.

A round is one pass over argument sets that exceed the last-level cache. A round in which the kernel took the CPU away
from us (an involuntary context switch of any thread) is marked and does not count.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.target import TargetSpec
from relaxpack.tuning.cases import Case, check_case, check_rows, timing_case
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import Workload

ROUND_SECONDS = 0.0005   # a busy machine leaves few longer stretches undisturbed
ENTRY = "relaxpack_candidate"


def compile_candidate(workload: Workload, choice: dict[str, Any], target: TargetSpec, path: str) -> None:
    """Write the shared library of one candidate."""
    from relaxpack.tuning.candidates import prim_func

    compile_function(prim_func(workload, choice, target), target, path)


def compile_function(func: Any, target: TargetSpec, path: str) -> None:
    tvm_target = target.to_tvm()
    with tvm_target:
        built = tvm.compile(tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)}), tvm_target)
    built.export_library(path)


def check(path: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
    """(the largest error as a share of what is allowed, where it is). NaN and infinity count as infinite."""
    call = tvm.runtime.load_module(path)[ENTRY]
    worst, where = 0.0, ""
    for rows, case in check_cases(workload, bucket, seed):
        arguments = [to_device(a) for a in case.sets[0]]
        call(*arguments)
        for index, share in enumerate(errors(case, [arguments[i].numpy() for i in case.outputs])):
            if share >= worst:
                worst, where = share, f"output {index}, {rows} rows"
    return worst, where


def check_cases(workload: Workload, bucket: int, seed: int) -> list[tuple[int, Case]]:
    if workload.kind == "primfunc":
        from relaxpack.tuning.primfunc_cases import primfunc_case

        return [(bucket, primfunc_case(workload, seed))]
    family, spec = family_and_spec(workload)
    return [(rows, check_case(family, spec, rows, seed + rows)) for rows in check_rows(family, spec, bucket)]


def errors(case: Case, results: Sequence[np.ndarray]) -> list[float]:
    """The largest error of each output as a share of its bound."""
    shares = []
    for got, expected, bound in zip(results, case.expected, case.bounds, strict=True):
        with np.errstate(invalid="ignore"):
            share = np.abs(got.astype(np.float64) - expected) / bound
        shares.append(float(np.nan_to_num(share, nan=np.inf, posinf=np.inf).max(initial=0.0)))
    return shares


def time_in_turn(paths: Sequence[str], workload: Workload, bucket: int, seed: int, rotate: int, rounds: int,
                 seconds: float) -> list[Rounds]:
    """`rounds` clean rounds of every library, in turn; fewer where `seconds` are over before."""
    sets, bytes_of_set = _device_sets(workload, bucket, seed, rotate)
    calls = [tvm.runtime.load_module(path)[ENTRY] for path in paths]
    count = len(sets)
    for call in calls:                          # warm-up: code, threads, and how long a call takes
        call(*sets[0])
        start, done = time.perf_counter(), 0
        for arguments in sets:
            call(*arguments)
            done += 1
            if time.perf_counter() - start > ROUND_SECONDS:
                break
        count = min(count, done)
    return _take_turns(calls, sets, count, rounds, seconds, int(len(sets) * bytes_of_set))


def _take_turns(calls: Sequence[Callable[..., Any]], sets: Sequence[Sequence[Any]], count: int, rounds: int,
                seconds: float, rotated: int) -> list[Rounds]:
    """Every round goes on where the last one stopped, so that all sets are passed over before one comes again."""
    times: list[list[float]] = [[] for _ in calls]
    clean: list[list[bool]] = [[] for _ in calls]
    at, complete, end = 0, 0, time.perf_counter() + seconds
    while complete < rounds and (not times[0] or time.perf_counter() < end):
        for call, own, undisturbed in zip(calls, times, clean, strict=True):
            chosen = [sets[(at + i) % len(sets)] for i in range(count)]
            call(*chosen[0])                    # wakes the threads
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
            for arguments in chosen:
                call(*arguments)
            took = time.perf_counter() - start
            undisturbed.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before)
            own.append(took / count * 1e6)
            at += count
        complete += all(undisturbed[-1] for undisturbed in clean)
    return [Rounds(tuple(own), tuple(undisturbed), rotated) for own, undisturbed in zip(times, clean, strict=True)]


@lru_cache(maxsize=1)
def _device_sets(workload: Workload, bucket: int, seed: int, rotate: int) -> tuple[list[list[Any]], float]:
    """The timing case on the device, and the mean bytes that one set does not share with the others."""
    if workload.kind == "primfunc":
        from relaxpack.tuning.primfunc_cases import primfunc_sets

        case = primfunc_sets(workload, seed, rotate)
    else:
        family, spec = family_and_spec(workload)
        case = timing_case(family, spec, bucket, seed, rotate)
    arrays = {id(a): a for one in case.sets for a in one if isinstance(a, np.ndarray)}
    placed = {key: to_device(array) for key, array in arrays.items()}
    sets = [[placed.get(id(a), a) for a in one] for one in case.sets]
    return sets, sum(a.nbytes for a in arrays.values()) / len(sets)


def to_device(value: Any, device: Any = None) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return tvm.runtime.tensor(np.ascontiguousarray(value), device or tvm.cpu())
