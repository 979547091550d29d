"""ShareRopeTable: the table of cosines and sines becomes one parameter of all functions, computed at build.

Matches `concat([cos(p * f), sin(p * f)], axis=1) [* factor]` with p the constant column 0, 1, 2, ... and f a constant row
of frequencies, as models write it. Runs before FoldConstant, which would otherwise make a constant of it: 33 MB of the
library at 131072 positions. Declines other angles; a second table gets a name of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import FunctionRewriter, is_op
from relaxpack.recipe import RopeTable
from tvm import relax
from tvm.relax.expr_functor import mutator

NAME = "rope_table"


def _constant(expr: Any) -> np.ndarray | None:
    """The float32 numbers of a constant."""
    if not isinstance(expr, tvm.ir.GenericConst):
        return None
    array: np.ndarray = expr.value.numpy()
    return array if array.dtype == np.float32 else None


@mutator
class _Rewriter(FunctionRewriter):
    def rewrite(self, call: Any) -> Any | None:
        if is_op(call, "relax.multiply"):
            table, factor = self._table(self.definition(call.args[0])), _constant(call.args[1])
            return self._shared(*table, float(factor)) if table and factor is not None and factor.shape == () else None
        if (table := self._table(call)) is None:
            return None
        users = [value for _, value in self.users[self.variable_of(call)]]
        scaled = any(is_op(value, "relax.multiply") and _constant(value.args[1]) is not None for value in users)
        return None if scaled else self._shared(*table, 1.0)     # a scaled one is found at its product

    def _table(self, call: Any) -> tuple[int, tuple[float, ...]] | None:
        """(positions, frequencies) of a table."""
        if not is_op(call, "relax.concat") or int(call.attrs.axis) != 1 or len(call.args[0].fields) != 2:
            return None
        cos, sin = (self.definition(part) for part in call.args[0].fields)
        if not is_op(cos, "relax.cos") or not is_op(sin, "relax.sin") or not cos.args[0].same_as(sin.args[0]):
            return None
        angles = self.definition(cos.args[0])
        if not is_op(angles, "relax.multiply"):
            return None
        positions, frequencies = (_constant(arg) for arg in angles.args)
        if positions is None or frequencies is None or positions.shape != (len(positions), 1) \
                or frequencies.ndim != 2 or len(frequencies) != 1 or (positions[:, 0] != np.arange(len(positions))).any():
            return None
        return len(positions), tuple(map(float, frequencies[0]))

    def _shared(self, positions: int, frequencies: tuple[float, ...], factor: float) -> Any:
        made_by, name, count = RopeTable(positions, frequencies, factor), NAME, 2
        while self.recipes.get(name, made_by) != made_by:
            name, count = f"{NAME}.{count}", count + 1
        return self.parameter(name, relax.TensorType([positions, 2 * len(frequencies)], "float32"), made_by)


@tvm.transform.module_pass(opt_level=0, name="ShareRopeTable")
def ShareRopeTable(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    return relax.transform.CanonicalizeBindings()(_Rewriter(mod).run())
