"""SpreadDecode: a second function for decode buckets, `decode_spread_8` beside `decode_8`, for batches whose sequences have
leading pages in common or lengths far apart.

Its layers without a window become `relaxpack.spread_attention`, which takes one input more: `shared` i32[t], the leading
keys that a row has in common with others (a multiple of SHARED_KEYS; 0: none). The runner chooses between the two functions
step by step. Runs after SpecializeBuckets; leaves everything as it is where the provider has no such kernel or every layer
has a window, which ends such a prefix by itself.

Operands of `spread_attention`: those of `relaxpack.decode_attention` with `shared` before layer and window.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import AttentionSpec, KernelProvider
from relaxpack.passes.rewrite import FunctionRewriter, num_inputs, operands_of, placeholder, placeholder_name
from relaxpack.placeholders import DECODE_ATTENTION, SPREAD_ATTENTION
from tvm import relax
from tvm.relax.expr_functor import mutator

SPREAD = "decode_spread"


@mutator
class _Rewriter(FunctionRewriter):
    """Rewrites the functions that take `shared`."""

    shared: Any = None

    def _rewrite_function(self, name: str, func: relax.Function) -> relax.Function:
        self.shared = func.params[num_inputs(func) - 1] if name.startswith(SPREAD) else None
        return super()._rewrite_function(name, func)

    def rewrite(self, call: Any) -> Any | None:
        if self.shared is None or not _full_attention(call):
            return None
        *tensors, layer, window = (self.new(operand) for operand in operands_of(call))
        return placeholder(SPREAD_ATTENTION, [*tensors, self.shared, layer, window], call.ty)


def _full_attention(call: Any) -> bool:
    return placeholder_name(call) == DECODE_ATTENTION and int(operands_of(call)[-1]) == 0


def _with_shared(func: relax.Function, name: str, rows: int) -> relax.Function:
    """A copy of the function with one more input."""
    func, inputs = relax.utils.copy_with_new_vars(func), num_inputs(func)
    params = [*func.params[:inputs], relax.Var("shared", relax.TensorType([rows], "int32")), *func.params[inputs:]]
    widened = relax.Function(params, func.body, func.ret_ty, func.is_pure, func.attrs)
    return widened.with_attr("num_input", inputs + 1).with_attr("global_symbol", name)


def SpreadDecode(provider: KernelProvider, attention: AttentionSpec, buckets: tuple[int, ...]) -> Any:
    """The pass. `buckets`: those of `decode` that get a second function."""

    @tvm.transform.module_pass(opt_level=0, name="SpreadDecode")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        for rows in buckets:
            if provider.spread_attention(attention, rows) is None:
                continue
            original = mod[f"decode_{rows}"]
            if any(_full_attention(binding.value) for block in original.body.blocks for binding in block.bindings):
                name = f"{SPREAD}_{rows}"
                functions[tvm.ir.GlobalVar(name)] = _with_shared(original, name, rows)
        return _Rewriter(tvm.IRModule(functions, attrs=mod.attrs)).run()

    return run
