"""Schedules for what no kernel of ours covers: copies and element-wise loops get a rule of ours, on a GPU one thread per
output element, on a CPU vectors along the innermost loop. What else there may be on a GPU is left to dlight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.target import TargetSpec

SOURCE = "relaxpack.source"   # PrimFunc attribute that `passes.ScheduleRest` counts by
_LANES = 8   # float32 in a register of the smallest CPU we build for
_THREADS = 256


def dlight_fallback(target: TargetSpec) -> Callable[[Any], Any]:
    """A rule for `passes.ScheduleRest`: scheduled PrimFunc, or None where dlight declines."""
    from tvm.s_tir import dlight

    tvm_target = target.to_tvm()

    def rule(func: Any) -> Any | None:
        with tvm_target:
            schedule = dlight.gpu.Fallback().apply(func, tvm_target, False)
        return None if schedule is None else schedule.mod["main"].with_attr("tirx.is_scheduled", True)

    return rule


def cpu_elementwise(func: Any) -> Any | None:
    """A rule for `passes.ScheduleRest`: None for everything but one spatial block over rows of a known width. Rows are
    not shared between threads: there are few, and waking the pool costs more."""
    schedule, loops = _one_spatial_block(func)
    extent = schedule.get(loops[-1]).extent if loops else None
    if not isinstance(extent, tvm.tirx.IntImm) or int(extent) % _LANES:
        return None
    _, lanes = schedule.split(loops[-1], [None, _LANES])
    schedule.vectorize(lanes)
    return _scheduled(schedule, "rule:cpu.elementwise")


def cuda_elementwise(func: Any) -> Any | None:
    """The same for a GPU: None for everything but one spatial block. Tokens that come from the last step, and the rows
    that logits are asked of."""
    schedule, loops = _one_spatial_block(func)
    if not loops:
        return None
    blocks, threads = schedule.split(schedule.fuse(*loops), [None, _THREADS])
    schedule.bind(blocks, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    return _scheduled(schedule, "rule:cuda.elementwise")


def _one_spatial_block(func: Any) -> tuple[Any, list[Any]]:
    """A schedule of the function and the loops around its only block; no loops where that is not the whole of it."""
    schedule = tvm.s_tir.Schedule(func)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    if len(blocks) != 1:
        return schedule, []
    spatial = all(iter_var.iter_type == tvm.tirx.IterVar.DataPar for iter_var in schedule.get(blocks[0]).iter_vars)
    return schedule, list(schedule.get_loops(blocks[0])) if spatial else []


def _scheduled(schedule: Any, source: str) -> Any:
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True).with_attr(SOURCE, source)


def rest_rule(target: TargetSpec) -> Callable[[Any], Any | None]:
    """The rule for a target."""
    if target.kind == "cpu":
        return cpu_elementwise
    dlight = dlight_fallback(target)

    def rule(func: Any) -> Any | None:
        ours = cuda_elementwise(func)
        return ours if ours is not None else dlight(func)

    return rule
