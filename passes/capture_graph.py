"""Two passes that bring a bucket's step into the form in which TVM's RewriteCUDAGraph captures it whole.

`PrepareCapture` (before memory planning): the result leaves through the identity `vm.builtin.copy`, because a returned
tensor is not planned and a kernel that writes unplanned memory stays outside the graph. `MarkStatic` (right before
RewriteCUDAGraph): every argument counts as static, since the runner keeps one set of device buffers and the kernels
read lengths and page tables on the device. Only functions specialised for a bucket are touched.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import exported_functions
from relaxpack.passes.specialize_buckets import bucket_of
from tvm import relax


@tvm.transform.module_pass(opt_level=0, name="PrepareCapture")
def PrepareCapture(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    """Results of bucket functions leave through `vm.builtin.copy`."""
    functions = dict(mod.functions_items())
    for gv, func in exported_functions(mod):
        if bucket_of(func) is None:
            continue
        block = func.body.blocks[0]
        result = func.body.body
        bindings = list(block.bindings)

        def bind(name: str, value: Any, ty: Any, bindings: list[Any] = bindings) -> Any:
            var = relax.Var(name, ty)
            bindings.append(relax.VarBinding(var, value))
            return var

        def copied(var: Any) -> Any:
            return bind("captured", relax.call_pure_packed("vm.builtin.copy", var, ty_args=var.ty), var.ty)

        if isinstance(result.ty, relax.TupleType):
            parts = [copied(bind("part", relax.TupleGetItem(result, i), ty)) for i, ty in enumerate(result.ty.fields)]
            out = bind("captured_result", relax.Tuple(parts), result.ty)
        else:
            out = copied(result)
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], out)
        functions[gv] = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
    return tvm.IRModule(functions, attrs=mod.attrs)


@tvm.transform.module_pass(opt_level=0, name="MarkStatic")
def MarkStatic(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    """Functions that are not captured keep every argument dynamic, weights included, so that nothing of them is."""
    functions = dict(mod.functions_items())
    for gv, func in exported_functions(mod):
        captured = bucket_of(func) is not None
        functions[gv] = func.with_attr("num_input", 0 if captured else len(func.params))
    return tvm.IRModule(functions, attrs=mod.attrs)
