"""Matmuls of e4m3 activations and weights (gemm_many with e4m3 operands) and the kernel that quantises rows, against float64
NumPy on the emulator: ragged rows, odd N and K, every epilogue, numbers of very different size. Outputs start as NaN."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.schedules.kernels.cuda.gemm_many import gemm_many
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.schedules.kernels.cuda.quantize_rows import quantize_rows
from relaxpack.weight_format import E4M3, FORMATS, QuantizedTensor
from tests.helpers import matmul_case as case

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")

FINITE = np.flatnonzero(~np.isnan(E4M3)).astype(np.uint8)


def quantized_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What quantize_rows.py defines: codes `[t, K]` in their natural order, and scales."""
    wide = x.astype(np.float32)
    largest = np.maximum(np.abs(wide).max(axis=1), np.float32(2.0**-110))
    return (wide * (np.float32(448) / largest)[:, None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), \
        largest / np.float32(448)


def in_kernel_order(codes: np.ndarray) -> np.ndarray:
    """`[t, K]` → `[t, K padded to 64]` in the order of K that packed weights have."""
    t, k = codes.shape
    chunks = np.pad(codes, ((0, 0), (0, -k % 64))).reshape(t, -1, 2, 4, 2, 4)       # chunk, half, q, word, value
    return np.ascontiguousarray(chunks.transpose(0, 1, 3, 2, 4, 5)[..., [0, 2, 1, 3]]).reshape(t, -1)


def random_weight(rng: np.random.Generator, n: int, k: int) -> QuantizedTensor:
    codes = rng.choice(FINITE, (n, k)).astype(np.uint8)
    scales = rng.choice([-1, 1], (n, 1)) * np.exp(rng.uniform(-9, -5, (n, 1)))
    return QuantizedTensor(FORMATS["fp8"], codes, scales.astype(np.float32))


@pytest.mark.parametrize(("k", "dtype"), [(4096, "bfloat16"), (200, "float16"), (72, "bfloat16"), (8200, "bfloat16")])
def test_quantized_rows_are_those_of_the_definition(rng, k, dtype):
    x = case.random_array(rng, (6, k), dtype)
    x[1] = 0
    x[2] *= case.NUMPY[dtype](1e-4)
    x[3, 5] = 60000
    x[4, ::2] *= case.NUMPY[dtype](1e-5)
    codes, scales = np.full((6, -(-k // 64) * 64), 0xAA, np.uint8), case.poisoned((6,), "float32")
    threads = min(512, -(-(-(-k // 64) * 4) // 32 // 2) * 32)
    case.emulate(quantize_rows(k, dtype, dependent_launch=True), (6,), threads, machine_code=False, late=("x",), x=x,
                 codes=codes, scales=scales, t=6)
    expected, expected_scales = quantized_rows(x)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, in_kernel_order(expected))


@pytest.mark.parametrize(("n", "k", "t", "out_dtype", "options"), [
    (136, 200, 70, "bfloat16", {"tile_n": 64, "blocks": 2}),
    (72, 584, 130, "bfloat16", {"tile_n": 32, "blocks": 1, "promote": 2, "residual": True}),
    (160, 640, 70, "bfloat16", {"tile_n": 96, "blocks": 1, "promote": 1, "glu": "swiglu", "bias": True, "residual": True,
                                "dependent_launch": True}),
    (264, 328, 140, "bfloat16", {"tile_n": 256, "blocks": 1, "promote": 1, "residual": True, "whole_store": True}),
    (72, 200, 70, "float32", {"tile_n": 64, "blocks": 1, "residual": True}),
    (136, 1096, 130, "bfloat16", {"tile_n": 64, "split": 2, "promote": 1, "dependent_launch": True}),
    (112, 1000, 40, "bfloat16", {"tile_n": 128, "split": 4, "glu": "geglu", "bias": True, "residual": True}),
    (96, 712, 20, "float32", {"tile_n": 48, "split": 3, "promote": 1, "residual": True}),
    (120, 1096, 20, "bfloat16", {"tile_n": 80, "split": 2, "promote": 2, "bias": True, "residual": True}),  # halves overlap
])
def test_product_of_codes(rng, n, k, t, out_dtype, options):
    glu, split = options.get("glu"), options.get("split", 1)
    out = n // 2 if glu else n
    weight, codes = random_weight(rng, n, k), rng.choice(FINITE, (t, k)).astype(np.uint8)
    scales = np.exp(rng.uniform(-6, -2, t)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), "bfloat16") if options.get("residual") else None
    packed = pack(weight_layout(weight.format, n, k, glu is not None), weight)
    tiles = -(-t // 128) * -(-n // options["tile_n"])
    blocks = tiles * split if split > 1 else options["blocks"]
    late = ("x_codes", "x_scales", *(["residual"] if residual is not None else [])) if "dependent_launch" in options else ()
    y = case.poisoned((t, out), out_dtype)
    case.emulate(gemm_many(n, k, "bfloat16", out_dtype, e4m3=True, **options), (blocks,), 384, machine_code=False,
                 cluster=split, late=late, x_codes=in_kernel_order(codes), x_scales=scales,
                 **packed, y=y, t=t,
                 **({} if bias is None else {"bias": bias[row_order(n, glu is not None)]}),
                 **({} if residual is None else {"residual": residual}))
    x = E4M3[codes].astype(np.float64) * scales[:, None]
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE[out_dtype]
