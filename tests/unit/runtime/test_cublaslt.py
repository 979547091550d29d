"""cuBLASLt without a GPU: a stand-in of the library that knows column-major matrices and nothing of ours, argument checks,
what is said where the library is missing, and the real library where its wheel is installed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxpack.dist.manifest import TargetEntry
from relaxpack.errors import BundleError, EnvironmentProblem
from relaxpack.runtime.library import cublaslt
from relaxpack.runtime.library.cublaslt import CublasLt, Product
from relaxpack.runtime.library.provide import provide
from relaxpack.target import TargetSpec
from tests.helpers.bundles import make_manifest

_DTYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}


class StandIn:
    """The functions of libcublasLt, computed by NumPy as cublasLt.h describes them: everything column-major."""

    def __init__(self, algorithms: int = 1) -> None:
        self.algorithms, self.made, self.asked, self.calls = algorithms, {}, [], []  # type: ignore[var-annotated]

    def _make(self, pointer: Any, value: Any) -> int:
        pointer._obj.value = len(self.made) + 1
        self.made[pointer._obj.value] = value
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        return self._make(handle, "handle")

    def cublasLtMatmulDescCreate(self, pointer: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0)      # float32 sums and factors
        return self._make(pointer, {})

    def cublasLtMatmulDescSetAttribute(self, operation: Any, name: int, value: Any, size: int) -> int:
        assert size == 4
        self.made[operation.value][name] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, pointer: Any, dtype: Any, rows: Any, columns: Any, leading: Any) -> int:
        return self._make(pointer, (dtype.value, rows.value, columns.value, leading.value))

    def cublasLtMatmulPreferenceCreate(self, pointer: Any) -> int:
        return self._make(pointer, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference: Any, name: int, value: Any, size: int) -> int:
        assert size == ctypes.sizeof(value._obj)
        self.made[preference.value][name] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference: Any) -> int:
        self.asked.append(self.made.pop(preference.value))
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, operation: Any, a: Any, b: Any, c: Any, d: Any, preference: Any,
                                       wanted: int, found: Any, count: Any) -> int:
        count._obj.value = min(self.algorithms, wanted)
        for place in range(count._obj.value):
            found._obj[place].algorithm.data[0], found._obj[place].workspace = 42 + place, 1 << 10
        return 0

    def cublasLtMatmul(self, handle: Any, operation: Any, alpha: Any, a: int, a_layout: Any, b: int, b_layout: Any,
                       beta: Any, c: int, c_layout: Any, d: int, d_layout: Any, algorithm: Any, workspace: int, size: int,
                       stream: int) -> int:
        self.algorithm = algorithm._obj.data[0]
        assert alpha._obj.value == 1 and size == 1 << 10
        self.calls.append((workspace, stream))
        first = self._read(a, a_layout)
        assert self.made[operation.value] == {3: 1}             # A is transposed
        product = first.T @ self._read(b, b_layout)
        if beta._obj.value:
            product = product + beta._obj.value * self._read(c, c_layout)
        target = self._view(d, d_layout)
        target[:] = product.astype(target.dtype)
        return 0

    def _view(self, address: int, layout: Any) -> np.ndarray:
        code, rows, columns, leading = self.made[layout.value]
        raw = (ctypes.c_uint8 * (leading * columns * _DTYPES[code].itemsize)).from_address(address)
        return np.frombuffer(raw, _DTYPES[code]).reshape(columns, leading).T[:rows]

    def _read(self, address: int, layout: Any) -> np.ndarray:
        return self._view(address, layout).astype(np.float64)

    def cublasLtGetStatusString(self, code: int) -> bytes:
        return {15: b"the requested functionality is not supported"}.get(code, b"")


@pytest.mark.parametrize("dtype, out", [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_product_is_the_row_major_one(dtype: str, out: str, rows: int, rng: np.random.Generator) -> None:
    number = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    x, w = (rng.standard_normal(shape).astype(number[dtype]) for shape in ((rows, 24), (10, 24)))
    library = StandIn()
    handle = CublasLt(library, 4096, 1 << 20)  # type: ignore[arg-type]
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    product = Product(rows, 10, 24, dtype, out)
    y = np.full((rows, 10), np.nan, number[out])
    handle.matmul(x.ctypes.data, w.ctypes.data, None, y.ctypes.data, product, 77)
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=2e-2 if out == "bfloat16" else 2e-3, atol=1e-2)
    assert library.calls == [(4096, 77)]            # the workspace it was given, the stream of the caller
    if out != "float32":
        residual = rng.standard_normal((rows, 10)).astype(number[dtype])
        y[:] = np.nan
        handle.matmul(x.ctypes.data, w.ctypes.data, residual.ctypes.data, y.ctypes.data, product, 77)
        np.testing.assert_allclose(y.astype(np.float64), exact + residual.astype(np.float64), rtol=2e-2, atol=2e-2)


def test_an_algorithm_is_chosen_once_for_a_shape_and_its_alignment() -> None:
    """So a captured call asks nothing: TVM runs a step once before it captures it."""
    library = StandIn()
    handle = CublasLt(library, 4096, 1 << 20)  # type: ignore[arg-type]
    memory = np.zeros(1 << 14, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 1024
    w, y = start + 4096, start + 8192
    for _ in range(3):
        handle.matmul(start, w, None, y, Product(2, 8, 16, "float16", "float16"), 0)
    assert len(library.asked) == 1 and len(library.calls) == 3
    assert library.asked[0] == {1: 1 << 20, 5: 256, 6: 256, 7: 256, 8: 256}
    handle.matmul(start + 64, w, None, y, Product(2, 8, 16, "float16", "float16"), 0)
    assert library.asked[1][6] == 64
    handle.matmul(start, w, None, y, Product(3, 8, 16, "float16", "float16"), 0)
    assert len(library.asked) == 3


@pytest.mark.parametrize("place, algorithm", [(0, 42), (2, 44), (7, 44)])
def test_a_place_in_the_librarys_ranking(place: int, algorithm: int) -> None:
    library = StandIn(algorithms=3)
    handle = CublasLt(library, 4096, 1 << 20)  # type: ignore[arg-type]
    memory = np.zeros(1 << 12, np.uint8)
    start = memory.ctypes.data
    handle.matmul(start, start + 512, None, start + 1024, Product(2, 8, 16, "float16", "float16", place), 0)
    assert library.algorithm == algorithm


def test_no_rows_are_no_call() -> None:
    library = StandIn()
    CublasLt(library, 0, 0).matmul(0, 0, None, 0, Product(0, 8, 16, "float16", "float16"), 0)  # type: ignore[arg-type]
    assert library.calls == []


def test_a_shape_without_an_algorithm_is_named() -> None:
    handle = CublasLt(StandIn(algorithms=0), 0, 0)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentProblem, match=r"an algorithm for a matmul of float16\[2, 16\] by \[8, 16\] to float16 "
                                                 "failed: the requested functionality is not supported"):
        handle.matmul(0, 0, None, 0, Product(2, 8, 16, "float16", "float16"), 0)


@pytest.mark.parametrize("product, residual, words", [
    (Product(2, 8, 16, "float32", "float32"), False, "expected bfloat16 or float16 to the same or float32"),
    (Product(2, 8, 16, "float16", "bfloat16"), False, r"float16\[2, 16\] by \[8, 16\] to bfloat16: expected"),
    (Product(2, 8, 16, "float16", "float32"), True, "to float32 with a residual: expected bfloat16 or float16 to the same$"),
    (Product(2, 0, 16, "float16", "float16"), False, "sizes must be positive"),
    (Product(-1, 8, 16, "float16", "float16"), False, "sizes must be positive"),
    (Product(2, 8, 16, "float16", "float16", -1), False, "sizes must be positive")])
def test_what_the_library_is_not_called_for(product: Product, residual: bool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        product.check(residual)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "LIBRARY", "libcublasLt.so.999")
    with pytest.raises(EnvironmentProblem, match=r"libcublasLt.so.999 was not found: pip install 'relaxpack\[cublas\]'"):
        cublaslt.load_library()


def test_a_library_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(BundleError, match="the library 'later', which this relaxpack does not know"):
        provide({"later": {"kernels": 1}}, None)
    assert provide({}, None) == 0


def test_a_bundle_that_needs_a_library_is_not_for_readers_of_format_1() -> None:
    entry = TargetEntry(TargetSpec("cpu", "x86-64-v3"), "lib/x.so", "x", (), ("decode",), {})
    assert make_manifest(entry).oldest_format() == 1
    named = TargetEntry(TargetSpec("cpu", "x86-64-v3"), "lib/x.so", "x", (), ("decode",), {}, libraries={"cublaslt": {}})
    assert make_manifest(named).oldest_format() == 2


def test_the_real_library_where_it_is_installed() -> None:
    try:
        library = cublaslt.load_library()
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    assert cublaslt.version(library).startswith("13.")
    for name in ("cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulPreferenceDestroy"):
        assert getattr(library, name)
