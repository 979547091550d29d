"""Compiles modules for NVIDIA GPUs, also on machines that have none: the driver stub, the mixed TIR pipeline, and the
one call that gets both right. It knows nothing about models, kernels or bundles.

Why a stub: without libcuda.so.1 TVM registers no CUDA module factory, silently keeps CUDA C++ text in the exported
library, and the receiver would have to compile it. A library with the driver's symbols (every one answers "no
device") makes the real factory register, so nvcc or NVRTC runs here and only machine code is exported.
"""

from __future__ import annotations

import atexit
import ctypes
import glob
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from relaxpack.errors import CompileError, EnvironmentProblem, UsageError
from relaxpack.target import TargetSpec

MIXED = "relaxpack_mixed"      # name of our TIR pipeline
_NO_DEVICE = 100               # CUDA_ERROR_NO_DEVICE
_state: dict[str, str] = {}


def prepare_cuda_compiler() -> str:
    """Make `tvm.compile` for CUDA produce machine code in this process; returns "driver" or "stub". Cheap when
    repeated."""
    if "driver" not in _state:
        _state["driver"] = "driver" if _load("libcuda.so.1") else _install_stub()
        _load_tvm_runtime()
        if shutil.which("nvcc"):
            os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")
        else:
            os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvrtc")
            _use_headers_of_wheels()
        _register_mixed_pipeline()
    return _state["driver"]


def compile_module(mod: Any, target: TargetSpec, relax_pipeline: Any = "default") -> Any:
    """`tvm.compile` of an IRModule (Relax and PrimFuncs, s_tir and tirx ones mixed) for a CUDA target. Returns the
    executable; raises CompileError where the result would carry CUDA source instead of machine code."""
    if target.kind != "cuda":
        raise UsageError(f"compile_module is for CUDA targets, got {target.name!r}")
    prepare_cuda_compiler()
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from tvm import relax

    tvm_target = target.to_tvm()
    has_relax = any(isinstance(f, relax.Function) for _, f in mod.functions_items())
    options = {"relax_pipeline": relax_pipeline} if has_relax else {}
    with tvm_target:
        executable = tvm.compile(mod, tvm_target, tir_pipeline=MIXED, **options)
    for module in device_modules(executable):
        if module.kind != "cuda":
            raise CompileError(f"device code for {target.name} came out as {module.kind!r} instead of machine code: "
                               "neither nvcc nor NVRTC was usable")
    return executable


def device_modules(executable: Any) -> list[Any]:
    """The device modules inside an executable, at any depth, host modules left out."""
    root = getattr(executable, "mod", executable)
    found, todo = [], [root]
    while todo:
        module = todo.pop()
        if "cuda" in module.kind:
            found.append(module)
        todo += list(module.imports)
    return found


def check_library(path: str | Path) -> None:
    """Raise CompileError if an exported library carries CUDA source text or no device code at all."""
    data = Path(path).read_bytes()
    if b"__global__" in data:
        raise CompileError(f"{path} carries CUDA source text; it would need a compiler on the target machine")
    if bytes.fromhex("50ed55ba") not in data and data.count(b"\x7fELF") < 2:
        raise CompileError(f"{path} carries no device code")


def resource_usage(path: str | Path) -> dict[str, dict[str, int]]:
    """Kernel name → registers, stack bytes, shared bytes, local bytes (spills) of an exported library, read with
    cuobjdump. Raises EnvironmentProblem where cuobjdump is missing."""
    cuobjdump = require_cuobjdump()
    with tempfile.TemporaryDirectory() as folder:
        fatbin = Path(folder) / "device.fatbin"
        fatbin.write_bytes(_device_image(Path(path).read_bytes()))
        text = subprocess.run([cuobjdump, "-res-usage", str(fatbin)], capture_output=True, text=True, check=True)
    usage: dict[str, dict[str, int]] = {}
    name = ""
    for line in (text.stdout + text.stderr).splitlines():
        if match := re.search(r"Function (\w+):", line):
            name = match[1]
        elif "REG:" in line:
            numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}
            usage[name] = {"registers": numbers["REG"], "stack": numbers["STACK"], "shared": numbers["SHARED"],
                           "local": numbers["LOCAL"]}
    return usage


def find_cuobjdump() -> str | None:
    """Path of cuobjdump: on the PATH, in the toolkit, or in the nvidia-cuda-cuobjdump wheel; None if nowhere."""
    wheels = [path for entry in sys.path for path in glob.glob(os.path.join(entry, "nvidia", "*", "bin"))]
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=":".join(["/usr/local/cuda/bin", *wheels]))


def require_cuobjdump() -> str:
    """Its path. Raises EnvironmentProblem."""
    if (path := find_cuobjdump()) is None:
        raise EnvironmentProblem("cuobjdump was not found: it comes with the CUDA toolkit, or pip install "
                                 "nvidia-cuda-cuobjdump")
    return path


def _device_image(library: bytes) -> bytes:
    """The first fatbin (nvcc) or cubin (NVRTC) inside an exported library."""
    start = library.find(bytes.fromhex("50ed55ba"))
    if start >= 0:                                  # magic u32, version u16, header size u16, payload size u64
        header, payload = struct.unpack_from("<HQ", library, start + 6)
        return library[start:start + header + payload]
    start = library.find(b"\x7fELF", 4)
    if start < 0:
        raise CompileError("the library carries no device code")
    return library[start:]


def _use_headers_of_wheels() -> None:
    """NVRTC needs CUDA's headers; without a toolkit those of the wheels in the `cuda` extra do."""
    if "CUDA_PATH" in os.environ or "CUDA_HOME" in os.environ:
        return
    for entry in sys.path:
        for header in sorted(glob.glob(os.path.join(entry, "nvidia", "*", "include", "cuda_fp16.h"))):
            # TVM looks for libcu++ (cccl) only in a toolkit's targets/<triple>/include.
            toolkit = Path(tempfile.mkdtemp(prefix="relaxpack-cuda-"))
            atexit.register(shutil.rmtree, toolkit, ignore_errors=True)
            (toolkit / "targets" / "x86_64-linux").mkdir(parents=True)
            for place in (toolkit / "include", toolkit / "targets" / "x86_64-linux" / "include"):
                place.symlink_to(Path(header).parent)
            os.environ["CUDA_PATH"] = str(toolkit)
            return
    if not Path("/usr/local/cuda/include/cuda_fp16.h").exists():
        raise EnvironmentProblem("building for CUDA needs nvcc on the PATH, or NVRTC and its headers from wheels: "
                                 "pip install 'relaxpack[cuda]'")


def _point_nvrtc_at_wheels() -> None:
    """Let NVRTC find the CUDA headers of the pip wheels (the `cuda` extra) where no toolkit is installed."""
    if any(name in os.environ for name in ("CUDA_PATH", "CUDA_HOME")) or shutil.which("nvcc"):
        return
    for entry in sys.path:
        for include in sorted(glob.glob(os.path.join(entry, "nvidia", "*", "include"))):
            if os.path.exists(os.path.join(include, "cuda_runtime.h")):
                os.environ["CUDA_PATH"] = str(Path(include).parent)
                extra = os.environ.get("TVM_CUDA_NVRTC_EXTRA_OPTS", "")
                os.environ["TVM_CUDA_NVRTC_EXTRA_OPTS"] = f"{extra} -I{include}/cccl".strip()
                return
    raise EnvironmentProblem("neither nvcc nor the CUDA headers were found: install the CUDA 13 toolkit, or pip install "
                             "'relaxpack[cuda]'")


def _load(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _tvm_folder() -> Path:
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise EnvironmentProblem("apache-tvm is not installed")
    return Path(spec.origin).parent


def _install_stub() -> str:
    """Build and load a libcuda.so.1 whose every symbol answers "no device", then the CUDA runtime library."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise EnvironmentProblem("building for CUDA without a driver needs a C compiler (gcc) on the PATH")
    runtime = (_tvm_folder() / "lib" / "libtvm_runtime_cuda.so").read_bytes()
    symbols = sorted({name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", runtime)})
    folder = Path(tempfile.mkdtemp(prefix="relaxpack-driver-stub-"))
    try:
        source, library = folder / "stub.c", folder / "libcuda.so.1"
        source.write_text("".join(f"int {symbol}(void) {{ return {_NO_DEVICE}; }}\n" for symbol in symbols))
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-Wl,-soname,libcuda.so.1"],
                       check=True, capture_output=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)   # the soname answers later look-ups of libcuda.so.1
    except subprocess.CalledProcessError as error:
        raise EnvironmentProblem(f"the driver stub does not compile: {error.stderr.decode()[:400]}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not any(_load(path) for path in ["libcudart.so.13", *_runtime_candidates()]):
        raise EnvironmentProblem("libcudart.so.13 was not found: install the CUDA 13 toolkit or pip install "
                                 "nvidia-cuda-runtime")
    if "tvm" in sys.modules:  # it looked for the driver when it was imported; look again
        from relaxpack.tvm_setup import load_cuda_library

        load_cuda_library()
    return "stub"


def _load_tvm_runtime() -> None:
    """TVM skips its CUDA runtime library when it is imported before the driver can be found; load it then."""
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    import tvm_ffi

    if tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        tvm_ffi.libinfo.load_lib_ctypes("tvm", "tvm_runtime_cuda", "RTLD_LOCAL",
                                        extra_lib_paths=tvm.libinfo.package_lib_paths())
    if tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        raise EnvironmentProblem("TVM's CUDA runtime library did not register; is the apache-tvm wheel complete?")


def _runtime_candidates() -> list[str]:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    if nvcc := shutil.which("nvcc"):
        homes.append(str(Path(os.path.realpath(nvcc)).parent.parent))
    homes.append("/usr/local/cuda")
    paths = [str(Path(home) / "lib64" / "libcudart.so.13") for home in homes]
    for entry in sys.path:
        paths += sorted(glob.glob(os.path.join(entry, "nvidia", "*", "lib", "libcudart.so.13")))
    return [path for path in paths if os.path.exists(path)]


def _register_mixed_pipeline() -> None:
    """`tvm.compile` runs one TIR pipeline over all PrimFuncs; ours sends s_tir functions (TE, dlight) and tirx
    functions (our kernels) through the pipeline each needs."""
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from tvm.tirx import compilation_pipeline as pipelines

    def mixed() -> tuple[Any, Any, Any]:
        block_pipeline, host, device = pipelines.get_tir_pipeline("s_tir")
        tirx_pipeline, _, _ = pipelines.get_tir_pipeline("tirx")

        @tvm.transform.module_pass(opt_level=0)
        def lower(mod: Any, _context: Any) -> Any:
            blocks: dict[Any, Any] = {}
            plain: dict[Any, Any] = {}
            for name, function in mod.functions_items():
                (blocks if function.attrs.get("s_tir", False) else plain)[name] = function
            result = tvm.IRModule({}, attrs=mod.attrs)
            for functions, pipeline in ((blocks, block_pipeline), (plain, tirx_pipeline)):
                if functions:
                    result.update(pipeline(tvm.IRModule(functions, attrs=mod.attrs)))
            return result

        return lower, host, device      # the s_tir finalizers do all that the tirx ones do

    pipelines.register_tir_pipeline(MIXED, mixed)
