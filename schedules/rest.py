"""Schedules for what no kernel of ours covers: on a GPU dlight's fallback rule, one thread per output element; on a CPU
plain copies and element-wise loops, the innermost one as vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.target import TargetSpec

SOURCE = "relaxpack.source"   # PrimFunc attribute that `passes.ScheduleRest` counts by
_LANES = 8   # float32 in a register of the smallest CPU we build for


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
    schedule = tvm.s_tir.Schedule(func)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    if len(blocks) != 1:
        return None
    loops = schedule.get_loops(blocks[0])
    spatial = all(iter_var.iter_type == tvm.tirx.IterVar.DataPar for iter_var in schedule.get(blocks[0]).iter_vars)
    extent = schedule.get(loops[-1]).extent if loops else None
    if not spatial or not isinstance(extent, tvm.tirx.IntImm) or int(extent) % _LANES:
        return None
    _, lanes = schedule.split(loops[-1], [None, _LANES])
    schedule.vectorize(lanes)
    return schedule.mod["main"].with_attr("tirx.is_scheduled", True).with_attr(SOURCE, "rule:cpu.elementwise")


def rest_rule(target: TargetSpec) -> Callable[[Any], Any | None]:
    """The rule for a target."""
    return dlight_fallback(target) if target.kind == "cuda" else cpu_elementwise
