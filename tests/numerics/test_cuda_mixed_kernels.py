"""The wgmma matmul whose quantised weights become 16-bit numbers in registers, against float64 NumPy on the emulator: small
awkward shapes, every format and epilogue, outputs that start as NaN."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from benchmarks.gpu.quantised_matmul import scaled_weights
from relaxpack.schedules.kernels.cuda.gemm_mixed import gemm_mixed
from relaxpack.schedules.kernels.cuda.gemm_rows_bulk import gemm_rows_bulk
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.weight_format import FORMATS, QuantizedTensor
from tests.helpers import matmul_case as case

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")


def weight_of(rng, name: str, n: int, k: int) -> QuantizedTensor:
    fmt = FORMATS[name]
    if not fmt.e4m3:
        return case.random_quantized(rng, name, n, k)
    codes = (rng.integers(0, 127, (n, k)) + 128 * rng.integers(0, 2, (n, k))).astype(np.uint8)      # no NaN
    return QuantizedTensor(fmt, codes, (rng.random((n, fmt.groups(k))) * 0.002 + 0.0001).astype(np.float32))


def late_of(residual, options) -> tuple[str, ...]:
    """What the kernel before writes."""
    return ("x", *(["residual"] if residual is not None else [])) if options.get("dependent_launch") else ()


def run(rng, weight: QuantizedTensor, n, k, t, dtype, options) -> tuple[np.ndarray, tuple]:
    glu = options.get("glu")
    out = n // 2 if glu else n
    x = case.random_array(rng, (t, k), dtype)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    y = case.poisoned((t, out), "float32")
    split, consumers = options.get("split", 1), options.get("consumers", 2)
    blocks = -(-n // (64 * consumers * options.get("strips", 1))) * split * -(-t // options.get("columns", 16))
    case.emulate(gemm_mixed(n, k, weight.format, dtype, "float32", **options), (blocks,), consumers * 128 + 128,
                 machine_code=False, cluster=split, late=late_of(residual, options), x=x, y=y, t=t,
                 **pack(weight_layout(weight.format, n, k, glu is not None), weight),
                 **({} if bias is None else {"bias": bias[row_order(n, glu is not None)]}),
                 **({} if residual is None else {"residual": residual}))
    return y, (x, bias, residual, glu)


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "options"), [
    ("q4_0", 136, 320, 11, "bfloat16", {"columns": 16}),
    ("q4_0", 72, 640, 21, "float16", {"columns": 24, "consumers": 1, "strips": 2, "dependent_launch": True}),
    ("q8_0", 144, 576, 9, "bfloat16",
     {"columns": 8, "split": 2, "glu": "swiglu", "bias": True, "residual": True, "dependent_launch": True}),
    ("q4_1", 80, 320, 5, "float16", {"columns": 8, "consumers": 1, "split": 2}),
    ("q4_k", 200, 448, 34, "bfloat16", {"columns": 32, "consumers": 2, "strips": 2, "blocks_per_sm": 1, "stages": 2}),
    ("q6_k", 64, 448, 5, "bfloat16", {"columns": 8, "consumers": 1}),
    ("q4_128", 144, 456, 11, "bfloat16", {"columns": 16, "split": 2, "glu": "swiglu", "bias": True, "residual": True}),
    ("fp8", 72, 328, 3, "bfloat16", {"columns": 8, "consumers": 1, "split": 3, "stages": 2}),
    ("fp8_block", 80, 456, 3, "float16", {"columns": 8, "consumers": 1, "residual": True, "convert": True}),
])
def test_mixed(rng, name, n, k, t, dtype, options):
    """Against float64 with the weights that the kernel makes of the codes; how far those are from the true ones is measured
    weight by weight below."""
    weight = weight_of(rng, name, n, k)
    y, (x, bias, residual, glu) = run(rng, weight, n, k, t, dtype, options)
    reference = case.reference_linear(x, scaled_weights(weight, dtype), bias, residual, glu)
    assert case.relative_error(y, reference) < case.TOLERANCE["float32"]


@pytest.mark.parametrize(("name", "dtype"), [
    ("q4_0", "bfloat16"), ("q4_1", "bfloat16"), ("q4_1", "float16"), ("q4_k", "float16"), ("q5_1", "bfloat16"),
    ("q6_k", "bfloat16"), ("q4_128", "bfloat16"), ("q4_128", "float16"), ("fp8_block", "bfloat16")])
def test_what_a_weight_becomes(rng, name, dtype):
    """Rows of the unit matrix as x give the multiplied weights themselves: within the stated bound of the true ones."""
    n, k = 64, 128
    weight = weight_of(rng, name, n, k)
    y = case.poisoned((k, n), "float32")
    case.emulate(gemm_mixed(n, k, weight.format, dtype, "float32", columns=k, consumers=1, blocks_per_sm=1), (1,), 256,
                 machine_code=False, x=np.eye(k, dtype=case.NUMPY[dtype]), y=y, t=k,
                 **pack(weight_layout(weight.format, n, k, False), weight))
    fmt, exact = weight.format, weight.dequantize().astype(np.float64)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    bound = unit * np.abs(exact) * (1 + 2.0**-7)
    if fmt.minimum == "stored" and not (dtype == "float16" and fmt.scale_dtype == "float16"):
        left = weight.minimums.astype(np.float64) + (8 if fmt.bits == 4 else 16) * weight.scales.astype(np.float64)
        bound += 2 * unit * np.repeat(np.abs(left), fmt.group_size, axis=1)
    if dtype == "float16":
        bound += 2.0**-25                                               # subnormal results
    assert np.all(np.abs(y.T - exact) <= bound)
    assert np.array_equal(y.T, scaled_weights(weight, dtype))
    if name == "q4_0":
        assert np.array_equal(y.T, exact.astype(np.float32).astype(case.NUMPY[dtype]).astype(np.float32))


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "options"), [
    ("q4_1", 32, 1184, 3, "bfloat16", {"warps": 2, "stages": 3, "bias": True, "residual": True, "dependent_launch": True}),
    ("q8_0", 32, 448, 9, "float16", {"warps": 2, "columns": 16, "glu": "swiglu", "bias": True, "unroll": 2}),
    ("q6_k", 16, 1536, 2, "bfloat16", {"warps": 2, "stages": 2}),
    ("q4_128", 40, 840, 3, "bfloat16", {"warps": 2, "bias": True, "residual": True, "dependent_launch": True}),
    ("q4_128", 32, 704, 9, "float16", {"warps": 2, "columns": 16, "glu": "swiglu", "unroll": 2, "stages": 3}),
    ("fp8", 24, 840, 2, "bfloat16", {"warps": 2}),
    ("fp8_block", 16, 712, 11, "float16", {"warps": 2, "unroll": 4, "convert": True}),
])
def test_bulk_rows(rng, name, n, k, t, dtype, options):
    """Exact codes and float32 scales: the float32 result has float32 accuracy."""
    glu = options.get("glu")
    out = n // 2 if glu else n
    x, weight = case.random_array(rng, (t, k), dtype), weight_of(rng, name, n, k)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    y = case.poisoned((t, out), "float32")
    case.emulate(gemm_rows_bulk(n, k, weight.format, dtype, "float32", **options),
                 (-(-n // 16), -(-t // options.get("columns", 8))), 32 * options["warps"], machine_code=False,
                 late=late_of(residual, options), x=x, y=y, t=t,
                 **pack(weight_layout(weight.format, n, k, glu is not None), weight),
                 **({} if bias is None else {"bias": bias[row_order(n, glu is not None)]}),
                 **({} if residual is None else {"residual": residual}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE["float32"]
