"""The CUDA kernels for fp8 weights against float64 NumPy, on the emulator: every finite code, both ways to widen them, both
kinds of scales, odd shapes. Outputs start as NaN."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.kernel_spec import EmbeddingSpec
from relaxpack.schedules.kernels.cuda.dequantize import dequantize
from relaxpack.schedules.kernels.cuda.embedding import embedding
from relaxpack.schedules.kernels.cuda.gemm_few_quant import gemm_few_quant
from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.weight_format import E4M3, FORMATS, QuantizedTensor
from tests.helpers import matmul_case as case
from tests.helpers.cuda_harness import can_generate

pytestmark = pytest.mark.skipif(not can_generate(), reason="needs what TVM generates CUDA code with")

emulate = functools.partial(case.emulate, machine_code=False)   # tests/unit/schedules/test_cuda_fp8.py compiles them
FINITE = np.flatnonzero(~np.isnan(E4M3)).astype(np.uint8)


def random_weight(rng: np.random.Generator, name: str, n: int, k: int) -> QuantizedTensor:
    fmt = FORMATS[name]
    codes = rng.choice(FINITE, (n, k)).astype(np.uint8)
    codes[-1, ::2] = rng.integers(0, 8, len(codes[-1, ::2]))            # subnormals
    scales = rng.choice([-1, 1], (n, fmt.groups(k))) * np.exp(rng.uniform(-8, -4, (n, fmt.groups(k))))
    return QuantizedTensor(fmt, codes, scales.astype(np.float32))


def check(rng, make, name, n, k, t, dtype, options, grid, warps):
    glu = options.get("glu")
    out = n // 2 if glu else n
    x, weight = case.random_array(rng, (t, k), dtype), random_weight(rng, name, n, k)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    packed = pack(weight_layout(weight.format, n, k, glu is not None), weight)
    y = case.poisoned((t, out), "float32")
    emulate(make(n, k, weight.format, dtype, "float32", **options), grid, 32 * warps, x=x, **packed, y=y, t=t,
                 **({} if bias is None else {"bias": bias[row_order(n, glu is not None)]}),
                 **({} if residual is None else {"residual": residual}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE["float32"]


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "options"), [
    ("fp8", 56, 584, 3, "float16", {"warps": 2, "unroll": 1, "convert": True, "dependent_launch": True}),
    ("fp8_block", 72, 328, 11, "bfloat16", {"columns": 16, "strips": 2, "residual": True, "warps": 4}),
    ("fp8_block", 64, 512, 9, "float16", {"glu": "swiglu", "bias": True, "residual": True}),
    ("fp8_block", 32, 704, 2, "bfloat16", {"warps": 2, "ahead": True, "convert": True}),
])
def test_rows(rng, name, n, k, t, dtype, options):
    """Weights are exact and scales float32: the float32 result has float32 accuracy."""
    grid = (-(-(-(-n // 16)) // options.get("strips", 1)), -(-t // options.get("columns", 8)))
    check(rng, gemm_rows_quant, name, n, k, t, dtype, options, grid, options.get("warps", 8))


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "options"), [
    ("fp8", 136, 328, 19, "bfloat16", {"columns": 16, "warps": 4}),
    ("fp8_block", 128, 448, 33, "float16", {"columns": 32, "strips": 2, "warps": 2, "glu": "swiglu", "bias": True,
                                            "convert": True}),
])
def test_rows_with_shared_x(rng, name, n, k, t, dtype, options):
    blocks = -(-(-(-n // 16)) // (options.get("strips", 1) * options["warps"])) * -(-t // options["columns"])
    check(rng, gemm_few_quant, name, n, k, t, dtype, options, (blocks,), options["warps"])


@pytest.mark.parametrize(("dtype", "convert"), [("bfloat16", False), ("float16", False), ("float16", True)])
def test_every_code_becomes_its_number(dtype, convert):
    """x is a row of the identity: the result is a column of the weight, exactly; signs of zeros may be lost in a sum."""
    codes = np.resize(FINITE, (256, 16))
    weight = QuantizedTensor(FORMATS["fp8"], codes, np.ones((256, 1), np.float32))
    x = np.eye(8, 16).astype(case.NUMPY[dtype])
    y = case.poisoned((8, 256), "float32")
    func = gemm_rows_quant(256, 16, weight.format, dtype, "float32", warps=1, unroll=1, convert=convert)
    emulate(func, (16, 1), 32, x=x, **pack(weight_layout(weight.format, 256, 16, False), weight), y=y, t=8)
    np.testing.assert_array_equal(y, E4M3[codes[:, :8]].T)


@pytest.mark.parametrize(("name", "k"), [("fp8", 72), ("fp8_block", 200)])
def test_dequantize_rounds_once(rng, name, k):
    weight = random_weight(rng, name, 40, k)
    weight.codes.reshape(-1)[:len(FINITE)] = FINITE
    plain = case.poisoned((40, k), "bfloat16")
    packed = pack(weight_layout(weight.format, 40, k, False), weight)
    emulate(dequantize(40, k, weight.format, "bfloat16"), (-(-3 * -(-k // 64) // 8),), 256, **packed, plain=plain)
    np.testing.assert_array_equal(plain, weight.dequantize().astype(plain.dtype))


@pytest.mark.parametrize(("name", "hidden"), [("fp8_block", 136)])
def test_embedding_clamps_bad_ids(rng, name, hidden):
    ids, weight = np.array([0, 39, 7, 40, -1, 17], np.int32), random_weight(rng, name, 40, hidden)
    y = case.poisoned((len(ids), hidden), "float16")
    func = embedding(EmbeddingSpec(40, hidden, weight.format, "float16"))
    emulate(func, (len(ids),), 32, ids=ids, **pack(weight_layout(weight.format, 40, hidden, False), weight), y=y,
                 t=len(ids))
    np.testing.assert_array_equal(y, weight.dequantize()[np.clip(ids, 0, 39)].astype(np.float16))
