"""The memory plan: what planning decided, read back as data, and checked by looking at lifetimes again.

`VerifyMemoryPlan` stands right after planning and shares no code with it. It proves that no two live tensors share
bytes: a tensor lives from its allocation to its last use (uses through tuples, views and in-place results count), every
tensor lies inside its storage, and storages do not overlap by construction. The one exception is an output over an input
that dies in the same call, where the kernel declares that. The plan goes into the module attribute
`relaxpack.memory_plan`, with the largest sum of bytes alive at once, which no plan can undercut.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.passes.rewrite import exported_functions, is_op, variables
from relaxpack.passes.specialize_buckets import bucket_of
from tvm import relax

PLAN = "relaxpack.memory_plan"
OVERWRITES = "relaxpack.overwrites"   # PrimFunc attribute: [[input index, output index], ...] of its parameters


@dataclass(frozen=True)
class PlannedTensor:
    """One intermediate: bytes [offset, offset + size) of a storage, alive in steps [first, last] of the function.
    `overwrites`: the tensor whose bytes this one takes in the call in which that one dies."""

    function: str
    name: str
    storage: int
    offset: int
    size: int
    first: int
    last: int
    overwrites: str | None = None


def upper_bound(expr: Any, bounds: dict[str, int]) -> int:
    """Largest value of a shape expression when its variables take their bounds."""
    if isinstance(expr, int | tvm.tirx.IntImm):
        return int(expr)
    analyzer = tvm.sym.Analyzer()
    for variable in tvm.tirx.analysis.undefined_vars(expr):
        analyzer.bind(variable, tvm.tirx.IntImm("int64", bounds[variable.name]))
    return int(analyzer.simplify(expr))


def tensor_bytes(ty: Any, bounds: dict[str, int]) -> int:
    """Bytes of a tensor at the upper bounds of its symbolic sizes."""
    size = (tvm.DataType(str(ty.dtype)).bits + 7) // 8
    for dim in ty.shape:
        size *= upper_bound(dim, bounds)
    return size


class _FunctionPlan:
    """Walks one planned function: who owns which storage bytes, and when each owner is last used."""

    def __init__(self, name: str, func: relax.Function, mod: tvm.IRModule) -> None:
        self.name, self.mod = name, mod
        self.bounds = {str(k): int(v) for k, v in dict(func.attrs["tir_var_upper_bound"]).items()}
        self.storages: list[tuple[Any, int]] = []       # (variable, bytes)
        self.owners: dict[Any, dict[str, Any]] = {}      # tensor variable → facts
        self.aliases: dict[Any, Any] = {}                # variable → owners whose bytes it may read
        self.unplanned: list[str] = []
        self.results: dict[Any, int] = {}                # allocations that are the caller's → bytes
        self.written: dict[Any, int] = {}                # owner → the step of its first use
        self.declared: list[tuple[int, Any, Any]] = []   # (step, input owner, output owner) that a kernel allows
        bindings = [b for block in func.body.blocks for b in block.bindings]
        for step, binding in enumerate(bindings):
            self._visit(step, binding.var, binding.value)
        self._touch(func.body.body, len(bindings))

    def _visit(self, step: int, var: Any, value: Any) -> None:
        if is_op(value, "relax.memory.alloc_storage"):
            self.storages.append((var, int(value.args[0].values[0])))
        elif is_op(value, "relax.memory.alloc_tensor"):
            storage = next(i for i, (s, _) in enumerate(self.storages) if s.same_as(value.args[0]))
            self.owners[var] = {"storage": storage, "offset": int(value.args[1]), "first": step, "last": step,
                                "size": tensor_bytes(var.ty, self.bounds)}
            self.aliases[var] = {var}
        elif is_op(value, "relax.builtin.alloc_tensor"):
            self.unplanned.append(var.name)
            self.results[var] = tensor_bytes(var.ty, self.bounds)
        else:
            if isinstance(value, tvm.ir.Call):  # tuples and projections only name memory, calls read it
                if isinstance(value.op, tvm.ir.GlobalVar):
                    self._declare(step, value)
                for operand in variables(value):
                    self._touch(operand, step)
            self.aliases[var] = self._aliases_of(value)

    def _aliases_of(self, value: Any) -> Any:
        """Owners a value may point into: a set, or a list of such for a tuple, so that projecting stays precise."""
        if isinstance(value, relax.Var):
            return self.aliases.get(value, set())
        if isinstance(value, relax.Tuple):
            return [self._aliases_of(field) for field in value.fields]
        if isinstance(value, relax.TupleGetItem):
            inside = self.aliases.get(value.tuple_value, set())
            return inside[value.index] if isinstance(inside, list) else inside
        if isinstance(value, tvm.ir.Call) and not isinstance(value.op, tvm.ir.GlobalVar):  # a view (reshape), a copy
            return set().union(*(_flat(self.aliases.get(v, set())) for v in variables(value)), set())
        return set()  # kernels return nothing

    def _touch(self, var: Any, step: int) -> None:
        for owner in _flat(self.aliases.get(var, set())):
            self.owners[owner]["last"] = step
            self.written.setdefault(owner, step)

    def _declare(self, step: int, call: Any) -> None:
        owners = [_flat(self.aliases.get(arg, set())) if isinstance(arg, relax.Var) else set() for arg in call.args]
        for source, target in (self.mod[call.op].attrs or {}).get(OVERWRITES, ()):
            old, new = owners[int(source)], owners[int(target)]
            if len(old) == len(new) == 1 and sum(bool(old & other) for other in owners) == 1:
                self.declared.append((step, next(iter(old)), next(iter(new))))

    def tensors(self) -> list[PlannedTensor]:
        over = {}
        for step, old, new in self.declared:
            a, b = self.owners[old], self.owners[new]
            same = all(a[fact] == b[fact] for fact in ("storage", "offset", "size"))
            if same and a["last"] == step and self.written[new] == step:
                over[new] = old.name
        return [PlannedTensor(self.name, var.name, **facts, overwrites=over.get(var))
                for var, facts in self.owners.items()]

    def live_bytes(self) -> int:
        """Largest sum of bytes alive at once; bytes that are overwritten in place count once."""
        changes: dict[int, int] = {}
        for (var, facts), tensor in zip(self.owners.items(), self.tensors(), strict=True):
            if var in self.written:
                start = self.written[var] + (tensor.overwrites is not None)
                changes[start] = changes.get(start, 0) + facts["size"]
                changes[facts["last"] + 1] = changes.get(facts["last"] + 1, 0) - facts["size"]
        live = most = 0
        for step in sorted(changes):
            live += changes[step]
            most = max(most, live)
        return most


def _flat(aliases: Any) -> set[Any]:
    return set().union(*map(_flat, aliases), set()) if isinstance(aliases, list) else aliases


def check_no_overlap(tensors: list[PlannedTensor], storage_bytes: list[int]) -> None:
    """Raise CompileError if a tensor leaves its storage or shares bytes with another one alive at the same time."""
    for t in tensors:
        if t.offset + t.size > storage_bytes[t.storage]:
            raise CompileError(f"memory plan of {t.function}: {t.name} needs {t.offset + t.size} bytes of storage "
                               f"{t.storage}, which has {storage_bytes[t.storage]}")
    ordered = sorted(tensors, key=lambda t: (t.storage, t.first))
    for i, a in enumerate(ordered):
        for b in ordered[i + 1:]:
            if b.storage != a.storage:
                break
            if b.first < a.last and b.offset < a.offset + a.size and a.offset < b.offset + b.size \
                    and b.overwrites != a.name:
                raise CompileError(f"memory plan of {a.function}: {a.name} (alive in steps {a.first}-{a.last}) and "
                                   f"{b.name} ({b.first}-{b.last}) share bytes of storage {a.storage}")


def arena_bytes(plan: dict[str, Any]) -> int:
    """Bytes all functions together hold. They share storages: the largest of one stands where the largest of another
    does, and so on down."""
    sizes = [sorted(function["storages"], reverse=True) for function in plan.values()]
    return sum(max(rank) for rank in zip_longest(*sizes, fillvalue=0))


@tvm.transform.module_pass(opt_level=0, name="VerifyMemoryPlan")
def VerifyMemoryPlan(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
    """The pass. Raises CompileError where two live tensors share bytes."""
    plan: dict[str, Any] = {}
    for gv, func in exported_functions(mod):
        found = _FunctionPlan(gv.name_hint, func, mod)
        storage_bytes = [size for _, size in found.storages]
        check_no_overlap(found.tensors(), storage_bytes)
        plan[gv.name_hint] = {"storages": storage_bytes, "bytes": sum(storage_bytes), "live_bytes": found.live_bytes(),
                              "captured": bucket_of(func) is not None, "result_bytes": sum(found.results.values()),
                              "tensors": [asdict(t) for t in found.tensors()], "unplanned": found.unplanned}
    return mod.with_attr(PLAN, json.dumps(plan))
