"""VerifyPhase: our rules about the IR, by phase. It only checks; a broken rule is a bug of a pass.

    graph     well-formed; every exported function present
    weights   no `permute_dims` reads a parameter: weights are stored as their kernels read them
    fuse      no standalone unpack (dequantise), no bare matmul left
    lower     no placeholder left; every function takes the same parameters
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.passes.rewrite import exported_functions, is_op, num_inputs, placeholder_name
from tvm import relax


def _complaint(phase: str, value: Any, parameters: set[Any]) -> str | None:
    if phase in ("weights", "fuse", "lower") and is_op(value, "relax.permute_dims") and value.args[0] in parameters:
        return "a weight is transposed at run time"
    if phase in ("fuse", "lower"):
        if placeholder_name(value) == "relaxpack.unpack":
            return "a weight is unpacked on its own"
        if is_op(value, "relax.matmul"):
            return "a matmul has no kernel"
    if phase == "lower" and placeholder_name(value) is not None:
        return f"{placeholder_name(value)} was not lowered"
    return None


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
        if not names or any(n != names[0] for n in names):
            raise CompileError(f"after phase {phase!r}: exported functions disagree about their parameters")
        return mod

    return run
