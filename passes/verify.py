"""VerifyPhase: our rules about the IR, by phase. It only checks; a broken rule is a bug of a pass.

    graph     well-formed; every exported function present
    weights   no `permute_dims` reads a parameter: weights are stored as their kernels read them
    fuse      no standalone unpack (dequantise), no bare matmul, no conversion of any layout left
    lower     no placeholder left, no Relax operation that is not a kernel call or a view, every PrimFunc of a GPU
              scheduled; every function takes the same parameters
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.passes.rewrite import exported_functions, is_op, num_inputs, placeholder_name
from relaxpack.passes.schedule_rest import SOURCE
from relaxpack.placeholders import UNPACK
from tvm import relax

_CONVERSIONS = ("permute_dims", "layout_transform")   # relax operations; legalised they are called transpose, ...
# What may stand beside kernel calls after lowering; none of it computes anything.
_LOWERED = {f"relax.{name}" for name in ("call_tir", "call_tir_inplace", "call_pure_packed", "reshape", "shape_of")}


def _complaint(phase: str, value: Any, parameters: set[Any]) -> str | None:
    if phase in ("weights", "fuse", "lower") and is_op(value, "relax.permute_dims") and value.args[0] in parameters:
        return "a weight is transposed at run time"
    if phase in ("fuse", "lower"):
        if placeholder_name(value) == UNPACK:
            return "a weight is unpacked on its own"
        if is_op(value, "relax.matmul"):
            return "a matmul has no kernel"
        if any(is_op(value, f"relax.{name}") for name in _CONVERSIONS):
            return "a layout is converted at run time"
    if phase == "lower" and is_op(value, "relax.call_tir") and value.args[0].name_hint.startswith(
            ("transpose", "layout_transform")):
        return "a layout is converted at run time"
    if phase == "lower" and placeholder_name(value) is not None:
        return f"{placeholder_name(value)} was not lowered"
    if phase == "lower" and isinstance(value, tvm.ir.Call) and isinstance(value.op, tvm.ir.Op) \
            and value.op.name not in _LOWERED:
        return f"{value.op.name} has no kernel"
    return None


def _unscheduled(mod: tvm.IRModule) -> str | None:
    """Name of a PrimFunc that has neither a schedule of its own nor been through ScheduleRest."""
    return next((gv.name_hint for gv, func in mod.functions_items() if isinstance(func, tvm.tirx.PrimFunc)
                 and not (func.attrs or {}).get("tirx.is_scheduled") and SOURCE not in (func.attrs or {})), None)


def VerifyPhase(phase: str) -> Any:
    """The pass for the end of `phase`; raises CompileError."""

    @tvm.transform.module_pass(opt_level=0, name="VerifyPhase")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        if not relax.analysis.check_well_formed(mod):
            raise CompileError(f"after phase {phase!r}: the module is not well-formed (a bug in a pass)")
        names = []
        for gv, func in exported_functions(mod):
            parameters = set(func.params[num_inputs(func):])
            names.append([v.name for v in func.params[num_inputs(func):]])
            for block in func.body.blocks:
                for binding in block.bindings:
                    if (complaint := _complaint(phase, binding.value, parameters)) is not None:
                        raise CompileError(f"after phase {phase!r}, in {gv.name_hint}: {complaint}: "
                                           f"{binding.var.name} = {str(binding.value)[:200]}")
        if phase == "lower" and (name := _unscheduled(mod)) is not None:
            raise CompileError(f"after phase {phase!r}: PrimFunc {name} has no schedule")
        if not names or any(n != names[0] for n in names):
            raise CompileError(f"after phase {phase!r}: exported functions disagree about their parameters")
        return mod

    return run
