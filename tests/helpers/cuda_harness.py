"""Compiles single PrimFuncs of the CUDA kernels for a named architecture on a machine without a GPU, and reads what
the compiler says about them (generated source, registers, spills, shared memory).

It is for kernel tests and benchmarks only; bundles are built by `relaxpack build`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import EnvironmentProblem
from relaxpack.schedules.cuda_compile import compile_module, device_modules, prepare_cuda_compiler
from relaxpack.target import TargetSpec
from tests.helpers.cuda_emulator import TensorMap

ENCODE = re.compile(r'"runtime.cuTensorMapEncodeTiled", (\w+), "(\w+)", (\d), (\w+)\.data, ([^\n]+)\)')


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel, in registers per thread and bytes."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int                   # static only


def have_compiler() -> bool:
    return shutil.which("nvcc") is not None


@functools.cache
def can_generate() -> bool:
    """Whether TVM can generate CUDA code here (a driver or the CUDA runtime library is there)."""
    try:
        prepare_cuda_compiler()
    except EnvironmentProblem:
        return False
    return True


def lower(funcs: dict[str, Any], arch: str) -> Any:
    """PrimFuncs by name → executable whose functions carry these names."""
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in funcs.items()})
    return compile_module(module, TargetSpec("cuda", arch))


def cuda_source(executable: Any) -> str:
    (module,) = device_modules(executable)
    return module.inspect_source()


def generate_source(funcs: dict[str, Any], arch: str) -> str:
    """The CUDA C++ that TVM generates, without running nvcc on it."""
    original = tvm.get_global_func("tvm_callback_cuda_compile")
    tvm.register_global_func("tvm_callback_cuda_compile", lambda *args: b"not compiled", override=True)
    try:
        return cuda_source(lower(funcs, arch))
    finally:
        tvm.register_global_func("tvm_callback_cuda_compile", original, override=True)


def tensor_maps(func: Any, arguments: dict[str, Any]) -> dict[str, TensorMap]:
    """What the host part of a kernel encodes with cuTensorMapEncodeTiled, by the name of the map, for the emulator: read
    off its script, with `arguments` (NumPy arrays and symbolic sizes) by parameter name."""
    sizes = {name: value for name, value in arguments.items() if isinstance(value, int)}
    found = {}
    for name, dtype, dimensions, buffer, rest in ENCODE.findall(func.script()):
        rank = int(dimensions)
        numbers = [int(number) for number in eval(f"[{rest}]", {"T": SimpleNamespace(int64=int, min=min)}, sizes)]
        dims, numbers = numbers[:rank], numbers[rank:]
        strides, numbers = numbers[:rank - 1], numbers[rank - 1:]
        box, steps, (interleave, swizzle, *_) = numbers[:rank], numbers[rank:2 * rank], numbers[2 * rank:]
        assert steps == [1] * rank and interleave == 0 and max(box) <= 256, "the emulator knows dense boxes only"
        found[name] = TensorMap(arguments[buffer], {"uint32": 4, "uint8": 1}.get(dtype, 2), dims, strides, box, swizzle)
    return found


def resources(source_text: Any, arch: str) -> list[Resources]:
    """Resource use of every kernel of an executable or generated source, from ptxas."""
    text = source_text if isinstance(source_text, str) else cuda_source(source_text)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cu")
        source.write_text(text)
        out = subprocess.run(["nvcc", "-cubin", f"-arch={arch}", "-O3", "--use_fast_math", "-Xptxas",
                              "-v,--register-usage-level=10", "-o",                             # as TVM does
                              os.path.join(folder, "kernel.cubin"), source], capture_output=True, text=True, check=True)
    assert "wgmma" not in out.stderr.split("ptxas info", 1)[-1], out.stderr      # ptxas serialises on misuse
    found = []
    for part in out.stderr.split("Compiling entry function '")[1:]:
        number = {key: int(m[1]) if (m := re.search(pattern, part)) else 0 for key, pattern in (
            ("registers", r"Used (\d+) registers"), ("stack", r"(\d+) bytes stack frame"),
            ("spill_stores", r"(\d+) bytes spill stores"), ("spill_loads", r"(\d+) bytes spill loads"),
            ("shared", r"(\d+) bytes smem"))}
        found.append(Resources(part.split("'")[0], **number))
    return found
