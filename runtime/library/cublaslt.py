"""Matmuls by cuBLASLt, through ctypes on the library of the `nvidia-cublas` wheel, as packed functions that kernels call.

`relaxpack.cublaslt.matmul(x, w, y, t, N, K, dtype, out_dtype[, algorithm])` is y = x wᵀ and
`relaxpack.cublaslt.matmul_add(x, w, residual, y, ...)` adds a residual, for row-major x`[t, K]`, w`[N, K]`, y`[t, N]`,
given by their addresses; x, w and the residual are bfloat16 or float16, y is that or float32, sums are float32.
`algorithm` is a place in the library's own ranking for the shape, 0 the first (and the last one where it has fewer).

Calls launch on the current stream, never wait and take no memory: descriptors and the algorithm of a shape are made at its
first call, which TVM makes before it captures, and the workspace is taken when the functions are registered. So a
captured step holds the kernels of cuBLASLt like any others.

Types and numbers are those of cublasLt.h and cublas_api.h (CUDA 13).
"""

from __future__ import annotations

import ctypes
import glob
import sys
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.errors import EnvironmentProblem

MATMUL, MATMUL_ADD = "relaxpack.cublaslt.matmul", "relaxpack.cublaslt.matmul_add"
LIBRARY, EXTRA = "libcublasLt.so.13", "pip install 'relaxpack[cublas]'"
WORKSPACE_BYTES = 32 << 20                   # what NVIDIA recommends for Hopper
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}            # cudaDataType
_COMPUTE_32F, _OP_T = 68, 1
_DESC_TRANSA = 3                                                 # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE, _MIN_ALIGNMENT = 1, (5, 6, 7, 8)                 # cublasLtMatmulPreferenceAttributes_t; A, B, C, D
_MOST_ALIGNMENT = 256


@dataclass(frozen=True)
class Product:
    """The shape of a call."""

    rows: int
    out_features: int
    in_features: int
    dtype: str
    out_dtype: str
    algorithm: int = 0

    def __str__(self) -> str:
        return (f"a matmul of {self.dtype}[{self.rows}, {self.in_features}] by [{self.out_features}, {self.in_features}] to "
                f"{self.out_dtype}")

    def check(self, residual: bool) -> None:
        """Raises ValueError for what the library is not called for."""
        if self.rows < 0 or self.out_features < 1 or self.in_features < 1 or self.algorithm < 0:
            raise ValueError(f"cublaslt: {self}: sizes must be positive")
        allowed = (self.dtype,) if residual else (self.dtype, "float32")
        if self.dtype not in ("bfloat16", "float16") or self.out_dtype not in allowed:
            raise ValueError(f"cublaslt: {self}{' with a residual' if residual else ''}: expected bfloat16 or float16 to "
                             f"the same{'' if residual else ' or float32'}")


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (("algorithm", _Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
                ("reserved", c_int * 4))


def load_library() -> ctypes.CDLL:
    """libcublasLt of the wheel or the system. Raises EnvironmentProblem where there is none."""
    names = [LIBRARY, *(path for folder in sys.path for path in sorted(glob.glob(f"{folder}/nvidia/*/lib/{LIBRARY}")))]
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cublasLtGetStatusString.restype = ctypes.c_char_p
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtMatrixLayoutCreate.argtypes = (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64)
        library.cublasLtMatmulDescSetAttribute.argtypes = (c_void_p, c_int, c_void_p, c_size_t)
        library.cublasLtMatmulPreferenceSetAttribute.argtypes = (c_void_p, c_int, c_void_p, c_size_t)
        library.cublasLtMatmulAlgoGetHeuristic.argtypes = (*[c_void_p] * 7, c_int, c_void_p, POINTER(c_int))
        library.cublasLtMatmul.argtypes = (*[c_void_p] * 14, c_size_t, c_void_p)
        return library
    raise EnvironmentProblem(f"kernels of this bundle call cuBLASLt, and {LIBRARY} was not found: {EXTRA}")


def version(library: ctypes.CDLL) -> str:
    number = int(library.cublasLtGetVersion())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@dataclass(frozen=True)
class _Plan:
    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]        # w, x, y
    algorithm: _Algorithm
    workspace: int


class CublasLt:
    """A handle with the plans of the shapes it has met. Everything is column-major to cuBLAS, so y is computed as its
    transpose: `[N, t] = w[K, N]ᵀ x[K, t]`."""

    def __init__(self, library: ctypes.CDLL, workspace: int, workspace_bytes: int) -> None:
        """`workspace`: address of device memory."""
        self._library, self._workspace, self._workspace_bytes = library, workspace, workspace_bytes
        self._handle = self._made("cublasLtCreate")
        # By everything that an algorithm is chosen by; alignments are those of w, x, residual and y.
        self._plans: dict[tuple[Product, tuple[int, ...]], _Plan] = {}
        self._one, self._zero = c_float(1), c_float(0)

    def matmul(self, x: int, w: int, residual: int | None, y: int, product: Product, stream: int) -> None:
        """y = x wᵀ (+ residual), launched on the stream. Raises EnvironmentProblem with cuBLAS' own words."""
        product.check(residual is not None)
        if product.rows == 0:
            return
        added = y if residual is None else residual
        alignments = tuple(_alignment(address) for address in (w, x, added, y))
        plan = self._plans.get((product, alignments))
        if plan is None:
            plan = self._plans[product, alignments] = self._plan(product, alignments)
        of_w, of_x, of_y = plan.layouts
        beta = self._zero if residual is None else self._one
        self._check(self._library.cublasLtMatmul(
            self._handle, plan.operation, byref(self._one), w, of_w, x, of_x, byref(beta), added, of_y, y, of_y,
            byref(plan.algorithm), self._workspace, plan.workspace, stream), str(product))

    def _plan(self, key: Product, alignments: tuple[int, ...]) -> _Plan:
        operation = self._made("cublasLtMatmulDescCreate", c_int(_COMPUTE_32F), c_int(_TYPES["float32"]))
        transposed = c_int(_OP_T)
        self._check(self._library.cublasLtMatmulDescSetAttribute(operation, _DESC_TRANSA, byref(transposed),
                                                                 ctypes.sizeof(transposed)), "an operation")
        layouts = (self._layout(key.dtype, key.in_features, key.out_features),
                   self._layout(key.dtype, key.in_features, key.rows),
                   self._layout(key.out_dtype, key.out_features, key.rows))
        preference = self._made("cublasLtMatmulPreferenceCreate")
        limits = {_MAX_WORKSPACE: c_uint64(self._workspace_bytes),
                  **{name: ctypes.c_uint32(value) for name, value in zip(_MIN_ALIGNMENT, alignments, strict=True)}}
        for name, value in limits.items():
            self._check(self._library.cublasLtMatmulPreferenceSetAttribute(preference, name, byref(value),
                                                                           ctypes.sizeof(value)), "a preference")
        found, count = (_Heuristic * (key.algorithm + 1))(), c_int()
        of_w, of_x, of_y = layouts
        code = self._library.cublasLtMatmulAlgoGetHeuristic(self._handle, operation, of_w, of_x, of_y, of_y, preference,
                                                            len(found), byref(found), byref(count))
        self._check(code or (0 if count.value else 15), f"an algorithm for {key}")      # 15: not supported
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        chosen = found[count.value - 1]
        return _Plan(operation, layouts, chosen.algorithm, int(chosen.workspace))

    def _layout(self, dtype: str, rows: int, columns: int) -> c_void_p:
        """Of a matrix whose columns lie one behind the other."""
        return self._made("cublasLtMatrixLayoutCreate", c_int(_TYPES[dtype]), c_uint64(rows), c_uint64(columns),
                          c_int64(rows))

    def _made(self, function: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        self._check(getattr(self._library, function)(byref(made), *arguments), function)
        return made

    def _check(self, code: int, what: str) -> None:
        if code:
            text = self._library.cublasLtGetStatusString(code)
            raise EnvironmentProblem(f"cuBLASLt: {what} failed: {text.decode() if text else f'status {code}'}")


def _alignment(pointer: int) -> int:
    return min(pointer & -pointer or _MOST_ALIGNMENT, _MOST_ALIGNMENT)


def _address(pointer: c_void_p) -> int:
    return pointer.value or 0


_registered: dict[str, Any] = {}    # what keeps the handle and its workspace alive


def register(device: Any) -> int:
    """Make the packed functions known to TVM; once for a process. Bytes of device memory taken."""
    if "handle" not in _registered:
        library = load_library()
        memory = tvm.runtime.empty((WORKSPACE_BYTES,), "uint8", device)
        handle = CublasLt(library, memory.data_ptr(), WORKSPACE_BYTES)
        _registered.update(handle=handle, memory=memory)

        def matmul(x: c_void_p, w: c_void_p, y: c_void_p, *product: Any) -> None:
            handle.matmul(_address(x), _address(w), None, _address(y), Product(*product), tvm_ffi.get_raw_stream(device))

        def matmul_add(x: c_void_p, w: c_void_p, residual: c_void_p, y: c_void_p, *product: Any) -> None:
            handle.matmul(_address(x), _address(w), _address(residual), _address(y), Product(*product),
                          tvm_ffi.get_raw_stream(device))

        tvm.register_global_func(MATMUL, matmul, override=True)
        tvm.register_global_func(MATMUL_ADD, matmul_add, override=True)
    return WORKSPACE_BYTES
