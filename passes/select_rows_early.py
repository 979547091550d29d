"""SelectRowsEarly: rows that no logits are asked of are dropped before the last layer's row-wise work, not after it.

`take(f(x), rows)` becomes `f(take(x, rows))` for every row-wise f (linear layers, norms, sums, activations) that nobody else
reads, up to the last attention. A prefill that wants the logits of a prompt's last token then computes the last
layer's MLP for one row. Takes of parameters (embedding tables) are left alone.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import FunctionRewriter, is_op
from tvm import relax
from tvm.relax.expr_functor import mutator

_ROW_WISE = {f"relax.{name}" for name in ("add", "multiply", "nn.silu", "nn.gelu_tanh", "nn.rms_norm", "astype", "matmul")}


@mutator
class _Rewriter(FunctionRewriter):
    def rewrite(self, call: Any) -> Any | None:
        if not is_op(call, "relax.take") or int(call.attrs.axis) != 0 or self.is_parameter(call.args[0]):
            return None
        moved = self._moved(call)
        if call.args[0] not in moved:
            return None
        done: dict[Any, Any] = {}
        # All takes come first, the residual's before the last: a long tensor dies early and leaves its storage.
        for var in reversed(list(self.definitions)):
            if var in moved:
                for arg in self.definitions[var].args:
                    if arg not in moved and not self._is_weight(arg):
                        self._rows_of(arg, call, moved, done)
        return self._row_wise(call.args[0], call, moved, done)

    def _moved(self, take: Any) -> set[Any]:
        """Variables whose value is row-wise and is read by the take and by other such variables alone."""
        moved: set[Any] = set()
        for var, value in reversed(list(self.definitions.items())):
            users = self.users.get(var, [])
            if users and all(user in moved or value_of.same_as(take) for user, value_of in users) \
                    and self._is_row_wise(value):
                moved.add(var)
        return moved

    def _is_row_wise(self, value: Any) -> bool:
        if not isinstance(value, tvm.ir.Call) or not isinstance(value.op, tvm.ir.Op) \
                or value.op.name not in _ROW_WISE:
            return False
        if value.op.name == "relax.matmul":
            return self._is_weight(value.args[1])
        # An operand with a row axis of its own, or one that all rows share.
        return all(self._is_weight(arg) or len(arg.ty.shape) == len(value.ty.shape) for arg in value.args)

    def _is_weight(self, expr: Any) -> bool:
        value = self.definition(expr)
        if is_op(value, "relax.permute_dims"):
            value = value.args[0]
        return self.is_parameter(value) or isinstance(value, tvm.ir.GenericConst)

    def _rows_of(self, expr: Any, take: Any, moved: set[Any], done: dict[Any, Any]) -> Any:
        """The taken rows of a variable."""
        if expr not in done:
            done[expr] = self.emit(self._row_wise(expr, take, moved, done) if expr in moved else relax.op.take(
                self.new(expr), self.new(take.args[1]), axis=0, mode=str(take.attrs.mode)))
        return done[expr]

    def _row_wise(self, var: Any, take: Any, moved: set[Any], done: dict[Any, Any]) -> Any:
        value = self.definitions[var]
        args = [self.new(arg) if self._is_weight(arg) else self._rows_of(arg, take, moved, done) for arg in value.args]
        return tvm.ir.Call(value.op, args, value.attrs, value.ty_args)


@tvm.transform.module_pass(opt_level=0, name="SelectRowsEarly")
def SelectRowsEarly(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    return _Rewriter(mod).run()
