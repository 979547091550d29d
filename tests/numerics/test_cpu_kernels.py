"""Every CPU kernel against plain NumPy in float64, at every instruction set this machine can run. Outputs start as NaN.

Quantised linears are compared twice: tightly with the same int8-rounded activations, and with the exact product within
the bound that rounding implies (half a step of each activation times the weights' magnitudes).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, EmbeddingSpec, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cpu.layout import stored_as
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.weight_format import FORMATS, QuantizedTensor, WeightFormat
from tests.helpers.cpu_case import finish, provider, run


def random_weight(fmt: WeightFormat, n: int, k: int, seed: int = 0) -> np.ndarray | QuantizedTensor:
    rng = np.random.default_rng(seed)
    if not fmt.quantized:
        return rng.standard_normal((n, k)).astype("float16" if fmt.name == "f16" else "float32")
    low, high = {"q5_0": (-16, 15), "q6_k": (-32, 31), "q8_0": (-128, 127)}.get(
        fmt.name, (0, 15 if fmt.bits == 4 else 31))
    codes = rng.integers(low, high, (n, k), endpoint=True).astype("int8" if fmt.signed else "uint8")
    codes[0], codes[-1] = low, high  # the ends of the range, all along a row
    shape = (n, fmt.groups(k))
    signs = rng.choice([-1, 1], shape)
    scales = (signs * rng.uniform(0.5, 1.5, shape) / high).astype(fmt.scale_dtype)
    lows = rng.standard_normal(shape).astype(fmt.scale_dtype) if fmt.minimum == "stored" else None
    zeros = rng.integers(0, 16, shape).astype("uint8") if fmt.zeros else None
    return QuantizedTensor(fmt, codes, scales, lows, zeros)


def exact(weight: np.ndarray | QuantizedTensor, fmt: WeightFormat) -> np.ndarray:
    """The stored numbers in float64."""
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize().astype("float64")
    if fmt.name == "bf16":
        bits = weight.view(np.uint32)
        weight = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
    return weight.astype("float64")


def rounded(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Activations as the kernels round them, and half a rounding step of each."""
    groups = x.reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / np.maximum(largest, np.float32(1e-30))))
    value = codes.astype("float64") * (largest * np.float32(1 / 127))
    step = np.broadcast_to(largest / 254 * 1.001, groups.shape)
    return value.reshape(x.shape), step.reshape(x.shape)


def check_linear(kernels: CpuKernels, spec: LinearSpec, rows: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed + 1)
    fmt, n, k = spec.weight, spec.out_features, spec.in_features
    weight = random_weight(fmt, n, k, seed)
    layout = kernels.weight_layout(fmt, n, k, spec.gated)
    packed = kernels.pack(layout, weight)
    for suffix, shape, dtype in layout.buffers:
        assert packed[suffix].shape == shape and packed[suffix].dtype == dtype
    columns = n // 2 if spec.gated else n
    x = rng.standard_normal((rows, k)).astype("float32") * np.exp(rng.standard_normal((rows, k))).astype("float32")
    x[-1, :fmt.group_size or 3] = 0  # a group without a largest value
    bias, residual = rng.standard_normal(n).astype("float32"), rng.standard_normal((rows, columns)).astype("float32")
    scale = np.float32(1 / np.sqrt(k))
    x *= scale
    y, = run(kernels, kernels.linear(spec), {"x": x, "weight": packed[""], "bias": bias, "residual": residual},
             {"y": (rows, columns)})
    w = exact(weight, fmt)
    used, step = rounded(x, stored_as(fmt).group_size) if fmt.quantized else (x.astype("float64"), None)
    expected = finish(used @ w.T, spec, bias, residual)
    magnitude = np.abs(used) @ np.abs(w).T
    if isinstance(weight, QuantizedTensor) and weight.format.name in ("q4_0", "q4_128"):
        size = weight.format.group_size
        magnitude = magnitude + np.abs(used) @ np.abs(weight.codes * np.repeat(weight.scales, size, 1)[:, :k].astype("f8")).T
    bound = 3e-6 * magnitude.max() * (4 * np.abs(expected).max() if spec.gated else 1) + 1e-6
    assert np.abs(y - expected).max() <= bound, (np.abs(y - expected).max(), bound)
    if step is not None and not spec.gated:
        limit = step @ np.abs(w).T + bound
        assert (np.abs(y - finish(x.astype("float64") @ w.T, spec, bias, residual)) <= limit).all()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if not f.e4m3])
def test_linear_every_format(kernels: CpuKernels, name: str, phase: str) -> None:
    fmt = FORMATS[name]
    if not fmt.quantized and kernels.isa.vnni:
        pytest.skip("float kernels do not use VNNI")
    k = 96 if fmt.quantized else 77
    for rows in (1, 5):
        check_linear(kernels, LinearSpec(70, k, fmt, phase, "float32", "float32"), rows)


@pytest.mark.parametrize("name", ["f32", "q4_1"])
@pytest.mark.parametrize("options", [{"bias": True}, {"residual": True}, {"bias": True, "residual": True},
                                     {"glu": "swiglu"}, {"glu": "swiglu", "bias": True},
                                     {"glu": "geglu", "bias": True}], ids=str)
def test_linear_epilogues(float_kernels: CpuKernels, name: str, options: dict[str, Any]) -> None:
    n = 84  # whole panels and a partial one, also where gate and up share them
    check_linear(float_kernels, LinearSpec(n, 64, FORMATS[name], "decode", "float32", "float32", **options), 3)


@pytest.mark.parametrize("name", ["f32", "bf16", "q4_1", "q6_k"])
def test_linear_many_rows(kernels: CpuKernels, name: str) -> None:
    for rows in (2, 8, 9, 131):
        check_linear(kernels, LinearSpec(40, 256, FORMATS[name], "prefill", "float32", "float32", residual=True), rows)


@pytest.mark.parametrize("name", ["f32", "q4_0", "q8_0"])
def test_linear_row_does_not_depend_on_the_batch(kernels: CpuKernels, name: str) -> None:
    fmt = FORMATS[name]
    weight = random_weight(fmt, 64, 128)
    packed = kernels.pack(kernels.weight_layout(fmt, 64, 128, False), weight)[""]
    x = np.random.default_rng(5).standard_normal((11, 128)).astype("float32")
    results = []
    for phase in ("decode", "prefill"):
        kernel = kernels.linear(LinearSpec(64, 128, fmt, phase, "float32", "float32"))
        for rows in (slice(0, 11), slice(4, 5)):
            y, = run(kernels, kernel, {"x": x[rows], "weight": packed}, {"y": (len(x[rows]), 64)})
            results.append(y[4] if len(y) > 1 else y[0])
    for other in results[1:]:
        assert (results[0] == other).all()


@pytest.mark.parametrize("factor", [1.0, 45.25])
@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if not f.e4m3])
def test_embedding_reads_the_linear_layout(float_kernels: CpuKernels, name: str, factor: float) -> None:
    fmt = FORMATS[name]
    table = random_weight(fmt, 75, 96)
    packed = float_kernels.pack(float_kernels.weight_layout(fmt, 75, 96, False), table)[""]
    ids = np.array([0, 74, 31, 32, 16, 15, 47, 48, 3, 74, 1], "int32")
    kernel = float_kernels.embedding(EmbeddingSpec(75, 96, fmt, "float32", factor))
    y, = run(float_kernels, kernel, {"token_ids": ids, "weight": packed}, {"y": (len(ids), 96)})
    np.testing.assert_allclose(y, exact(table, fmt)[ids] * factor, rtol=3e-6, atol=3e-6 * factor)


@pytest.mark.parametrize("size", [64, 576, 77, 1000])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(float_kernels: CpuKernels, size: int, residual: bool) -> None:
    rng = np.random.default_rng(size)
    kernel = float_kernels.norm(NormSpec(size, 1e-5, "float32", residual))
    for rows in (1, 19):
        x, r = rng.standard_normal((2, rows, size)).astype("float32")
        w = rng.standard_normal(size).astype("float32")
        out = run(float_kernels, kernel, {"x": x, "residual": r, "weight": w}, {"total": x.shape, "y": x.shape})
        total = x.astype("float64") + (r if residual else 0)
        if residual:
            np.testing.assert_array_equal(out[0], x + r)
        expected = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * w
        np.testing.assert_allclose(out[-1], expected, rtol=2e-6, atol=1e-6)


def test_bad_questions_are_refused_with_the_reason() -> None:
    kernels = provider("avx2")
    with pytest.raises(CompileError, match="not a multiple of its group of 32"):
        kernels.weight_layout(FORMATS["q4_0"], 64, 100, False)
    with pytest.raises(CompileError, match="float32 activations, got float16"):
        kernels.norm(NormSpec(64, 1e-5, "float16", False))
    with pytest.raises(CompileError, match="KV dtype"):
        kernels.decode_attention(AttentionSpec(1, 4, 2, 64, 64, 16, 16, 300, "float32", "bfloat16", 0.125))
