"""The one door to TVM: `import relaxpack.tvm_setup` stands before every `import tvm` in this project.

It (1) checks the pins, because a wrong apache-tvm-ffi crashes the interpreter instead of raising; (2) makes
TVMScript fast: TVM's parser calls `inspect.stack()` at every decorator and `inspect.getouterframes()` at every macro,
which look up the source module of every frame (`import tvm.s_tir.tensor_intrin`: 62 s, with the light frames below
6.6 s; the kernels of a GPU build take half the time); (3) sets the thread count of
TVM's pool before it starts; (4) keeps numpy's OpenBLAS workers from spinning, which halves TVM's speed; (5) keeps
TVM from importing PyTorch where it happens to be installed, which takes longer than all of TVM.

A runtime-only TVM (no libtvm_compiler.so) works through the same door; see `runtime_only()`.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import linecache
import os
import sys
from pathlib import Path
from types import FrameType

from relaxpack.env import num_threads
from relaxpack.errors import EnvironmentProblem

TVM_VERSION = "0.27.0.post1"
FFI_VERSIONS = ("0.1.14.post0", "0.1.14.post1")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_pins() -> None:
    """Raise `EnvironmentProblem` unless the TVM wheels are the pinned ones. A TVM unpacked without metadata (a
    deployed runtime) is taken on trust."""
    tvm, ffi = _installed("apache-tvm"), _installed("apache-tvm-ffi")
    if importlib.util.find_spec("tvm") is None:
        raise EnvironmentProblem(f"apache-tvm is not installed: pip install apache-tvm=={TVM_VERSION} "
                                 f"apache-tvm-ffi=={FFI_VERSIONS[-1]}")
    if tvm not in (None, TVM_VERSION):
        raise EnvironmentProblem(f"apache-tvm {tvm} is installed, relaxpack needs {TVM_VERSION}: "
                                 f"pip install apache-tvm=={TVM_VERSION}")
    if ffi not in (None, *FFI_VERSIONS):
        raise EnvironmentProblem(f"apache-tvm-ffi {ffi} is installed and crashes with apache-tvm {TVM_VERSION}: "
                                 f"pip install apache-tvm-ffi=={FFI_VERSIONS[-1]}")


def _light_frames(frame: FrameType | None, context: int = 1) -> list[inspect.FrameInfo]:
    """`inspect.getouterframes` without the look-up of modules."""
    frames = []
    while frame is not None:
        code = frame.f_code
        line = linecache.getline(code.co_filename, frame.f_lineno)
        frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name,
                                        [line] if line else None, 0))
        frame = frame.f_back
    return frames


def _light_stack(context: int = 1) -> list[inspect.FrameInfo]:
    return _light_frames(sys._getframe(1), context)


class _NoTorchForTvm(importlib.abc.MetaPathFinder):
    """For modules of TVM, PyTorch is not installed; they all do without it. Everyone else may import it."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name != "torch":
            return
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError("TVM works without PyTorch here", name=name)


def runtime_only() -> bool:
    """True where TVM has no compiler library (a deployed machine)."""
    import tvm

    return bool(tvm.base._RUNTIME_ONLY)


def _setup() -> None:
    check_pins()
    os.environ.setdefault("TVM_NUM_THREADS", str(num_threads()))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    lib = Path(spec.origin).parent / "lib"
    if not (lib / "libtvm_compiler.so").exists():
        os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    inspect.stack = _light_stack  # type: ignore[assignment]
    inspect.getouterframes = _light_frames  # type: ignore[assignment]
    sys.meta_path.insert(0, _NoTorchForTvm())


_setup()


def load_cuda_runtime() -> bool:
    """Load TVM's CUDA runtime library where TVM does not do it by itself (runtime-only mode). True if present."""
    import tvm

    if not tvm.base._RUNTIME_ONLY:
        return tvm.get_global_func("device_api.cuda", allow_missing=True) is not None
    try:
        load_cuda_library()
    except (OSError, RuntimeError):
        return False
    return True


def load_cuda_library() -> None:
    """Load TVM's CUDA runtime library now; OSError or RuntimeError where the driver or libcudart is missing."""
    import tvm
    import tvm_ffi

    tvm_ffi.libinfo.load_lib_ctypes("tvm", "tvm_runtime_cuda", "RTLD_LOCAL",
                                    extra_lib_paths=tvm.libinfo.package_lib_paths())
