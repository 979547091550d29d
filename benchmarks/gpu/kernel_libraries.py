"""Kernels into libraries of a few each, and what ptxas says of them. On the building machine: TVM's compiler and nvcc."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PER_MODULE = 24            # kernels per library: bounds the cost of one compiler run


def compile_parts(folder: Path, stem: str, makers: Mapping[str, Callable[[], Any]],
                  per_module: int = PER_MODULE) -> dict[str, dict[str, Any]]:
    """Kernels by name into libraries STEM-0.so, STEM-1.so, ...; by name the library and what ptxas says of the kernel. Ends
    the script where a tool is missing, before anything is compiled."""
    from relaxpack.errors import EnvironmentProblem
    from relaxpack.schedules.cuda_compile import check_library, compile_module, require_cuobjdump, resource_usage
    from relaxpack.target import parse_target

    import tvm  # isort: skip

    try:
        require_cuobjdump()
    except EnvironmentProblem as error:
        raise SystemExit(str(error)) from None
    folder.mkdir(parents=True, exist_ok=True)
    names, found, started = list(makers), {}, time.time()
    for number, first in enumerate(range(0, len(names), per_module)):
        part = names[first:first + per_module]
        library = folder / f"{stem}-{number}.so"
        executable = compile_module(tvm.IRModule({name: makers[name]() for name in part}), parse_target("cuda:sm_90a"))
        executable.export_library(str(library))
        check_library(library)
        usage = resource_usage(library)
        found |= {name: {"library": library.name, **usage.get(f"{name}_kernel", {})} for name in part}
        print(f"{library.name}: {len(found)} of {len(names)} kernels, {time.time() - started:.0f} s", flush=True)
    return found


def spilling(kernels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [name for name, used in kernels.items() if used.get("stack", 0) or used.get("local", 0)]
