"""Inputs and references for PrimFuncs of constant shapes that no kernel of ours covers. What must come out is computed by
the function itself, unscheduled, with every float widened to float64. A schedule may add in another order: allowed is
several times the error that the unscheduled function has in its own dtype.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import TuningError
from relaxpack.tuning.cases import MAX_SETS, Case
from relaxpack.tuning_record import Workload
from relaxpack.tvm_records import workload_module

ORDERS = 8.0     # errors of other orders of adding, in errors of the plain one


def primfunc_case(workload: Workload, seed: int) -> Case:
    """One set of arguments with the expected outputs."""
    func = workload_module(workload)["main"]
    outputs = written(func)
    arguments = random_arguments(func, outputs, seed)
    wide = [a.astype(np.float64) if is_float(a.dtype) else a for a in arguments]
    exact = _run(_widened(workload), wide, outputs)
    plain = _run(_compiled(workload), arguments, outputs)
    bounds = []
    for expected, got in zip(exact, plain, strict=True):
        if not is_float(got.dtype):
            bounds.append(np.full(expected.shape, 1e-9))
            continue
        with np.errstate(invalid="ignore"):
            own = np.nanmax(np.abs(got.astype(np.float64) - expected), initial=0.0)
        step = float(ml_dtypes.finfo(got.dtype).eps) * np.nanmax(np.abs(expected), initial=0.0)
        bounds.append(np.full(expected.shape, ORDERS * own + 4 * step + float(ml_dtypes.finfo(got.dtype).tiny)))
    return Case([arguments], outputs, list(exact), bounds)


def primfunc_sets(workload: Workload, seed: int, rotate: int) -> Case:
    """Copies of one set of arguments, as many as exceed `rotate` bytes."""
    func = workload_module(workload)["main"]
    outputs = written(func)
    arguments = random_arguments(func, outputs, seed)
    count = max(1, min(MAX_SETS, -(-rotate // max(1, sum(a.nbytes for a in arguments)))))
    return Case([[a.copy() for a in arguments] for _ in range(count)], outputs)


def is_float(dtype: Any) -> bool:
    return bool(dtype.kind == "f" or dtype == ml_dtypes.bfloat16)


def written(func: Any) -> tuple[int, ...]:
    """Which parameters the function's blocks write to."""
    schedule = tvm.s_tir.Schedule(func)
    stored: set[Any] = set()

    def visit(block: Any) -> None:
        for child in schedule.get_child_blocks(block):
            stored.update(region.source for region in schedule.get(child).writes)
            visit(child)

    visit(schedule.get_sblock("root"))
    return tuple(i for i, p in enumerate(func.params) if p in stored)


def random_arguments(func: Any, outputs: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Floats from a normal distribution; integers small enough to be indices of any buffer; outputs are poisoned."""
    rng = np.random.default_rng(seed)
    buffers = [p.ty for p in func.params]
    shapes = [tuple(int(d) for d in b.shape) for b in buffers]
    smallest = min((shape[0] for shape in shapes if shape), default=1)
    arguments = []
    for i, (buffer, shape) in enumerate(zip(buffers, shapes, strict=True)):
        dtype = np.dtype(str(buffer.dtype))
        if is_float(dtype):
            values = np.full(shape, np.nan, dtype) if i in outputs else rng.standard_normal(shape).astype(dtype)
        else:
            values = rng.integers(0, max(1, smallest), shape).astype(dtype)
        arguments.append(values)
    return arguments


def _run(call: Any, arguments: list[np.ndarray], outputs: tuple[int, ...]) -> list[np.ndarray]:
    placed = [tvm.runtime.tensor(a) for a in arguments]
    call(*placed)
    return [placed[i].numpy() for i in outputs]


@lru_cache(maxsize=4)
def _compiled(workload: Workload) -> Any:
    return _build(workload_module(workload)["main"])


@lru_cache(maxsize=4)
def _widened(workload: Workload) -> Any:
    """The unscheduled function in float64. By its text: every dtype, constant and cast at once."""
    text = workload_module(workload)["main"].script(show_meta=False)
    wide = re.sub(r"\bb?float(16|32)\b", "float64", text)
    try:
        return _build(tvm.script.from_source(wide, s_tir=True))
    except Exception as error:   # of the parser or of LLVM: there is no common base
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TuningError(f"workload {workload.name} has no float64 reference: {lines[-1]}") from None


def _build(func: Any) -> Any:
    target = tvm.target.Target("llvm")
    with target:
        return tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target)["main"]
