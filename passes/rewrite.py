"""Rewriting of exported functions: one straight-line dataflow block in, a new module out, the given module untouched.

`FunctionRewriter` gives a pass what it needs to match and to emit: the definition of a variable, how often it is used,
new parameters with their recipes. Dead bindings and parameters remain; `PruneParameters` removes them.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack import recipe
from relaxpack.errors import CompileError
from relaxpack.placeholders import GLU
from relaxpack.recipe import FromCheckpoint, Recipe
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator

tvm_ffi.register_error(CompileError)  # raised in a pass it crosses TVM's C++, and should arrive as itself

NOTES = "relaxpack.notes"      # module attribute: JSON list of lines for the report
RECIPES = "relaxpack.recipes"  # module attribute: JSON of parameter name → recipe, where they differ


def exported_functions(mod: tvm.IRModule) -> Iterator[tuple[Any, relax.Function]]:
    """(GlobalVar, function) of the functions the runtime calls, sorted by name."""
    found = [(gv, f) for gv, f in mod.functions_items()
             if isinstance(f, relax.Function) and "num_input" in (f.attrs or {})]
    yield from sorted(found, key=lambda item: item[0].name_hint)


def num_inputs(func: relax.Function) -> int:
    return int(func.attrs["num_input"])


def recipes_of(mod: tvm.IRModule) -> dict[str, Recipe]:
    text = (mod.attrs or {}).get(RECIPES)
    return recipe.loads(str(text)) if text is not None else {}


def with_recipes(mod: tvm.IRModule, recipes: dict[str, Recipe]) -> tvm.IRModule:
    return mod.with_attr(RECIPES, recipe.dumps(dict(sorted(recipes.items()))))


def with_note(mod: tvm.IRModule, note: str) -> tvm.IRModule:
    """The module with a line for the report: what a pass did or had to leave alone."""
    return mod.with_attr(NOTES, json.dumps([*notes_of(mod), note]))


def notes_of(mod: tvm.IRModule) -> list[str]:
    text = (mod.attrs or {}).get(NOTES)
    return json.loads(str(text)) if text is not None else []


def is_op(expr: Any, name: str) -> bool:
    return isinstance(expr, tvm.ir.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == name


def scalar_of(expr: Any) -> float | None:
    """A constant number, as its dtype rounds it; None for anything else."""
    if not isinstance(expr, tvm.ir.GenericConst) or expr.value.numpy().shape != ():
        return None
    return float(expr.value.numpy())


def glu_of(expr: Any) -> str | None:
    """The gated linear unit whose gate `expr` is: "swiglu" for a silu, "geglu" for a GELU with the tanh approximation."""
    return next((glu for glu, op in GLU.items() if is_op(expr, op)), None)


def placeholder_name(expr: Any) -> str | None:
    """Name of a `relaxpack.*` placeholder call, else None."""
    if is_op(expr, "relax.call_dps_packed"):
        name = str(expr.args[0].global_symbol)
        return name if name.startswith("relaxpack.") else None
    return None


def placeholder(name: str, operands: list[Any], out_ty: Any) -> Any:
    return relax.call_dps_packed(name, operands, out_ty)


def operands_of(call: Any) -> list[Any]:
    """Operands of a placeholder call."""
    return list(call.args[1].fields)


def variables(expr: Any) -> list[Any]:
    """Variables an expression reads, each once."""
    found: list[Any] = []
    relax.analysis.post_order_visit(
        expr, lambda e: found.append(e) if isinstance(e, relax.Var) and e not in found else None)
    return found


class FunctionRewriter(PyExprMutator):
    """Derive, decorate with `@mutator` and define `rewrite(call)`: return the new expression, or None to keep the
    call. Arguments found through `definition` belong to the old function: pass them through `new(expr)` before use.
    `users` lists for each variable of the old function the bindings (variable, value) that read it."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.mod = mod
        self.recipes = recipes_of(mod)
        self.definitions: dict[Any, Any] = {}
        self.users: dict[Any, list[tuple[Any, Any]]] = {}
        self.added: dict[str, relax.Var] = {}
        self.parameters: dict[str, relax.Var] = {}

    @abstractmethod
    def rewrite(self, call: Any) -> Any | None: ...

    def run(self) -> tvm.IRModule:
        functions = {gv: self._rewrite_function(gv.name_hint, func) for gv, func in exported_functions(self.mod)}
        # The builder's module holds the PrimFuncs that rewriting added.
        out = tvm.IRModule({**dict(self.builder_.get().functions_items()), **functions}, attrs=self.mod.attrs)
        out = with_recipes(out, self.recipes) if self.recipes else out
        return relax.transform.DeadCodeElimination([gv.name_hint for gv in functions])(out)

    def _rewrite_function(self, name: str, func: relax.Function) -> relax.Function:
        block = func.body.blocks[0]
        self.definitions = {binding.var: binding.value for binding in block.bindings}
        self.users = defaultdict(list)
        for binding in block.bindings:
            for operand in variables(binding.value):
                self.users[operand].append((binding.var, binding.value))
        self.added = {}
        self.parameters = {v.name: v for v in func.params[num_inputs(func):]}
        body = self.visit_expr(func.body)
        return relax.Function([*func.params, *self.added.values()], body, func.ret_ty, func.is_pure, func.attrs)

    def visit_call_(self, call: Any) -> Any:
        new = self.rewrite(call)
        return self.visit_expr_post_order(call) if new is None else new

    # -- what passes use ------------------------------------------------------------------------------------------

    def definition(self, expr: Any) -> Any:
        """What the old function binds to a variable; the expression itself if it is none."""
        return self.definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def variable_of(self, value: Any) -> Any:
        """The variable that the old function binds to this very expression."""
        return next(var for var, bound in self.definitions.items() if bound.same_as(value))

    def new(self, expr: Any) -> Any:
        return self.visit_expr(expr)

    def emit(self, expr: Any) -> Any:
        return self.builder_.emit(expr)

    def parameter(self, name: str, ty: Any, made_by: Recipe) -> relax.Var:
        """A parameter of this name, added to the function if it has none yet."""
        known = self.recipes.setdefault(name, made_by)
        assert known == made_by, f"two recipes for {name}: {known} and {made_by}"
        if name not in self.added:
            self.added[name] = relax.Var(name, ty)
        return self.added[name]

    def as_float32(self, parameter: relax.Var) -> relax.Var:
        """The parameter itself if it is float32, else its float32 twin (the old one dies unused)."""
        if str(parameter.ty.dtype) == "float32":
            return parameter
        return self.parameter(parameter.name, relax.TensorType(parameter.ty.shape, "float32"),
                              self.recipe_of(parameter))

    def is_parameter(self, expr: Any) -> bool:
        return isinstance(expr, relax.Var) and self.parameters.get(expr.name) is not None \
            and self.parameters[expr.name].same_as(expr)

    def recipe_of(self, parameter: relax.Var) -> Recipe:
        return self.recipes.get(parameter.name, FromCheckpoint(parameter.name))
