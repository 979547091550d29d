"""The Hopper matmuls of few and many rows (TMA, wgmma, clusters, sums over distributed shared memory) against float64
NumPy, on the emulator: small awkward shapes, every epilogue, outputs that start as NaN."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.schedules.kernels.cuda.gemm_few import gemm_few
from relaxpack.schedules.kernels.cuda.gemm_many import gemm_many
from relaxpack.schedules.kernels.cuda.packing import row_order
from tests.helpers import matmul_case as case

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")


def check(rng, make, blocks, threads, cluster, n, k, t, dtype, out_dtype, options):
    glu = options.get("glu")
    out = n // 2 if glu else n
    x, weight = case.random_array(rng, (t, k), dtype), case.random_array(rng, (n, k), dtype, 0.1)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    order, y = row_order(n, glu is not None), case.poisoned((t, out), out_dtype)
    late = ("x", *(["residual"] if residual is not None else [])) if options.get("dependent_launch") else ()
    case.emulate(make(n, k, dtype, out_dtype, **options), (blocks,), threads, machine_code=False, cluster=cluster,
                 late=late, x=x, weight=np.ascontiguousarray(weight[order]), y=y, t=t,
                 **({} if bias is None else {"bias": bias[order]}),
                 **({} if residual is None else {"residual": residual}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE[out_dtype]


@pytest.mark.parametrize(("n", "k", "t", "dtype", "out_dtype", "options"), [
    (136, 200, 70, "bfloat16", "bfloat16", {"tile_n": 64, "blocks": 2}),                            # more tiles than blocks
    (72, 584, 130, "float16", "float16", {"tile_n": 32, "blocks": 1, "skew": 2, "residual": True}),
    (160, 640, 70, "bfloat16", "bfloat16",
     {"tile_n": 96, "blocks": 1, "skew": 1, "glu": "swiglu", "bias": True, "residual": True, "dependent_launch": True}),
    (80, 200, 200, "bfloat16", "float32", {"tile_n": 48, "blocks": 2, "cluster": 2, "bias": True}),
    (264, 136, 140, "bfloat16", "bfloat16", {"tile_n": 256, "blocks": 1, "residual": True}),    # a residual of two stages
    (232, 136, 140, "float16", "float16",
     {"tile_n": 224, "blocks": 2, "cluster": 2, "residual": True, "dependent_launch": True}),
    (72, 200, 70, "bfloat16", "float32", {"tile_n": 64, "blocks": 1, "residual": True}),
    (136, 520, 130, "bfloat16", "bfloat16", {"tile_n": 64, "split": 2, "dependent_launch": True}),
    (112, 1000, 40, "float16", "float16", {"tile_n": 128, "split": 4, "glu": "geglu", "bias": True, "residual": True}),
    (96, 712, 20, "bfloat16", "float32", {"tile_n": 48, "split": 3, "residual": True, "dependent_launch": True}),
    (168, 520, 130, "bfloat16", "bfloat16", {"tile_n": 80, "split": 2, "residual": True, "bias": True,
                                           "dependent_launch": True}),                              # halves overlap
    (112, 584, 40, "float16", "float16", {"tile_n": 96, "split": 2, "glu": "swiglu", "bias": True, "residual": True}),
    (104, 520, 20, "bfloat16", "float32", {"tile_n": 48, "split": 2, "bias": True, "dependent_launch": True}),
])
def test_many(rng, n, k, t, dtype, out_dtype, options):
    split, cluster = options.get("split", 1), options.get("cluster", 1)
    tiles = -(-t // (128 * cluster)) * -(-n // options["tile_n"])
    blocks = tiles * split if split > 1 else options["blocks"]
    check(rng, gemm_many, blocks, 384, max(split, cluster), n, k, t, dtype, out_dtype, options)


@pytest.mark.parametrize(("n", "k", "t", "dtype", "out_dtype", "options"), [
    (136, 200, 11, "bfloat16", "bfloat16", {"columns": 16, "consumers": 1}),
    (144, 584, 23, "float16", "float16",
     {"columns": 16, "consumers": 2, "split": 2, "share": 2, "glu": "swiglu", "bias": True, "residual": True,
      "dependent_launch": True}),
    (72, 712, 9, "bfloat16", "float32", {"columns": 16, "consumers": 1, "split": 3, "residual": True}),
    (72, 712, 9, "bfloat16", "float32", {"columns": 16, "consumers": 1, "split": 3, "dependent_launch": True}),
    (48, 264, 9, "bfloat16", "bfloat16", {"columns": 16, "consumers": 1, "glu": "geglu", "bias": True}),
])
def test_few(rng, n, k, t, dtype, out_dtype, options):
    split, share = options.get("split", 1), options.get("share", 1)
    strips = -(-n // (64 * options["consumers"] * share)) * share
    blocks = strips * split * -(-t // options["columns"])
    check(rng, gemm_few, blocks, options["consumers"] * 128 + 32, split * share, n, k, t, dtype, out_dtype, options)
