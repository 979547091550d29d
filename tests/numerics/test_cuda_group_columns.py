"""gemm_group_columns (1, 2 or 4 rows, groups of K as columns) against float64 NumPy on the emulator: small awkward shapes,
formats, epilogues, outputs that start as NaN, inputs that only the kernel before writes. Norms: test_cuda_norm_fusion.py."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.schedules.kernels.cuda.gemm_group_columns import gemm_group_columns
from tests.helpers import matmul_case as case

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "mean", "options"), [
    ("q4_0", 48, 1024, 1, "bfloat16", 0, {"warps": 2}),
    ("q4_0", 40, 1088, 3, "bfloat16", 0, {"warps": 2, "unroll": 2, "residual": True, "dependent_launch": True}),
    ("q4_1", 48, 1120, 3, "bfloat16", 0, {"warps": 2, "columns": 2, "ahead": True, "glu": "swiglu", "bias": True}),
    ("q4_k", 32, 1056, 6, "float16", 0, {"warps": 3, "columns": 4, "residual": True, "dependent_launch": True}),
    ("q4_1", 32, 1024, 1, "float16", 0, {"warps": 2, "unroll": 2}),
    ("q4_1", 40, 1824, 1, "bfloat16", 0, {"warps": 2, "ahead": 2, "dependent_launch": True}),    # four rounds, three sets
    ("q4_0", 32, 1056, 1, "bfloat16", 0, {"warps": 3, "ahead": 3, "residual": True}),            # two rounds, both asked for
    ("q4_128", 40, 1096, 1, "bfloat16", 8, {"warps": 2, "bias": True, "residual": True, "dependent_launch": True}),
    ("q4_128", 32, 1024, 3, "float16", 0, {"warps": 2, "columns": 2, "ahead": True, "glu": "swiglu"}),
    ("q4_128", 32, 584, 5, "bfloat16", -8, {"warps": 2, "columns": 4, "unroll": 2}),
    ("q4_0", 32, 1024, 1, "bfloat16", 8, {"warps": 2}),
    ("q4_1", 32, 1024, 1, "bfloat16", -8, {"warps": 2}),
])
def test_row(rng, name, n, k, t, dtype, mean, options):
    """Also where sums of x are large: what is taken away of the products of 16 + c must not cost accuracy."""
    weight = case.random_weight(rng, name, n, k)
    x = (case.random_array(rng, (t, k), "float32") + np.float32(mean)).astype(case.NUMPY[dtype])
    y, reference = case.quantized_product(rng, gemm_group_columns, weight, x, options,
                                          (-(-n // 16), -(-t // options.get("columns", 1))), 32 * options["warps"])
    assert case.relative_error(y, reference) < case.TOLERANCE["float32"]


def test_row_of_mixed_magnitudes(rng):
    """Values of x from 1e-4 to 1e15 side by side, as outliers of a residual stream are: as accurate as float32 sums."""
    weight = case.random_weight(rng, "q4_0", 32, 1024)
    x = (rng.standard_normal((1, 1024)) * 10.0 ** rng.integers(-4, 16, 1024)).astype(case.NUMPY["bfloat16"])
    y, reference = case.quantized_product(rng, gemm_group_columns, weight, x, {"warps": 2}, (2, 1), 64)
    assert case.relative_error(y, reference) < case.TOLERANCE["float32"]
