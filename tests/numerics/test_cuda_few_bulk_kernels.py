"""gemm_few_bulk (9 to 64 rows) against float64 NumPy on the emulator: small awkward shapes, formats, epilogues, outputs that
start as NaN, inputs that only the kernel before writes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from benchmarks.gpu.quantised_matmul import scaled_weights
from relaxpack.schedules.kernels.cuda.gemm_few_bulk import gemm_few_bulk
from relaxpack.schedules.kernels.cuda.quantized_tilings import quantized_few_tiling
from relaxpack.weight_format import FORMATS
from tests.helpers import matmul_case as case

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "options"), [
    ("q4_0", 80, 576, 11, "bfloat16", {"warps": 2, "strips": 2, "groups": 2, "stages": 3}),
    ("q4_1", 144, 640, 19, "float16", {"columns": 24, "warps": 3, "strips": 1, "groups": 2, "split": 2, "glu": "swiglu",
                                       "bias": True, "residual": True, "dependent_launch": True}),
    ("q4_k", 80, 448, 3, "float16", {"columns": 8, "warps": 1, "strips": 2, "groups": 2}),
    ("q6_k", 64, 448, 5, "bfloat16", {"columns": 8, "warps": 1, "strips": 2, "groups": 1}),
    ("q8_0", 64, 448, 9, "bfloat16", {"columns": 8, "warps": 2, "strips": 1, "groups": 2}),
    ("fp8", 72, 328, 3, "bfloat16", {"columns": 8, "warps": 1, "strips": 2, "groups": 2}),
    ("fp8_block", 80, 456, 3, "float16", {"columns": 8, "warps": 1, "strips": 2, "groups": 2, "residual": True,
                                          "convert": True}),
    ("q4_128", 80, 576, 5, "bfloat16", {"columns": 8, "warps": 3, "strips": 1, "groups": 2}),
    ("q4_0", 80, 576, 11, "bfloat16", {"warps": 2, "strips": 2, "groups": 2, "stages": 3, "scaled": True}),
    ("q4_1", 80, 448, 3, "bfloat16", {"columns": 8, "warps": 2, "strips": 1, "groups": 1, "split": 2, "scaled": True}),
    ("fp8", 72, 328, 3, "bfloat16", {"columns": 8, "warps": 1, "strips": 2, "groups": 2, "scaled": True}),
    ("q4_0", 80, 576, 11, "bfloat16", {"warps": 2, "strips": 2, "groups": 2, "stages": 3, "feeders": 2,
                                       "dependent_launch": True}),
    ("q4_1", 144, 640, 19, "float16", {"columns": 24, "warps": 3, "strips": 1, "groups": 2, "split": 2, "glu": "swiglu",
                                       "bias": True, "residual": True, "dependent_launch": True, "feeders": 3}),
    ("q4_0", 80, 576, 21, "bfloat16", {"warps": 2, "strips": 1, "groups": 2, "columns": 8, "dependent_launch": True}),
    ("q5_k", 80, 320, 9, "float16", {"warps": 1, "strips": 2, "groups": 2, "feeders": 2}),
    ("q6_k", 64, 720, 5, "bfloat16", {"columns": 8, "warps": 1, "strips": 2, "groups": 1, "feeders": 3, "scaled": True}),
    ("fp8", 72, 448, 3, "bfloat16", {"columns": 8, "warps": 1, "strips": 2, "groups": 2, "feeders": 2}),
])
def test_few_bulk(rng, name, n, k, t, dtype, options):
    """Exact codes and float32 scales: float32 accuracy. `scaled` multiplies what codes_scaled.py makes of the weights."""
    weight, x = case.random_weight(rng, name, n, k), case.random_array(rng, (t, k), dtype)
    tiles = -(-n // (16 * options["warps"] * options["strips"])) * -(-t // options.get("columns", 16))
    y, reference = case.quantized_product(
        rng, gemm_few_bulk, weight, x, options, (tiles * options.get("split", 1),),
        32 * (options["warps"] * options["groups"] + options.get("feeders", 1)),
        scaled_weights(weight, dtype) if options.get("scaled") else None)
    assert case.relative_error(y, reference) < case.TOLERANCE["float32"]


@pytest.mark.parametrize(("name", "rows", "shape"), [
    ("q4_0", 9, "o"), ("q4_0", 27, "down"), ("q4_0", 57, "o"), ("q4_0", 24, "qkv"), ("q4_1", 13, "qkv"), ("q4_1", 31, "o"),
    ("q4_1", 16, "o"), ("q4_1", 9, "gate_up"), ("q4_k", 14, "down"), ("q5_k", 16, "gate_up"), ("q4_1", 24, "gate_up"),
    ("q4_0", 80, "o"), ("q4_1", 130, "down"), ("fp8", 96, "qkv"),
    ("q4_1", 40, "down"), ("q5_1", 12, "o"), ("fp8", 17, "qkv"), ("fp8_block", 32, "o"),
    ("q6_k", 16, "down"), ("q6_k", 64, "o"), ("q8_0", 16, "gate_up"), ("q8_0", 23, "o"), ("fp8", 16, "o"),
    ("fp8", 32, "down"), ("fp8", 50, "qkv"), ("fp8", 11, "gate_up"),
    ("fp8_block", 15, "qkv"), ("fp8_block", 31, "gate_up"), ("fp8_block", 64, "down"), ("q4_128", 10, "o"),
    ("q4_128", 33, "qkv")])
def test_tilings_of_the_rule(rng, name, rows, shape):
    """As the rule has them for matrices of 8B, on small ones that fill neither the last strips nor the last stage of K."""
    n, k = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}[shape]
    family, tiling = quantized_few_tiling(n, k, rows, FORMATS[name])
    assert family == "gemm_few_bulk"
    k = 832 if FORMATS[name].group_size in (16, 32) else 840
    weight, x = case.random_weight(rng, name, 72, k), case.random_array(rng, (rows, k), "bfloat16")
    options = {**tiling, "dependent_launch": True}
    tiles = -(-72 // (16 * tiling["warps"] * tiling["strips"])) * -(-rows // tiling["columns"])
    y, reference = case.quantized_product(
        rng, gemm_few_bulk, weight, x, options, (tiles * tiling["split"],),
        32 * (tiling["warps"] * tiling["groups"] + tiling["feeders"]),
        scaled_weights(weight, "bfloat16") if tiling["scaled"] else None)
    assert case.relative_error(y, reference) < case.TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["q4_1", "q4_k", "q5_1"])
@pytest.mark.parametrize("inputs", ["mean", "mixed", "tiny"])
def test_minimums_are_added_in_float32(rng, name, dtype, inputs):
    """tf32 alone would be off by 5e-4. Sums of x that are large against their terms, and groups of very different sizes."""
    weight, x = case.random_weight(rng, name, 64, 576), case.random_array(rng, (11, 576), dtype)
    if inputs == "mean":
        x = (x.astype("float32") + 3).astype(x.dtype)
    elif inputs == "mixed":
        x = (x.astype("float32") * np.repeat(10.0 ** rng.uniform(-3, 2, 18), 32)).astype(x.dtype)
    else:
        x = (x.astype("float32") * (1e-30 if dtype == "bfloat16" else 1e-4)).astype(x.dtype)
    y, reference = case.quantized_product(rng, gemm_few_bulk, weight, x, {"warps": 2, "strips": 1, "groups": 2}, (2,), 160)
    assert case.relative_error(y, reference) < case.TOLERANCE["float32"]
