"""RMSNorm inside the CUDA kernels for few rows, on the emulator against float64: what the kernel before the norm writes,
what the one after it makes of that, and both together beside a norm of its own. Outputs start as NaN."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.kernel_spec import NORM_GROUP
from relaxpack.schedules.kernels.cuda.gemm_group_columns import gemm_group_columns
from relaxpack.schedules.kernels.cuda.gemm_rows import gemm_rows
from relaxpack.schedules.kernels.cuda.gemm_rows_bulk import gemm_rows_bulk
from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.weight_format import FORMATS
from tests.helpers import matmul_case as case

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")
EPSILON = 1e-5
BF16 = case.NUMPY["bfloat16"]


def run(name: str, weight: Any, x: np.ndarray, y: np.ndarray, options: dict[str, Any], **buffers: np.ndarray) -> None:
    n, k = weight.shape
    fmt, gated = FORMATS[name], "glu" in options
    packed = pack(weight_layout(fmt, n, k, gated), weight)
    out = "float32" if y.dtype == np.float32 else "bfloat16"
    if fmt.quantized:
        options = dict(options)
        rows = gemm_rows_bulk if options.pop("bulk", False) else gemm_rows_quant
        func = (gemm_group_columns if options.get("columns", 8) < 8 else rows)(n, k, fmt, "bfloat16", out, **options)
    else:
        func, packed = gemm_rows(n, k, "bfloat16", out, **options), {"weight": packed[""]}
    if "bias" in buffers:
        buffers["bias"] = buffers["bias"][row_order(n, gated)]
    grid = (-(-(-(-n // 16)) // options.get("strips", 1)), -(-len(x) // options.get("columns", 8)))
    case.emulate(func, grid, 32 * options.get("warps", 8), machine_code=False, x=x, **packed, y=y, t=len(x), **buffers)


def random_weight(rng: np.random.Generator, name: str, n: int, k: int) -> Any:
    return case.random_array(rng, (n, k), "bfloat16", 0.1) if name == "bf16" else case.random_quantized(rng, name, n, k)


def rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPSILON)


@pytest.mark.parametrize(("name", "n", "k", "t", "options"), [
    ("bf16", 64, 512, 1, {"dependent_launch": True}),
    ("bf16", 80, 584, 3, {"warps": 4, "bias": True, "strips": 2}),
    ("bf16", 32, 128, 11, {"columns": 16, "warps": 2, "unroll": 1}),
    ("q4_0", 64, 512, 8, {"dependent_launch": True, "ahead": True, "warps": 4}),
    ("q4_1", 48, 320, 2, {"warps": 2, "bias": True, "unroll": 1}),
    ("fp8", 64, 512, 1, {"warps": 4}),
    ("q4_1", 48, 512, 3, {"warps": 2, "unroll": 2, "bulk": True, "dependent_launch": True}),
    ("q4_1", 48, 512, 3, {"warps": 2, "columns": 1, "dependent_launch": True}),
    ("q4_0", 48, 576, 5, {"warps": 2, "columns": 4, "ahead": True}),
])
def test_the_matmul_before_a_norm(rng, name, n, k, t, options):
    x = case.random_array(rng, (t, k), "bfloat16")
    weight = random_fp8(rng, n, k) if name == "fp8" else random_weight(rng, name, n, k)
    residual, norm_weight = case.random_array(rng, (t, n), "bfloat16", 3.0), rng.standard_normal(n).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    y, scaled = case.poisoned((t, n), "bfloat16"), case.poisoned((t, n), "bfloat16")
    squares = case.poisoned((t, n // NORM_GROUP), "float32")
    run(name, weight, x, y, {**options, "residual": True, "prepares_norm": True}, residual=residual,
        norm_weight=norm_weight, scaled=scaled, squares=squares, **({} if bias is None else {"bias": bias}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual)) < case.TOLERANCE["bfloat16"]
    assert np.array_equal(scaled, (y.astype(np.float32) * norm_weight).astype(BF16))        # rounded once
    sums = (y.astype(np.float64) ** 2).reshape(t, -1, NORM_GROUP).sum(-1)
    np.testing.assert_allclose(squares, sums, rtol=1e-6)


@pytest.mark.parametrize(("name", "n", "k", "t", "options"), [
    ("bf16", 64, 512, 1, {"dependent_launch": True}),
    ("bf16", 72, 592, 11, {"columns": 16, "warps": 4, "bias": True, "strips": 2}),
    ("bf16", 64, 1088, 5, {"glu": "swiglu", "warps": 2}),
    ("q4_0", 64, 512, 8, {"dependent_launch": True, "ahead": True, "warps": 16}),
    ("q4_1", 64, 576, 3, {"warps": 4, "bias": True, "glu": "swiglu"}),
    ("q6_k", 48, 320, 2, {"warps": 2, "unroll": 1}),
    ("q4_0", 64, 512, 8, {"warps": 4, "unroll": 2, "bulk": True, "dependent_launch": True, "glu": "swiglu"}),
    ("q4_0", 64, 512, 2, {"warps": 2, "columns": 1, "dependent_launch": True, "glu": "swiglu"}),
    ("q4_1", 48, 576, 3, {"warps": 2, "columns": 2, "bias": True}),
])
def test_the_matmul_after_a_norm(rng, name, n, k, t, options):
    scaled, squares = case.random_array(rng, (t, k), "bfloat16", 2.0), rng.random((t, k // NORM_GROUP), np.float32) * 50
    weight = random_weight(rng, name, n, k)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    y = case.poisoned((t, n // 2 if options.get("glu") else n), "float32")
    run(name, weight, scaled, y, {**options, "norm_epsilon": EPSILON}, squares=squares,
        **({} if bias is None else {"bias": bias}))
    normed = scaled.astype(np.float64) / np.sqrt(squares.astype(np.float64).sum(-1, keepdims=True) / k + EPSILON)
    reference = case.reference_linear(normed, weight, bias, None, options.get("glu"))
    assert case.relative_error(y, reference) < case.TOLERANCE["float32"]


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4, 1e15])
def test_a_norm_between_two_matmuls_is_as_accurate_as_a_kernel_of_its_own(rng, size):
    """Rows of very different size, one feature far above the others in half of them (as residual streams have it), norm
    weights that bfloat16 cannot hold. Beside it the norm in float64, rounded to bfloat16: as many roundings, of others."""
    n, k, t = 64, 256, 16
    residual = (rng.standard_normal((t, k)) * size * 10.0 ** rng.integers(-2, 2, (t, 1))).astype(BF16)
    residual[::2, 17] = size * rng.integers(500, 1000, t // 2)
    before, after = case.random_array(rng, (k, 64), "bfloat16", 0.1), case.random_array(rng, (n, k), "bfloat16", 0.1)
    x, norm_weight = case.random_array(rng, (t, 64), "bfloat16"), rng.standard_normal(k).astype(np.float32)
    total, scaled = case.poisoned((t, k), "bfloat16"), case.poisoned((t, k), "bfloat16")
    squares, y = case.poisoned((t, k // NORM_GROUP), "float32"), case.poisoned((t, n), "float32")
    run("bf16", before, x, total, {"columns": 16, "warps": 2, "residual": True, "prepares_norm": True}, residual=residual,
        norm_weight=norm_weight, scaled=scaled, squares=squares)
    run("bf16", after, scaled, y, {"columns": 16, "warps": 2, "norm_epsilon": EPSILON}, squares=squares)
    normed = total.astype(np.float64) / rms(total) * norm_weight
    reference = case.reference_linear(normed, after)
    separate = case.reference_linear(normed.astype(BF16), after)
    errors, today = ([case.relative_error(a[row], reference[row]) for row in range(t)] for a in (y, separate))
    assert max(errors) < 2.0**-8 and np.mean(errors) < 1.25 * np.mean(today)


def test_a_row_of_zeros_stays_finite(rng):
    """epsilon keeps 1 / rms finite; an unused row of a bucket is one."""
    weight, y = case.random_array(rng, (32, 128), "bfloat16"), case.poisoned((2, 32), "bfloat16")
    run("bf16", weight, np.zeros((2, 128), BF16), y, {"warps": 2, "norm_epsilon": EPSILON},
        squares=np.zeros((2, 8), np.float32))
    assert not y.astype(np.float32).any()


def random_fp8(rng: np.random.Generator, n: int, k: int) -> Any:
    from relaxpack.weight_format import QuantizedTensor

    codes = (rng.integers(0, 127, (n, k)) + rng.integers(0, 2, (n, k)) * 128).astype(np.uint8)
    return QuantizedTensor(FORMATS["fp8"], codes, (rng.random((n, 1)) * 0.002 + 1e-4).astype(np.float32))
