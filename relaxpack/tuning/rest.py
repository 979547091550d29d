"""Tuning records for PrimFuncs that no kernel covers: as a rule in front of the target's own one.

Only functions of constant shapes: a trace is of one. On a GPU those of every bucket are; on a CPU, where one function serves
all sizes, few are, and the others keep the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import DamagedRecordError
from relaxpack.schedules.rest import SOURCE
from relaxpack.schedules.tuning.tuned import Records
from relaxpack.tuning_record import Workload
from relaxpack.tvm_records import apply_trace, primfunc_workload

Rule = Callable[[Any], Any | None]


def static_workload(func: Any) -> Workload | None:
    """The workload of an unscheduled function, or None where it has a symbolic size."""
    for parameter in func.params:
        shape = getattr(parameter.ty, "shape", None)
        if shape is None or not all(isinstance(dim, int | tvm.tirx.IntImm) for dim in shape):
            return None
    return primfunc_workload(func, block_names(func))


def block_names(func: Any) -> str:
    schedule = tvm.s_tir.Schedule(func)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    return "_".join(str(schedule.get(block).name_hint) for block in blocks)[:80] or "main"


def with_records(rule: Rule, records: Records) -> Rule:
    """`rule` for what `records` do not know."""
    def tuned(func: Any) -> Any | None:
        workload = static_workload(func)
        record = records.find(workload, (None,), workload.name) if workload is not None else None   # type: ignore[arg-type]
        if workload is None or record is None:
            return rule(func)
        if record.choice["kind"] != "trace":
            records.reject(record, workload.name, f"a {record.choice['kind']} is no schedule of a function of TVM's")
            return rule(func)
        if not record.choice["trace"][0]:            # the search found nothing faster than the rule
            records.use(record, workload.name)
            scheduled = rule(func)
            return None if scheduled is None else scheduled.with_attr(SOURCE, f"tuned:{record.id[:16]}")
        try:
            made = apply_trace(workload, record.choice["trace"]).mod["main"]
        except DamagedRecordError as error:
            records.reject(record, workload.name, str(error))
            return rule(func)
        records.use(record, workload.name)
        made = made.without_attr("global_symbol") if "global_symbol" not in (func.attrs or {}) else made.with_attr(
            "global_symbol", func.attrs["global_symbol"])
        return made.with_attr("tirx.is_scheduled", True).with_attr(SOURCE, f"tuned:{record.id[:16]}")

    return tuned
