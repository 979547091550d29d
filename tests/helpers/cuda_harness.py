"""Compiles single PrimFuncs of the CUDA kernels for a named architecture on a machine without a GPU, and reads what
the compiler says about them (generated source, registers, spills, shared memory).

It is for kernel tests and benchmarks only; bundles are built by `relaxpack build`.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relaxpack.tvm_setup  # noqa: F401

DRIVER_SYMBOL = re.compile(r"\bcu[A-Z]\w+")


def _cudart() -> Path | None:
    roots = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    found = [Path(r, "lib64", "libcudart.so.13") for r in roots if r]
    for entry in sys.path:
        found += [Path(p) for p in glob.glob(os.path.join(entry, "nvidia", "*", "lib", "libcudart.so.13"))]
    return next((p for p in found if p.exists()), None)


def have_compiler() -> bool:
    return shutil.which("nvcc") is not None and _cudart() is not None


def ensure_driver() -> None:
    """Without libcuda.so.1 TVM embeds source text instead of machine code; a stub library that answers "no device"
    lets its CUDA code generator register. Call before the first `import tvm`."""
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")
    try:
        ctypes.CDLL("libcuda.so.1")
        return
    except OSError:
        pass
    if "tvm" in sys.modules:
        return                                      # too late; relaxpack's own preparation may have run
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    library = Path(spec.origin).parent / "lib" / "libtvm_runtime_cuda.so"
    text = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    symbols = sorted({m.group() for m in DRIVER_SYMBOL.finditer(text.stdout)})
    folder = Path(tempfile.mkdtemp(prefix="cuda_stub"))
    source = "".join(f"int {s}() {{ return 100; }}\n" for s in symbols)   # CUDA_ERROR_NO_DEVICE
    (folder / "stub.c").write_text(source)
    subprocess.check_call(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "stub.c",
                           "-Wl,-soname,libcuda.so.1"])
    ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    if (cudart := _cudart()) is not None:           # else only source can be generated
        ctypes.CDLL(str(cudart), mode=ctypes.RTLD_GLOBAL)


ensure_driver()

import tvm  # noqa: E402


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel, in registers per thread and bytes."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int                   # static only


def target(arch: str) -> Any:
    return tvm.target.Target({"kind": "cuda", "arch": arch, "host": {"kind": "llvm"}})


def lower(funcs: dict[str, Any], arch: str) -> Any:
    """PrimFuncs by name → executable whose functions carry these names."""
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in funcs.items()})
    with target(arch):
        return tvm.compile(module, target(arch), tir_pipeline="tirx")


@functools.lru_cache(maxsize=None)
def _original_compiler() -> Any:
    return tvm.get_global_func("tvm_callback_cuda_compile")


def generate_source(funcs: dict[str, Any], arch: str) -> str:
    """The CUDA C++ that TVM generates, without running nvcc on it."""
    original = _original_compiler()
    tvm.register_global_func("tvm_callback_cuda_compile", lambda *args: b"not compiled", override=True)
    try:
        return cuda_source(lower(funcs, arch))
    finally:
        tvm.register_global_func("tvm_callback_cuda_compile", original, override=True)


def cuda_source(executable: Any) -> str:
    return executable.mod.imports[0].inspect_source()


def resources(source_text: Any, arch: str) -> list[Resources]:
    """Resource use of every kernel of an executable or generated source, from ptxas."""
    text = source_text if isinstance(source_text, str) else cuda_source(source_text)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cu")
        source.write_text(text)
        out = subprocess.run(["nvcc", "-cubin", f"-arch={arch}", "-O3", "--use_fast_math", "-Xptxas",
                              "-v,--register-usage-level=10", "-o",
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
