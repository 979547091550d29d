"""ScheduleRest: PrimFuncs that no kernel of the provider covers are scheduled by a given rule, and counted.

Each such function gets the attribute `relaxpack.source`: what the rule wrote there or "dlight" where it answered, and
"fallback" where it did not: then TVM's plain loops run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import exported_functions
from tvm import relax

SOURCE = "relaxpack.source"


def ScheduleRest(rule: Callable[[Any], Any] | None) -> Any:
    """The pass. `rule(prim_func)` answers a scheduled PrimFunc or None."""

    @tvm.transform.module_pass(opt_level=0, name="ScheduleRest")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        functions = {}
        for gv, func in mod.functions_items():
            if isinstance(func, tvm.tirx.PrimFunc) and not (func.attrs or {}).get("tirx.is_scheduled", False):
                scheduled = rule(func) if rule is not None else None
                source = "fallback" if scheduled is None else (scheduled.attrs or {}).get(SOURCE, "dlight")
                func = (scheduled if scheduled is not None else func).with_attr(SOURCE, str(source))
            functions[gv] = func
        return tvm.IRModule(functions, attrs=mod.attrs)

    return run


@tvm.transform.module_pass(opt_level=0, name="DropUnusedKernels")
def DropUnusedKernels(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    """Dead bindings and PrimFuncs that no exported function calls disappear."""
    return relax.transform.DeadCodeElimination([gv.name_hint for gv, _ in exported_functions(mod)])(mod)
