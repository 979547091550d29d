"""Schedules for what no kernel of ours covers on a GPU: dlight's fallback rule, one thread per output element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.target import TargetSpec


def dlight_fallback(target: TargetSpec) -> Callable[[Any], Any]:
    """A rule for `passes.ScheduleRest`: scheduled PrimFunc, or None where dlight declines."""
    from tvm.s_tir import dlight

    tvm_target = target.to_tvm()

    def rule(func: Any) -> Any | None:
        with tvm_target:
            schedule = dlight.gpu.Fallback().apply(func, tvm_target, False)
        return None if schedule is None else schedule.mod["main"].with_attr("tirx.is_scheduled", True)

    return rule
