"""Before/expected tests of passes: what every such test checks once for all.

TVMScript parameters cannot be called `a.q_proj.weight`; `named` gives them such names afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.passes.rewrite import RECIPES, recipes_of, with_recipes
from relaxpack.recipe import Recipe
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator


@mutator
class _Rename(PyExprMutator):
    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__(None)
        self.names = names

    def rename(self, func: relax.Function) -> relax.Function:
        params = [relax.Var(self.names.get(p.name, p.name), p.ty) for p in func.params]
        self.new = dict(zip(func.params, params, strict=True))
        return relax.Function(params, self.visit_expr(func.body), func.ret_ty, func.is_pure, func.attrs)

    def visit_var_(self, var: Any) -> Any:
        return self.new.get(var, super().visit_var_(var))


def named(mod: tvm.IRModule, names: Mapping[str, str]) -> tvm.IRModule:
    """The module with parameters renamed by a map from script name to real name."""
    functions = {gv: _Rename(names).rename(f) if isinstance(f, relax.Function) else f
                 for gv, f in mod.functions_items()}
    return tvm.IRModule(functions, attrs=mod.attrs)


def parameter_names(mod: tvm.IRModule) -> dict[str, list[str]]:
    return {gv.name_hint: [p.name for p in f.params] for gv, f in mod.functions_items()
            if isinstance(f, relax.Function)}


def check_pass(before: tvm.IRModule, one_pass: Any, expected: tvm.IRModule,
               recipes: Mapping[str, Recipe] | None = None) -> tvm.IRModule:
    """Apply the pass to `before`: the result equals `expected` (with `recipes`, if any), names of parameters included;
    it is well-formed, and `before` is as it was. Returns the result."""
    kept = tvm.ir.load_json(tvm.ir.save_json(before))
    after = one_pass(before)
    tvm.ir.assert_structural_equal(before, kept)
    assert relax.analysis.check_well_formed(after)
    assert recipes_of(after) == dict(recipes or {})
    # Records that a pass leaves for reports may go beyond `expected`; what was there or is expected is compared.
    attrs, wanted = dict(after.attrs or {}), {**dict(before.attrs or {}), **dict(expected.attrs or {})}
    for key in set(wanted) - {RECIPES}:
        assert key in attrs and tvm_ffi.structural_equal(attrs[key], wanted[key]), key
    tvm.ir.assert_structural_equal(_plain(after), _plain(expected))
    assert parameter_names(after) == parameter_names(expected)
    return after


def check_declines(before: tvm.IRModule, one_pass: Any) -> None:
    """The pass leaves the module as it is."""
    check_pass(before, one_pass, before, recipes_of(before))


def _plain(mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.IRModule(dict(mod.functions_items()))


__all__ = ["check_declines", "check_pass", "named", "parameter_names", "with_recipes"]
