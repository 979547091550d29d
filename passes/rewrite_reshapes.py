"""RewriteDataflowReshape: TVM's pass of this name, which makes views of reshapes, kept away from scheduled kernels. It takes
every kernel with one input for a candidate, and cannot read what is written in TIRx. Runs after the PrimFuncs are scheduled.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401
import tvm
from tvm import relax


@tvm.transform.module_pass(opt_level=0, name="RewriteDataflowReshape")
def RewriteDataflowReshape(mod: tvm.IRModule, _ctx: object) -> tvm.IRModule:
    """Kernels marked `tirx.is_scheduled` are empty while the pass looks."""
    kernels = {gv: func for gv, func in mod.functions_items()
               if isinstance(func, tvm.tirx.PrimFunc) and (func.attrs or {}).get("tirx.is_scheduled", False)}
    hidden = mod.clone()
    for gv, func in kernels.items():
        hidden[gv] = func.with_body(tvm.tirx.Evaluate(0))
    rewritten = relax.transform.RewriteDataflowReshape()(hidden)
    for gv, func in kernels.items():
        rewritten[gv] = func
    return rewritten
