"""Stand-ins for TVM's two CUDA-graph builtins, so that a rewritten module runs and can be checked on a machine without a
GPU. Like the real ones: storages are allocated once per index, a capture is keyed by region and captured sizes, and a
replay uses the arguments recorded at capture, not those it is given.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import EnvironmentProblem
from relaxpack.schedules.cuda_compile import prepare_cuda_compiler


@dataclass
class GraphLog:
    """What happened: ("alloc", index), ("capture", key) or ("replay", key), in order."""

    events: list[tuple[str, Any]] = field(default_factory=list)

    def count(self, kind: str) -> int:
        return sum(event == kind for event, _ in self.events)


def install() -> GraphLog:
    """Register the stand-ins with fresh caches."""
    # The library of the real ones, which a later test may need, aborts the process when it finds their names taken.
    with suppress(EnvironmentProblem):
        prepare_cuda_compiler()
    log = GraphLog()
    invoke = tvm.get_global_func("vm.builtin.invoke_closure")
    storages: dict[int, Any] = {}
    captures: dict[Any, tuple[list[Any], Any]] = {}

    def get_cached_alloc(vm: Any, closure: Any, index: int) -> Any:
        if index not in storages:
            storages[index] = invoke(vm, closure)
            log.events.append(("alloc", index))
        return storages[index]

    def run_or_capture(vm: Any, closure: Any, args: Any, index: int, shape: Any = None) -> Any:
        key = (int(index), tuple(shape) if shape is not None else ())
        if key not in captures:
            captures[key] = (list(args), invoke(vm, closure, *args))
            log.events.append(("capture", key))
        else:
            invoke(vm, closure, *captures[key][0])
            log.events.append(("replay", key))
        return captures[key][1]

    tvm.register_global_func("vm.builtin.cuda_graph.get_cached_alloc", get_cached_alloc, override=True)
    tvm.register_global_func("vm.builtin.cuda_graph.run_or_capture", run_or_capture, override=True)
    return log
