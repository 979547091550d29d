"""PruneParameters: parameters that no exported function reads any more disappear, and all functions take the same
parameters in the same order (sorted by name), so that one tuple serves them. Recipes of dead parameters go too.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.passes.rewrite import exported_functions, num_inputs, recipes_of, with_recipes
from tvm import relax


@tvm.transform.module_pass(opt_level=0, name="PruneParameters")
def PruneParameters(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    read = {}
    live: dict[str, Any] = {}
    for gv, func in exported_functions(mod):
        free = set(relax.analysis.free_vars(func.body))
        read[gv] = {var.name: var for var in func.params[num_inputs(func):] if var in free}
        for name, var in read[gv].items():
            known = live.setdefault(name, var.ty)
            assert tvm_ffi.structural_equal(known, var.ty), f"{name}: {known} and {var.ty}"
    functions = {}
    for gv, func in exported_functions(mod):
        parameters = [read[gv][name] if name in read[gv] else relax.Var(name, live[name]) for name in sorted(live)]
        functions[gv] = relax.Function([*func.params[:num_inputs(func)], *parameters], func.body, func.ret_ty,
                                       func.is_pure, func.attrs)
    out = tvm.IRModule({**dict(mod.functions_items()), **functions}, attrs=mod.attrs)
    return with_recipes(out, {name: r for name, r in recipes_of(mod).items() if name in live})
