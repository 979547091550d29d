"""The CPU kernels for fp8 weights against float64 NumPy, at every vector width this machine can run. Outputs start as NaN.

Sums are float32 and weights exact, so results are held to what rounding the sums can explain.
"""

from __future__ import annotations

import numpy as np
import pytest

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import EmbeddingSpec, LinearSpec
from relaxpack.schedules.kernels.cpu.linear_fp8 import Fp8Tuning, linear_fp8
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.weight_format import E4M3, FORMATS, QuantizedTensor
from tests.helpers.cpu_case import finish, provider, run

FP8, FP8_BLOCK = FORMATS["fp8"], FORMATS["fp8_block"]
FINITE = np.flatnonzero(~np.isnan(E4M3)).astype(np.uint8)


@pytest.fixture(params=["avx2", "avx512"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return provider(request.param)


def random_weight(name: str, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    """Every finite code occurs, subnormals often; scales of both signs over some orders of magnitude."""
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    codes = rng.choice(FINITE, (n, k)).astype(np.uint8)
    codes.reshape(-1)[:len(FINITE)] = FINITE
    codes[-1, ::2] = rng.integers(0, 8, len(codes[-1, ::2]))
    scales = rng.choice([-1, 1], (n, fmt.groups(k))) * np.exp(rng.uniform(-6, 2, (n, fmt.groups(k))))
    return QuantizedTensor(fmt, codes, scales.astype(np.float32))


def check(kernels: CpuKernels, spec: LinearSpec, rows: int) -> None:
    rng = np.random.default_rng(rows)
    n, k = spec.out_features, spec.in_features
    weight = random_weight(spec.weight.name, n, k)
    layout = kernels.weight_layout(spec.weight, n, k, spec.gated)
    packed = kernels.pack(layout, weight)[""]
    ((suffix, shape, dtype),) = layout.buffers
    assert suffix == "" and packed.shape == shape and packed.dtype == dtype
    columns = n // 2 if spec.gated else n
    w = weight.dequantize().astype("float64")
    x = (rng.standard_normal((rows, k)) / np.sqrt(k) / np.sqrt((w**2).mean())).astype("float32")
    bias, residual = rng.standard_normal(n).astype("float32"), rng.standard_normal((rows, columns)).astype("float32")
    y, = run(kernels, kernels.linear(spec), {"x": x, "weight": packed, "bias": bias, "residual": residual},
             {"y": (rows, columns)})
    wide = x.astype("float64")
    expected = finish(wide @ w.T, spec, bias, residual)
    magnitude = np.abs(wide) @ np.abs(w).T + 3
    if spec.gated:     # |d silu|, |d gelu| <= 1.13, so an error of either side grows with the other
        gate, up = np.split(magnitude, 2, axis=1)
        magnitude = 3 * gate * up
    assert (np.abs(y - expected) <= 1e-6 * magnitude).all(), np.abs(y - expected).max()


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 333)])
def test_linear(kernels: CpuKernels, name: str, phase: str, n: int, k: int) -> None:
    """Whole panels and blocks, and widths that are no multiple of a panel, a stretch or a block; rows that are no multiple
    of a tile."""
    for rows in (1, 2, 13):
        check(kernels, LinearSpec(n, k, FORMATS[name], phase, "float32", "float32"), rows)


@pytest.mark.parametrize("options", [{"bias": True, "residual": True}, {"glu": "swiglu"}, {"glu": "geglu", "bias": True}],
                         ids=str)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_epilogues(kernels: CpuKernels, phase: str, options: dict[str, bool]) -> None:
    for rows in (1, 5):
        check(kernels, LinearSpec(72, 160, FP8_BLOCK, phase, "float32", "float32", **options), rows)


def test_many_rows(kernels: CpuKernels) -> None:
    """More than one task of rows, with a short last one; decode in several tiles."""
    check(kernels, LinearSpec(40, 192, FP8, "prefill", "float32", "float32"), 260)
    check(kernels, LinearSpec(40, 192, FP8_BLOCK, "decode", "float32", "float32"), 140)


def test_every_code_and_nothing_but_it(kernels: CpuKernels) -> None:
    """With an input of one 1 the output is a column of the weight, exactly."""
    weight = QuantizedTensor(FP8, np.resize(FINITE, (len(FINITE), 3)), np.ones((len(FINITE), 1), np.float32))
    weight.codes[:, 1] = FINITE
    spec = LinearSpec(len(FINITE), 3, FP8, "decode", "float32", "float32")
    packed = kernels.pack(kernels.weight_layout(FP8, len(FINITE), 3, False), weight)[""]
    for rows in (1, 4):
        x = np.zeros((rows, 3), "float32")
        x[:, 1] = 1
        y, = run(kernels, kernels.linear(spec), {"x": x, "weight": packed}, {"y": (rows, len(FINITE))})
        np.testing.assert_array_equal(y, np.broadcast_to(E4M3[FINITE], y.shape))


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_a_row_does_not_depend_on_the_others(kernels: CpuKernels, name: str) -> None:
    """Alone, in batches of a decode, and in a prefill: bit for bit the same."""
    n, k = 64, 330
    fmt, x = FORMATS[name], np.random.default_rng(3).standard_normal((150, k)).astype("float32")
    packed = kernels.pack(kernels.weight_layout(fmt, n, k, False), random_weight(name, n, k))[""]
    bias = np.ones(n, "float32")
    results = []
    for phase in ("decode", "prefill"):
        kernel = kernels.linear(LinearSpec(n, k, fmt, phase, "float32", "float32", bias=True))
        for rows in (slice(4, 5), slice(0, 6), slice(0, 13), slice(0, 150)):
            y, = run(kernels, kernel, {"x": x[rows], "weight": packed, "bias": bias}, {"y": (len(x[rows]), n)})
            results.append(y[4] if len(y) > 1 else y[0])
    for other in results[1:]:
        assert (results[0] == other).all()


def test_tuning_changes_no_bit(kernels: CpuKernels) -> None:
    n, k = 64, 330
    spec = LinearSpec(n, k, FP8_BLOCK, "decode", "float32", "float32")
    packed = kernels.pack(kernels.weight_layout(FP8_BLOCK, n, k, False), random_weight("fp8_block", n, k))[""]
    x = np.random.default_rng(3).standard_normal((7, k)).astype("float32")
    expected, = run(kernels, kernels.linear(spec), {"x": x, "weight": packed}, {"y": (7, n)})
    other = CpuKernels(kernels.target)
    kernel = other.linear(spec)
    changed = type(kernel.stages[0])(linear_fp8(kernels.isa, spec, Fp8Tuning(2, 0, False, (2,), 2, 32)), "changed",
                                     kernel.stages[0].inputs, kernel.stages[0].outputs)
    other._kernels[next(iter(other._kernels))] = kernel = type(kernel)((changed,), "test")
    y, = run(other, kernel, {"x": x, "weight": packed}, {"y": (7, n)})
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(("name", "hidden", "factor"), [("fp8", 96, 1.0), ("fp8_block", 256, 8.0), ("fp8_block", 200, 1.0)])
def test_embedding(kernels: CpuKernels, name: str, hidden: int, factor: float) -> None:
    fmt, table = FORMATS[name], random_weight(name, 75, hidden)
    packed = kernels.pack(kernels.weight_layout(fmt, 75, hidden, False), table)[""]
    ids = np.array([0, 74, 31, 32, 16, 15, 47, 48, 3, 74, 1, -5, 99], "int32")
    kernel = kernels.embedding(EmbeddingSpec(75, hidden, fmt, "float32", factor))
    y, = run(kernels, kernel, {"token_ids": ids, "weight": packed}, {"y": (len(ids), hidden)})
    np.testing.assert_array_equal(y, table.dequantize()[np.clip(ids, 0, 74)] * np.float32(factor))


def test_bad_questions_are_refused_with_the_reason() -> None:
    kernels = provider("avx2")
    with pytest.raises(CompileError, match="must be even"):
        kernels.weight_layout(FP8, 33, 64, True)
    weight = QuantizedTensor(FP8, np.zeros((32, 4), np.uint8), np.full((32, 1), 3e38, np.float32))
    with pytest.raises(CompileError, match=r"scale of 3e\+38 is too large"):
        kernels.pack(kernels.weight_layout(FP8, 32, 4, False), weight)
