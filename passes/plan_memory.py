"""PlanMemory: every intermediate of an exported function gets its place in storages that are shared by tensors which are
never alive together, over all functions of the module.

Symbolic sizes count with their upper bounds. An output takes the bytes of an input that dies in the same call where the
kernel says that it may (attribute `relaxpack.overwrites`, from `kernel_spec.Stage`). All functions use the same
storages, since only one runs at a time: with graphs TVM allocates them once for the module (`cuda_graph_alloc`), without
it takes them from its pool. Results of functions that are not captured belong to the caller and are not planned.
Stands where TVM's StaticPlanBlockMemory would; `VerifyMemoryPlan` checks what it did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.passes.memory_plan import OVERWRITES, tensor_bytes
from relaxpack.passes.rewrite import exported_functions, is_op
from relaxpack.passes.specialize_buckets import bucket_of
from relaxpack.passes.storage_plan import Block, max_live, plan_storages
from tvm import relax


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
        self.results = set(self._of(func.body.body))

    def _see(self, step: int, var: Any, value: Any) -> None:
        if isinstance(value, relax.Tuple):
            self.parts[var] = [self._of(field) for field in value.fields]
            self.reaches[var] = set().union(*self.parts[var], set())
        elif isinstance(value, relax.TupleGetItem):
            whole = value.tuple_value
            self.reaches[var] = self.parts[whole][value.index] if whole in self.parts else self._of(whole)
        elif isinstance(value, relax.Var):
            self.reaches[var] = self._of(value)
            if value in self.parts:
                self.parts[var] = self.parts[value]
        elif isinstance(value, tvm.ir.Call):
            for arg in _arguments(value):
                self._use(arg, step)
            if not isinstance(value.op, tvm.ir.GlobalVar):    # a view or an identity; PrimFuncs return nothing
                self.reaches[var] = set().union(*map(self._of, _arguments(value)), set())

    def _of(self, expr: Any) -> set[Any]:
        if isinstance(expr, relax.Tuple):
            return set().union(*map(self._of, expr.fields), set())
        return self.reaches.get(expr, set()) if isinstance(expr, relax.Var) else set()

    def _use(self, expr: Any, step: int) -> None:
        for var in self._of(expr):
            tensor = self.tensors[var]
            tensor.first = step if tensor.first < 0 else tensor.first
            tensor.last = step

    def only(self, expr: Any) -> _Tensor | None:
        """The allocation an argument points into, if it is exactly one."""
        found = self._of(expr)
        return self.tensors[next(iter(found))] if len(found) == 1 else None


def _arguments(call: Any) -> list[Any]:
    found: list[Any] = []
    for arg in call.args:
        found.extend(arg.fields if isinstance(arg, relax.Tuple) else [arg])
    return found


class _Groups:
    """Tensors that are one block because the later ones overwrite the earlier ones in place."""

    def __init__(self, mod: tvm.IRModule | None, lifetimes: _Lifetimes, planned: list[_Tensor]) -> None:
        """`mod` None: nothing is overwritten."""
        self.members: list[list[_Tensor]] = [[tensor] for tensor in planned]
        self.group_of = {tensor.var: i for i, tensor in enumerate(planned)}
        if mod is None:
            return
        for step, binding in enumerate(lifetimes.bindings):
            call = binding.value
            if isinstance(call, tvm.ir.Call) and isinstance(call.op, tvm.ir.GlobalVar):
                for source, target in (mod[call.op].attrs or {}).get(OVERWRITES, ()):
                    self._overwrite(lifetimes, call, step, int(source), int(target))

    def _overwrite(self, lifetimes: _Lifetimes, call: Any, step: int, source: int, target: int) -> None:
        old, new = lifetimes.only(call.args[source]), lifetimes.only(call.args[target])
        if old is None or new is None or old is new or not {old.var, new.var} <= self.group_of.keys():
            return
        reads = [arg for arg in call.args if old.var in lifetimes._of(arg)]
        if len(reads) != 1 or old.last != step or new.first != step \
                or not tvm_ffi.structural_equal(old.var.ty, new.var.ty):
            return
        into, group = self.group_of[old.var], self.group_of[new.var]
        if into != group:
            self.members[into] += self.members[group]
            self.members[group] = []
            for member in self.members[into]:
                self.group_of[member.var] = into

    def blocks(self) -> tuple[list[list[_Tensor]], list[Block]]:
        groups = [members for members in self.members if members]
        return groups, [Block(members[0].size, min(m.first for m in members), max(m.last for m in members))
                        for members in groups]


@dataclass
class _Function:
    gv: Any
    func: relax.Function
    lifetimes: _Lifetimes
    groups: list[list[_Tensor]]
    blocks: list[Block]


def PlanMemory(overwrite: bool = True) -> Any:
    """The pass. `overwrite` False: no output takes the bytes of an input."""

    @tvm.transform.module_pass(opt_level=0, name="PlanMemory")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        found = []
        for gv, func in exported_functions(mod):
            lifetimes = _Lifetimes(func)
            planned = [t for var, t in lifetimes.tensors.items() if var not in lifetimes.results and t.first >= 0]
            if bucket_of(func) is not None:    # the result leaves as a view of planned memory (PrepareCapture)
                planned = [t for t in lifetimes.tensors.values() if t.first >= 0]
            groups, blocks = _Groups(mod if overwrite else None, lifetimes, planned).blocks()
            found.append(_Function(gv, func, lifetimes, groups, blocks))
        functions = dict(mod.functions_items())
        pool: list[int] = []
        plans = {}
        for f in sorted(found, key=lambda f: (-max_live(f.blocks), f.gv.name_hint)):
            plans[f.gv] = plan_storages(f.blocks, pool)
            pool = plans[f.gv].storages
        for f in found:
            functions[f.gv] = _rewrite(f, plans[f.gv].storage_of, pool)
        return tvm.IRModule(functions, attrs=mod.attrs)

    return run


def _rewrite(f: _Function, storage_of: list[int], sizes: list[int]) -> relax.Function:
    """Allocations become tensors of storages; a storage is allocated where it is first needed."""
    place = {tensor.var: storage_of[i] for i, group in enumerate(f.groups) for tensor in group}
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
