"""cuBLASLt through our binding on the GPU: every dtype against float64 with poisoned outputs, and the same bits from a
captured graph, in which nothing of the binding runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxpack.errors import EnvironmentProblem
from relaxpack.runtime import cuda_memory
from relaxpack.runtime.library import cublaslt
from relaxpack.runtime.library.cublaslt import CublasLt, Product

pytestmark = pytest.mark.gpu
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


@pytest.fixture(scope="module")
def handle() -> Iterator[CublasLt]:
    import relaxpack.tvm_setup as setup

    assert setup.load_cuda_runtime()
    import tvm

    try:
        library = cublaslt.load_library()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    memory = tvm.runtime.empty((cublaslt.WORKSPACE_BYTES,), "uint8", tvm.cuda(0))
    yield CublasLt(library, memory.data_ptr(), cublaslt.WORKSPACE_BYTES)


class OnDevice:
    """An array on the GPU."""

    def __init__(self, array: np.ndarray) -> None:
        import tvm

        self.shape, self.dtype = array.shape, array.dtype
        self._pinned = cuda_memory.PinnedArray(array.shape, array.dtype)
        self._pinned.array[:] = array
        self._tensor = tvm.runtime.empty((array.nbytes,), "uint8", tvm.cuda(0))
        cuda_memory.upload(self._tensor, self._pinned, array.nbytes)
        cuda_memory.synchronize()
        self.address = self._tensor.data_ptr()

    def read(self) -> np.ndarray:
        cuda_memory.download(self._pinned, self._tensor, self._pinned.bytes)
        cuda_memory.synchronize()
        return self._pinned.array.copy()


@pytest.mark.parametrize("dtype, out, residual", [
    ("bfloat16", "bfloat16", False), ("float16", "float16", False), ("bfloat16", "float32", False),
    ("bfloat16", "bfloat16", True), ("float16", "float16", True)])
@pytest.mark.parametrize("rows, out_features, in_features", [(1, 2048, 2048), (7, 1000, 512), (128, 4096, 1024)])
def test_against_float64(handle: CublasLt, rng: np.random.Generator, dtype: str, out: str, residual: bool, rows: int,
                         out_features: int, in_features: int) -> None:
    x, w, r = (rng.standard_normal(shape).astype(_DTYPES[dtype]) for shape in (
        (rows, in_features), (out_features, in_features), (rows, out_features)))
    expected = x.astype(np.float64) @ w.astype(np.float64).T + (r.astype(np.float64) if residual else 0)
    on_x, on_w, on_r, on_y = map(OnDevice, (x, w, r, np.full((rows, out_features), np.nan, _DTYPES[out])))
    product = Product(rows, out_features, in_features, dtype, out)
    handle.matmul(on_x.address, on_w.address, on_r.address if residual else None, on_y.address, product, 0)
    error = np.abs(on_y.read().astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error < {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-4}[out]


def test_a_captured_call_gives_the_same_bits(handle: CublasLt, rng: np.random.Generator) -> None:
    cudart = cuda_memory.cudart()
    x, w = (rng.standard_normal(shape).astype(_DTYPES["bfloat16"]) for shape in ((4, 2048), (4096, 2048)))
    on_x, on_w, eager, captured = map(OnDevice, (x, w, *[np.full((4, 4096), np.nan, _DTYPES["bfloat16"])] * 2))
    product = Product(4, 4096, 2048, "bfloat16", "bfloat16")
    handle.matmul(on_x.address, on_w.address, None, eager.address, product, 0)      # chooses the algorithm
    handle.matmul(on_x.address, on_w.address, None, captured.address, product, 0)
    poisoned = OnDevice(np.full((4, 4096), np.nan, _DTYPES["bfloat16"]))
    stream, graph, launch = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    check: Any = cuda_memory.check
    check(cudart.cudaStreamCreate(ctypes.byref(stream)), "a stream")
    check(cudart.cudaStreamBeginCapture(stream, 0), "capturing")        # global: any forbidden call ends it
    handle.matmul(on_x.address, on_w.address, None, poisoned.address, product, stream.value or 0)
    check(cudart.cudaStreamEndCapture(stream, ctypes.byref(graph)), "the end of capturing")
    check(cudart.cudaGraphInstantiate(ctypes.byref(launch), graph, ctypes.c_ulonglong(0)), "a graph")
    assert np.isnan(poisoned.read().astype(np.float32)).all(), "capturing runs nothing"
    check(cudart.cudaGraphLaunch(launch, stream), "a launch")
    assert (poisoned.read().view(np.uint16) == eager.read().view(np.uint16)).all()
