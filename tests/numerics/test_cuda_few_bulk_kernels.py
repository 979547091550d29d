"""gemm_few_bulk (9 to 64 rows) against float64 NumPy on the emulator: small awkward shapes, formats, epilogues, outputs that
start as NaN, inputs that only the kernel before writes."""

from __future__ import annotations

import shutil

import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from benchmarks.gpu.quantised_matmul import scaled_weights
from relaxpack.schedules.kernels.cuda.gemm_few_bulk import gemm_few_bulk
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
                                       "bias": True, "residual": True, "dependent_launch": True, "feeders": 3,
                                       "elect": True}),
    ("q6_k", 64, 720, 5, "bfloat16", {"columns": 8, "warps": 1, "strips": 2, "groups": 1, "feeders": 3, "scaled": True}),
    ("fp8", 72, 448, 3, "bfloat16", {"columns": 8, "warps": 1, "strips": 2, "groups": 2, "feeders": 2}),
    ("q4_0", 80, 576, 11, "bfloat16", {"warps": 2, "strips": 2, "groups": 2, "stages": 3, "elect": True}),
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
