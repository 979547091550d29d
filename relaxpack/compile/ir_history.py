"""The IR of a build's step functions from pass to pass: `IrHistory` keeps the last state and answers what a pass changed,
as the diffs that the bundle's record holds (`ir_diff.py`).

Followed are the symbolic functions and the smallest bucket of each; another bucket differs in its sizes and kernels alone.
The last passes, which write the step in the instructions of TVM's VM, are not followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.compile.ir_diff import Line, diff, function_lines
from relaxpack.passes.rewrite import exported_functions
from relaxpack.passes.specialize_buckets import bucket_of

NOT_FOLLOWED = frozenset({"LowerAllocTensor", "KillAfterLastUse", "LowerRuntimeBuiltin", "ComputePrimValue", "VMShapeLower",
                          "AttachGlobalSymbol"})


@dataclass(frozen=True)
class _State:
    func: Any
    lines: list[Line]


class IrHistory:
    def __init__(self, mod: tvm.IRModule) -> None:
        self._states = {name: _State(func, function_lines(func.script(show_meta=False)))
                        for name, func in _followed(mod).items()}

    def changes(self, by: str, mod: tvm.IRModule) -> dict[str, Any]:
        """Function → diff to its last state, where the pass `by` changed it. A new function came from the symbolic one."""
        found: dict[str, Any] = {}
        if by in NOT_FOLLOWED:
            return found
        for name, func in _followed(mod).items():
            before = self._states.get(name) or self._states.get(name.partition("_")[0])
            if before is not None and tvm_ffi.structural_equal(before.func, func):
                self._states[name] = before
                continue
            lines = function_lines(func.script(show_meta=False))
            change = diff(before.lines if before is not None else [], lines)
            if change.hunks:
                found[name] = change.to_json()
            self._states[name] = _State(func, lines)
        return found


def _followed(mod: tvm.IRModule) -> dict[str, Any]:
    functions = {gv.name_hint: func for gv, func in exported_functions(mod)}
    smallest: dict[str, tuple[int, str]] = {}
    for name, func in functions.items():
        if (size := bucket_of(func)) is not None:
            base = name.removesuffix(f"_{size}")
            smallest[base] = min(smallest.get(base, (size, name)), (size, name))
    kept = {name for _, name in smallest.values()}
    return {name: func for name, func in functions.items() if bucket_of(func) is None or name in kept}
