"""PlanMemory: every intermediate of an exported function gets its place in storages that are shared by tensors which are
never alive together, over all functions of the module.

Symbolic sizes count with their upper bounds. An output takes the bytes of an input that dies in the same call where the
kernel says that it may (attribute `relaxpack.overwrites`, from `kernel_spec.Stage`). All functions use the same
storages, since only one runs at a time: with graphs TVM allocates them once for the module (`cuda_graph_alloc`), without
it takes them from its pool. Results of functions that are not captured belong to the caller and are not planned.
Stands where TVM's StaticPlanBlockMemory would; `VerifyMemoryPlan` checks what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.passes.memory_plan import OVERWRITES, tensor_bytes
from relaxpack.passes.rewrite import exported_functions, is_op
from relaxpack.passes.specialize_buckets import bucket_of
from relaxpack.passes.storage_plan import Block, max_live, plan_storages
from relaxpack.placeholders import READS_RESULTS
from tvm import relax

_SLACK = 128   # a plan within 1/128 of the lower bound is not worth a search


@dataclass
class _Tensor:
    """One allocation and the steps in which its bytes matter."""

    var: Any
    size: int
    first: int = -1      # the call that writes it
    last: int = -1       # its last use


class _Lifetimes:
    """Lifetimes of the allocations of one function whose body is a straight line of bindings."""

    def __init__(self, func: relax.Function) -> None:
        bounds = {str(k): int(v) for k, v in dict(func.attrs["tir_var_upper_bound"]).items()}
        self.bindings = [b for block in func.body.blocks for b in block.bindings]
        self.tensors: dict[Any, _Tensor] = {}
        self.reaches: dict[Any, set[Any]] = {}    # variable → allocations it may point into
        self.parts: dict[Any, list[set[Any]]] = {}  # tuple variable → the same, field by field
        for step, binding in enumerate(self.bindings):
            var, value = binding.var, binding.value
            if is_op(value, "relax.builtin.alloc_tensor"):
                self.tensors[var] = _Tensor(var, tensor_bytes(var.ty, bounds))
                self.reaches[var] = {var}
                continue
            self._see(step, var, value)
        self._use(func.body.body, len(self.bindings))
        self.results = set(self.reach(func.body.body))

    def _see(self, step: int, var: Any, value: Any) -> None:
        if isinstance(value, relax.Tuple):
            self.parts[var] = [self.reach(field) for field in value.fields]
            self.reaches[var] = set().union(*self.parts[var], set())
        elif isinstance(value, relax.TupleGetItem):
            whole = value.tuple_value
            self.reaches[var] = self.parts[whole][value.index] if whole in self.parts else self.reach(whole)
        elif isinstance(value, relax.Var):
            self.reaches[var] = self.reach(value)
            if value in self.parts:
                self.parts[var] = self.parts[value]
        elif isinstance(value, tvm.ir.Call):
            for arg in _arguments(value):
                self._use(arg, step)
            if not isinstance(value.op, tvm.ir.GlobalVar):    # a view or an identity; PrimFuncs return nothing
                self.reaches[var] = set().union(*map(self.reach, _arguments(value)), set())

    def reach(self, expr: Any) -> set[Any]:
        if isinstance(expr, relax.Tuple):
            return set().union(*map(self.reach, expr.fields), set())
        return self.reaches.get(expr, set()) if isinstance(expr, relax.Var) else set()

    def _use(self, expr: Any, step: int) -> None:
        for var in self.reach(expr):
            tensor = self.tensors[var]
            tensor.first = step if tensor.first < 0 else tensor.first
            tensor.last = step

    def only(self, expr: Any) -> _Tensor | None:
        """The allocation an argument points into, if it is exactly one."""
        found = self.reach(expr)
        return self.tensors[next(iter(found))] if len(found) == 1 else None


def _arguments(call: Any) -> list[Any]:
    found: list[Any] = []
    for arg in call.args:
        found.extend(arg.fields if isinstance(arg, relax.Tuple) else [arg])
    return found


@dataclass(frozen=True)
class _Overwriting:
    """In the call at `step` a kernel may write `new` over `old`, which dies there."""

    step: int
    old: Any
    new: Any


def _overwritings(mod: tvm.IRModule, lifetimes: _Lifetimes, planned: set[Any]) -> list[_Overwriting]:
    found = []
    for step, binding in enumerate(lifetimes.bindings):
        call = binding.value
        if isinstance(call, tvm.ir.Call) and isinstance(call.op, tvm.ir.GlobalVar):
            for source, target in (mod[call.op].attrs or {}).get(OVERWRITES, ()):
                old, new = lifetimes.only(call.args[int(source)]), lifetimes.only(call.args[int(target)])
                if old is None or new is None or old is new or not {old.var, new.var} <= planned:
                    continue
                reads = [arg for arg in call.args if old.var in lifetimes.reach(arg)]
                if len(reads) == 1 and old.last == step and new.first == step \
                        and tvm_ffi.structural_equal(old.var.ty, new.var.ty):
                    found.append(_Overwriting(step, old.var, new.var))
    return found


@dataclass
class _Function:
    gv: Any
    func: relax.Function
    lifetimes: _Lifetimes
    planned: list[_Tensor]
    overwritings: list[_Overwriting]

    def blocks(self, done: Sequence[_Overwriting]) -> tuple[list[list[_Tensor]], list[Block]]:
        """Groups of tensors, and the block that each is: tensors that overwrite one another are one."""
        group_of = {tensor.var: [tensor] for tensor in self.planned}
        for one in done:
            group, other = group_of[one.old], group_of[one.new]
            if group is not other:
                group += other
                group_of |= {tensor.var: group for tensor in other}
        groups = list({id(group): group for group in group_of.values()}.values())
        return groups, [Block(group[0].size, min(t.first for t in group), max(t.last for t in group)) for group in groups]

    def place(self, pool: list[int]) -> tuple[dict[Any, int], list[int]]:
        """(storage of each tensor, storages). More overwriting is not always smaller, since a block that lives longer
        finds fewer storages free: overwritings are given up one by one where that helps."""
        done = list(self.overwritings)
        bound = max(sum(pool), max_live(self.blocks(done)[1]))
        best = plan_storages(self.blocks(done)[1], pool)
        for one in reversed(self.overwritings):
            if best.total <= bound + bound // _SLACK:
                break
            without = [other for other in done if other is not one]
            found = plan_storages(self.blocks(without)[1], pool, shuffles=0)
            if found.total < best.total:
                best, done = found, without
        groups, _ = self.blocks(done)
        return {t.var: s for group, s in zip(groups, best.storage_of, strict=True) for t in group}, best.storages


def PlanMemory(overwrite: bool = True) -> Any:
    """The pass. `overwrite` False: no output takes the bytes of an input."""

    @tvm.transform.module_pass(opt_level=0, name="PlanMemory")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        found = []
        for gv, func in exported_functions(mod):
            lifetimes = _Lifetimes(func)
            # The result of a captured function leaves as a view of planned memory (PrepareCapture).
            kept = set() if bucket_of(func) is not None else lifetimes.results
            apart = READS_RESULTS in (func.attrs or {})
            planned = [t for var, t in lifetimes.tensors.items() if var not in kept and t.first >= 0 and not apart]
            may = _overwritings(mod, lifetimes, {t.var for t in planned}) if overwrite else []
            found.append(_Function(gv, func, lifetimes, planned, may))
        functions = dict(mod.functions_items())
        pool: list[int] = []
        places = {}
        for f in sorted(found, key=lambda f: (-max_live(f.blocks(f.overwritings)[1]), f.gv.name_hint)):
            places[f.gv], pool = f.place(pool)
        for f in found:
            functions[f.gv] = _rewrite(f, places[f.gv], pool)
        return tvm.IRModule(functions, attrs=mod.attrs)

    return run


def _rewrite(f: _Function, place: dict[Any, int], sizes: list[int]) -> relax.Function:
    """Allocations become tensors of storages; a storage is allocated where it is first needed."""
    storages: dict[int, Any] = {}
    typed = relax.BlockBuilder().normalize
    bindings = []
    for binding in f.lifetimes.bindings:
        if binding.var not in place:
            bindings.append(binding)
            continue
        index = place[binding.var]
        if index not in storages:
            storages[index] = relax.Var(f"storage{index}", relax.ObjectType())
            bindings.append(relax.VarBinding(storages[index], typed(relax.op.memory.alloc_storage(
                relax.ShapeExpr([sizes[index]]), 0, "global", "uint8"))))
        shape, dtype = binding.value.args[0], str(binding.var.ty.dtype)
        bindings.append(relax.VarBinding(
            binding.var, typed(relax.op.memory.alloc_tensor(storages[index], relax.prim_value(0), shape, dtype))))
    body = typed(relax.SeqExpr([relax.BindingBlock(bindings)], f.func.body.body))
    return relax.Function(f.func.params, body, f.func.ret_ty, f.func.is_pure, f.func.attrs)
