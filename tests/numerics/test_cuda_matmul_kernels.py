"""The mma, norm, embedding and dequantise kernels for CUDA against float64 NumPy, on the emulator. Outputs start as NaN;
shapes are small and awkward. The wgmma kernels need a GPU: tests/gpu/test_matmul_kernels.py."""

from __future__ import annotations

import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.kernel_spec import EmbeddingSpec, NormSpec
from relaxpack.schedules.kernels.cuda.dequantize import dequantize
from relaxpack.schedules.kernels.cuda.embedding import embedding
from relaxpack.schedules.kernels.cuda.gemm_few_quant import gemm_few_quant
from relaxpack.schedules.kernels.cuda.gemm_rows import gemm_rows
from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
from relaxpack.schedules.kernels.cuda.gemm_tiles import gemm_tiles
from relaxpack.schedules.kernels.cuda.norm import norm
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import TargetSpec
from relaxpack.weight_format import FORMATS
from tests.helpers import matmul_case as case

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")


@pytest.mark.parametrize(("n", "k", "t", "dtype", "options"), [
    (64, 512, 1, "bfloat16", {}),
    (64, 576, 3, "bfloat16", {"warps": 4, "bias": True}),
    (72, 584, 11, "bfloat16", {"columns": 16, "strips": 2, "residual": True, "dependent_launch": True}),
    (64, 512, 9, "float16", {"glu": "swiglu", "bias": True, "residual": True, "strips": 2}),
    (64, 192, 2, "bfloat16", {"glu": "geglu", "bias": True, "warps": 2}),
    (40, 136, 70, "float16", {"columns": 64, "warps": 2, "unroll": 1}),
])
def test_rows(rng, n, k, t, dtype, options):
    glu = options.get("glu")
    out = n // 2 if glu else n
    x, weight = case.random_array(rng, (t, k), dtype), case.random_array(rng, (n, k), dtype, 0.1)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    order = row_order(n, glu is not None)
    packed = pack(weight_layout(FORMATS["bf16" if dtype == "bfloat16" else "f16"], n, k, glu is not None), weight)
    y = case.poisoned((t, out), dtype)
    func = gemm_rows(n, k, dtype, dtype, **options)
    case.emulate(func, (-(-n // (16 * options.get("strips", 1))), -(-t // options.get("columns", 8))),
                 32 * options.get("warps", 8), x=x, weight=packed[""], y=y, t=t,
                 **({} if bias is None else {"bias": bias[order]}), **({} if residual is None else {"residual": residual}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "options"), [
    ("q4_0", 64, 512, 1, "bfloat16", {}),
    ("q4_0", 56, 544, 17, "float16", {"columns": 8, "warps": 2, "unroll": 1, "dependent_launch": True}),
    ("q4_1", 64, 576, 3, "bfloat16", {"warps": 4, "bias": True, "unroll": 2}),
    ("q8_0", 72, 576, 11, "bfloat16", {"columns": 16, "strips": 2, "residual": True}),
    ("q4_k", 64, 512, 9, "float16", {"glu": "swiglu", "bias": True, "residual": True, "strips": 2}),
    ("q6_k", 64, 512, 9, "bfloat16", {"glu": "swiglu"}),
    ("q5_1", 48, 256, 2, "float16", {"glu": "geglu"}),
    ("q8_0", 32, 704, 2, "bfloat16", {"warps": 2, "ahead": True, "dependent_launch": True}),
    ("q8_0", 32, 704, 2, "bfloat16", {"warps": 2, "ahead": 2, "dependent_launch": True}),        # three rounds at once
    ("q5_k", 32, 96, 2, "bfloat16", {}),
    ("q4_128", 56, 584, 3, "bfloat16", {"warps": 4, "bias": True, "unroll": 2, "ahead": True}),
    ("q4_128", 64, 256, 9, "float16",
     {"columns": 16, "glu": "swiglu", "residual": True, "strips": 2, "dependent_launch": True}),
])
def test_quantized_rows(rng, name, n, k, t, dtype, options):
    """Exact codes and float32 scales: the float32 result has float32 accuracy."""
    glu = options.get("glu")
    out = n // 2 if glu else n
    x, weight = case.random_array(rng, (t, k), dtype), case.random_quantized(rng, name, n, k)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    packed = pack(weight_layout(weight.format, n, k, glu is not None), weight)
    y = case.poisoned((t, out), "float32")
    func = gemm_rows_quant(n, k, weight.format, dtype, "float32", **options)
    case.emulate(func, (-(-(-(-n // 16)) // options.get("strips", 1)), -(-t // options.get("columns", 8))),
                 32 * options.get("warps", 8), x=x, **packed, y=y, t=t,
                 **({} if bias is None else {"bias": bias[row_order(n, glu is not None)]}),
                 **({} if residual is None else {"residual": residual}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE["float32"]


@pytest.mark.parametrize(("name", "n", "k", "t", "dtype", "options"), [
    ("q4_0", 136, 320, 19, "bfloat16", {"columns": 16, "warps": 4}),
    ("q4_k", 128, 448, 33, "float16",
     {"columns": 32, "strips": 2, "warps": 2, "glu": "swiglu", "bias": True, "residual": True}),
    ("q8_0", 48, 96, 9, "bfloat16", {"columns": 16, "warps": 2, "dependent_launch": True, "glu": "geglu"}),
    ("q4_128", 72, 328, 9, "bfloat16", {"columns": 16, "warps": 2, "bias": True}),
])
def test_quantized_rows_with_shared_x(rng, name, n, k, t, dtype, options):
    glu = options.get("glu")
    out = n // 2 if glu else n
    x, weight = case.random_array(rng, (t, k), dtype), case.random_quantized(rng, name, n, k)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    y = case.poisoned((t, out), "float32")
    blocks = -(-(-(-n // 16)) // (options.get("strips", 1) * options["warps"])) * -(-t // options["columns"])
    case.emulate(gemm_few_quant(n, k, weight.format, dtype, "float32", **options), (blocks,), 32 * options["warps"], x=x,
                 **pack(weight_layout(weight.format, n, k, glu is not None), weight), y=y, t=t,
                 **({} if bias is None else {"bias": bias[row_order(n, glu is not None)]}),
                 **({} if residual is None else {"residual": residual}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE["float32"]


@pytest.mark.parametrize(("n", "k", "t", "dtype", "options"), [
    (136, 200, 70, "bfloat16", {}), (48, 64, 5, "bfloat16", {"glu": "geglu"}),
    (160, 64, 130, "float16", {"glu": "swiglu", "bias": True, "residual": True})])
def test_tiles(rng, n, k, t, dtype, options):
    glu = options.get("glu")
    out = n // 2 if glu else n
    x, weight = case.random_array(rng, (t, k), dtype), case.random_array(rng, (n, k), dtype, 0.1)
    bias = rng.standard_normal(n).astype(np.float32) if options.get("bias") else None
    residual = case.random_array(rng, (t, out), dtype) if options.get("residual") else None
    order, y = row_order(n, glu is not None), case.poisoned((t, out), dtype)
    case.emulate(gemm_tiles(n, k, dtype, dtype, **options), (-(-n // 128), -(-t // 128)), 256, arch="sm_80", x=x,
                 weight=np.ascontiguousarray(weight[order]), y=y, t=t, **({} if bias is None else {"bias": bias[order]}),
                 **({} if residual is None else {"residual": residual}))
    assert case.relative_error(y, case.reference_linear(x, weight, bias, residual, glu)) < case.TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q6_k", "q4_128"])
def test_dequantize_rounds_once(rng, name):
    weight = case.random_quantized(rng, name, 40, 96)
    plain = case.poisoned((40, 96), "bfloat16")
    packed = pack(weight_layout(weight.format, 40, 96, False), weight)
    case.emulate(dequantize(40, 96, weight.format, "bfloat16"), (1,), 256, **packed, plain=plain)
    reference = weight.dequantize()
    assert np.all(np.abs(plain.astype(np.float32) - reference) <= np.abs(reference) * 2.0**-8 + 1e-9)


@pytest.mark.parametrize(("name", "factor"), [("f16", 1.0), ("bf16", 45.25), ("q4_k", 45.25), ("q6_k", 3.0), ("q8_0", 1.0),
                                              ("q4_128", 45.25)])
def test_embedding_clamps_bad_ids(rng, name, factor):
    vocab, hidden, ids = 40, 96, np.array([0, 39, 7, 40, -1, 17], np.int32)
    fmt = FORMATS[name]
    if fmt.quantized:
        weight = case.random_quantized(rng, name, vocab, hidden)
        plain = weight.dequantize()
    else:
        weight = case.random_array(rng, (vocab, hidden), fmt.dtype)
        plain = weight.astype(np.float32)
    packed = pack(weight_layout(fmt, vocab, hidden, False), weight)
    buffers = packed if fmt.quantized else {"table": packed[""]}
    y = case.poisoned((len(ids), hidden), "bfloat16")
    case.emulate(embedding(EmbeddingSpec(vocab, hidden, fmt, "bfloat16", factor)), (len(ids),), 32, ids=ids, **buffers, y=y,
                 t=len(ids))
    expected = plain[np.clip(ids, 0, vocab - 1)] * np.float32(factor)
    assert np.all(np.abs(y.astype(np.float32) - expected) <= np.abs(expected) * 2.0**-8 + 1e-9)


@pytest.mark.parametrize(("hidden", "dtype", "residual", "threads"), [
    (64, "bfloat16", False, None), (576, "float16", True, None), (4096, "bfloat16", True, None),
    (8448, "bfloat16", True, None), (4096, "bfloat16", True, 64), (3584, "bfloat16", False, 256)])
def test_norm(rng, hidden, dtype, residual, threads):
    x, before = (case.random_array(rng, (3, hidden), dtype, 2.0) for _ in range(2))
    weight = rng.standard_normal(hidden).astype(np.float32)
    total, y = case.poisoned((3, hidden), dtype), case.poisoned((3, hidden), dtype)
    func = norm(NormSpec(hidden, 1e-5, dtype, residual), threads=threads, dependent_launch=threads is not None)
    buffers = {"before": before, "total": total} if residual else {}
    case.emulate(func, (3,), threads or min(1024, -(-hidden // 256) * 32), x=x, weight=weight, y=y, t=3, **buffers)
    summed = (x.astype(np.float32) + before.astype(np.float32)).astype(case.NUMPY[dtype]) if residual else x
    if residual:
        assert np.array_equal(total, summed)
    wide = summed.astype(np.float64)
    reference = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    assert case.relative_error(y, reference) < case.TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "residual", "blocks"), [(4096, True, 264), (4096, False, 528), (2048, True, 1056)])
def test_norms_of_many_rows(rng, hidden, residual, blocks):
    """The rule's kernels: each block takes several rows, not all as many. Few rows keep theirs."""
    spec, provider = NormSpec(hidden, 1e-5, "bfloat16", residual, many_rows=True), CudaKernels(TargetSpec("cuda", "sm_90a"))
    (stage,) = provider.norm(spec).stages
    (few,) = provider.norm(replace(spec, many_rows=False)).stages
    assert stage.name.endswith(f"_bl{blocks}") and "_bl" not in few.name
    assert provider.norm(replace(spec, hidden_size=2560)).stages[0].name == provider.norm(
        NormSpec(2560, 1e-5, "bfloat16", residual)).stages[0].name                      # not measured
    rows = blocks + 3
    x, before = (case.random_array(rng, (rows, hidden), "bfloat16", 2.0) for _ in range(2))
    weight = rng.standard_normal(hidden).astype(np.float32)
    total, y = case.poisoned((rows, hidden), "bfloat16"), case.poisoned((rows, hidden), "bfloat16")
    buffers = {"before": before, "total": total} if residual else {}
    threads = 512 if hidden == 4096 and residual else 256
    case.emulate(stage.func, (blocks,), threads, x=x, weight=weight, y=y, t=rows, **buffers)
    summed = (x.astype(np.float32) + before.astype(np.float32)).astype(case.NUMPY["bfloat16"]) if residual else x
    if residual:
        assert np.array_equal(total, summed)
    wide = summed.astype(np.float64)
    reference = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    assert case.relative_error(y, reference) < case.TOLERANCE["bfloat16"]


def test_swiglu_rows_are_interleaved_by_eight():
    assert row_order(32, True).tolist() == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    assert ml_dtypes.bfloat16 is case.NUMPY["bfloat16"]
