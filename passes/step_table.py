"""The step as a table: every kernel call of every exported function in launch order, with what it must move and compute.

Costs are linear in the rows of the step and in the context, so a table made at build answers for any batch and length:

    bytes = weight_bytes + rows * (row_bytes + context * context_bytes)
    FLOPs = rows * (row_flops + context * context_flops)

Bytes are the least any kernel could move: weights once, activations once each way, keys and values once per query (once
per sequence in a prefill, where `context_bytes` counts for one row). Workspace of kernels is not counted.

`depth` is a kernel's place in the chain of kernels that wait for one another's results. Where the deepest one is as deep
as there are kernels, none could run beside another, and none is left to merge with a neighbour that it does not feed.
"""

from __future__ import annotations

import json
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import exported_functions, is_op, num_inputs, variables
from tvm import relax

OPERATIONS = "relaxpack.operations"   # module attribute: JSON of PrimFunc name → facts about the operation it is part of
_COSTS = ("weight_bytes", "row_bytes", "context_bytes", "row_flops", "context_flops")


def step_table(mod: tvm.IRModule) -> dict[str, list[dict[str, Any]]]:
    """Function → calls in order: kernel, operation, rows, shape, depth and the five costs. For a module after phase
    `lower`."""
    operations = json.loads(str(mod.attrs[OPERATIONS]))
    table = {}
    for gv, func in exported_functions(mod):
        weights = set(func.params[num_inputs(func):])
        table[gv.name_hint] = [{**_row(call, weights, operations), "depth": depth} for call, depth in _kernel_calls(func)]
    return table


def _kernel_calls(func: Any) -> list[tuple[Any, int]]:
    """(call, depth) in order."""
    found: list[tuple[Any, int]] = []
    depths: dict[Any, int] = {}
    for binding in (binding for block in func.body.blocks for binding in block.bindings):
        value = binding.value
        depth = max((depths.get(var, 0) for var in variables(value)), default=0)
        if is_op(value, "relax.call_tir") or is_op(value, "relax.call_tir_inplace"):
            depth += 1
            found.append((value, depth))
        depths[binding.var] = depth
    return found


def _row(call: Any, weights: set[Any], operations: dict[str, Any]) -> dict[str, Any]:
    name = call.args[0].name_hint
    inputs = list(call.args[1].fields) if isinstance(call.args[1], relax.Tuple) else [call.args[1]]
    outputs = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
    facts = operations.get(name, {"operation": "other", "stage": 0})
    if is_op(call, "relax.call_tir_inplace"):
        indices = [int(i) for i in call.attrs.inplace_indices]
        outputs = [ty for ty, index in zip(outputs, indices, strict=True) if index < 0]
    activations = [x.ty for x in inputs if isinstance(x, relax.Var) and x not in weights and _is_tensor(x.ty)]
    first = next((ty.shape[0] for ty in [*outputs, *activations] if len(ty.shape)), 1)
    costs = _costs(facts, [w for w in inputs if w in weights], activations, outputs, first)
    return {"kernel": name, "operation": facts["operation"], "rows": _dim(first),
            "shape": " × ".join(map(_text, activations[:1])) + " → " + ", ".join(map(_text, outputs[:2])),
            **{key: costs.get(key, 0) for key in _COSTS}}


def _costs(facts: dict[str, Any], weights: list[Any], activations: list[Any], outputs: list[Any],
           rows: Any) -> dict[str, int]:
    kind = facts["operation"]
    if facts["stage"] < 0:
        return {}                                                             # reads shared keys into workspace
    if kind == "linear" and not facts["stage"] and not weights:
        return {"row_bytes": sum(_row_bytes(ty, rows) for ty in [*activations, *outputs])}      # x is quantised first
    if facts["stage"] and kind != "other" and not weights:
        return {"row_bytes": sum(_row_bytes(ty, rows) for ty in outputs)}     # merging parts: the first stage has the work
    weight_bytes = sum(_bytes(w.ty) for w in weights)
    if kind == "linear":
        return {"weight_bytes": weight_bytes, "row_flops": 2 * facts["n"] * facts["k"],
                "row_bytes": sum(_row_bytes(ty, rows) for ty in [*activations, *outputs])}
    if kind == "embedding":
        return {"row_bytes": weight_bytes // facts["vocab"] + sum(_row_bytes(ty, rows) for ty in outputs)}
    if kind == "attention":
        return {"row_bytes": sum(_row_bytes(ty, rows) for ty in [*activations[:1], *outputs[:1]]),
                "context_bytes": facts["kv_bytes"], "context_flops": 4 * facts["heads"] * facts["head_dim"]}
    if kind in ("rope_append", "rope_append_attention"):
        costs = {"row_bytes": _row_bytes(activations[0], rows) + _row_bytes(outputs[0], rows) + facts["kv_bytes"]
                 + facts["rotary_dim"] * 4, "row_flops": 3 * facts["heads"] * facts["rotary_dim"]}
        attends = {"context_bytes": facts["kv_bytes"], "context_flops": 4 * facts["heads"] * facts["head_dim"]}
        return costs if kind == "rope_append" else costs | attends
    moved = sum(_row_bytes(ty, rows) for ty in [*activations, *outputs])
    return {"weight_bytes": weight_bytes, "row_bytes": moved,
            "row_flops": sum(_row_elements(ty, rows) for ty in outputs) * (4 if "norm" in kind else 1)}


def _is_tensor(ty: Any) -> bool:
    return isinstance(ty, relax.TensorType) and ty.shape is not None


def _item(ty: Any) -> int:
    return (tvm.DataType(str(ty.dtype)).bits + 7) // 8


def _bytes(ty: Any) -> int:
    size = _item(ty)
    for dim in ty.shape:
        size *= int(dim)
    return size


def _row_elements(ty: Any, rows: Any) -> int:
    """Elements per row of a tensor whose first axis is the rows of the step; 0 for any other."""
    if not _is_tensor(ty) or len(ty.shape) == 0 or _dim(ty.shape[0]) != _dim(rows):
        return 0
    count = 1
    for dim in list(ty.shape)[1:]:
        if not isinstance(dim, tvm.tirx.IntImm):
            return 0
        count *= int(dim)
    return count


def _row_bytes(ty: Any, rows: Any) -> int:
    return _row_elements(ty, rows) * _item(ty)


def _dim(dim: Any) -> int | str:
    return int(dim) if isinstance(dim, int | tvm.tirx.IntImm) else str(dim)


def _text(ty: Any) -> str:
    return f"{ty.dtype}[{', '.join(str(_dim(d)) for d in ty.shape)}]" if _is_tensor(ty) else str(ty)
