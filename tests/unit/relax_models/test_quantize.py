"""Quantising float weights: error bounds per group, optimality against plain rounding, and refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from relaxpack.errors import CompileError
from relaxpack.relax_models import quantize as module
from relaxpack.relax_models.quantize import WEIGHT_CHOICES, quantize
from relaxpack.weight_format import FORMATS

HALF = 2.0 ** -11  # relative rounding of float16


def weight(rng: np.random.Generator, shape: tuple[int, int] = (48, 256)) -> np.ndarray:
    x = rng.normal(0, 0.05, shape).astype(np.float32)
    x[0] += 3.0                    # a far offset: what the stored minimum is for
    x[1] = np.abs(x[1]) * 100      # one-sided and large
    x[2, 5] = 1.0                  # an outlier
    return x


def groups_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, 32)


def test_q8_error_is_half_a_step(rng: np.random.Generator) -> None:
    x = weight(rng)
    got = quantize(x, FORMATS["q8_0"])
    peak = np.abs(groups_of(x)).max(axis=1, keepdims=True)
    # Half a step, plus what rounding the scale moves the outermost code.
    bound = peak / 127 * 0.5 * (1 + HALF) + peak * HALF
    assert (np.abs(groups_of(got.dequantize() - x)) <= bound * 1.0001).all()


def test_q4_0_error_is_one_step_at_most(rng: np.random.Generator) -> None:
    x = weight(rng)
    got = quantize(x, FORMATS["q4_0"])
    peak = np.abs(groups_of(x)).max(axis=1, keepdims=True)
    assert got.codes.max() <= 15
    # The side that has only 7 steps clips by up to one step; everything else is within half.
    assert (np.abs(groups_of(got.dequantize() - x)) <= peak / 8 * 1.001 + peak * HALF).all()


def test_q4_1_error_is_below_plain_rounding(rng: np.random.Generator) -> None:
    """The plain scheme (range / 15) bounds each weight by half a step; the fit may only lower the squared error."""
    x = weight(rng)
    got = quantize(x, FORMATS["q4_1"])
    g = groups_of(x).astype(np.float64)
    low, step = g.min(axis=1, keepdims=True), np.ptp(g, axis=1, keepdims=True) / 15
    low16, step16 = low.astype(np.float16).astype(np.float64), step.astype(np.float16).astype(np.float64)
    plain = np.clip(np.rint((g - low16) / step16), 0, 15) * step16 + low16
    plain_error = np.square(plain - g).sum(axis=1)
    error = np.square(groups_of(got.dequantize()) - g).sum(axis=1)
    assert (error <= plain_error * (1 + 1e-5) + 1e-12).all()
    assert error.sum() < 0.95 * plain_error.sum()


def test_what_is_on_the_grid_stays_exact(rng: np.random.Generator) -> None:
    for name, low, high in (("q4_1", 0, 15), ("q4_0", -8, 7), ("q8_0", -127, 127)):
        codes = rng.integers(low, high + 1, (16, 64))
        codes[:, ::32], codes[:, 1::32] = low, high   # every group uses its whole range
        x = codes.astype(np.float32) * 0.25 + (0.5 if name == "q4_1" else 0.0)
        np.testing.assert_array_equal(quantize(x, FORMATS[name]).dequantize(), x)


@pytest.mark.parametrize("k", [256, 200])
def test_q4_128_error_is_half_a_step_or_better(k: int, rng: np.random.Generator) -> None:
    """Plain rounding of the range that includes zero bounds the squared error of each group; whole zeros move the range by
    up to half a step. Rows need not be whole groups."""
    x = weight(rng)[:, :k]
    got = quantize(x, FORMATS["q4_128"])
    assert got.codes.shape == x.shape and got.zeros is not None and got.zeros.shape == got.scales.shape == (48, 2)
    for group in (slice(0, 128), slice(128, k)):
        g = x[:, group].astype(np.float64)
        low, high = np.minimum(g.min(axis=1), 0)[:, None], np.maximum(g.max(axis=1), 0)[:, None]
        step = ((high - low) / 15).astype(np.float16).astype(np.float64)
        zero = np.clip(np.rint(-low / step), 0, 15)
        plain = (np.clip(np.rint(g / step) + zero, 0, 15) - zero) * step
        error = got.dequantize()[:, group] - g
        assert (np.square(error).sum(axis=1) <= np.square(plain - g).sum(axis=1) * (1 + 1e-5)).all()
    # One number beyond the others is clipped where that helps the rest.
    spread = rng.normal(0, 1, (1, 128)).astype(np.float32)
    spread[0, 0] = 5.0
    assert quantize(spread, FORMATS["q4_128"]).dequantize().max() < 4.7


def test_whole_zeros_are_kept(rng: np.random.Generator) -> None:
    """What is on such a grid already stays exact, one-sided groups too."""
    for zero in (0, 6, 15):
        codes = rng.integers(0, 16, (4, 128))
        codes[:, 0], codes[:, 1] = 0, 15
        x = (codes - zero).astype(np.float32) * 0.25
        got = quantize(x, FORMATS["q4_128"])
        np.testing.assert_array_equal(got.dequantize(), x)
        assert got.zeros is not None and (got.zeros == zero).all()


@pytest.mark.parametrize("name", ["q4_1", "q4_0", "q8_0", "q4_128"])
def test_zero_constant_and_tiny_groups(name: str) -> None:
    x = np.zeros((4, 64), np.float32)
    x[1], x[2], x[3] = 0.5, -0.5, 1e-9
    got = quantize(x, FORMATS[name]).dequantize()
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, x, atol=0.5 * HALF)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_other_float_types(dtype: type, rng: np.random.Generator) -> None:
    x = rng.normal(0, 1, (8, 64)).astype(dtype)
    got, expected = quantize(x, FORMATS["q4_1"]), quantize(x.astype(np.float32), FORMATS["q4_1"])
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.scales, expected.scales)


@pytest.mark.parametrize("name", ["q4_1", "q4_0", "q8_0", "q4_128"])
def test_chunks_change_nothing(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = weight(rng)
    whole = quantize(x, FORMATS[name])
    monkeypatch.setattr(module, "_CHUNK", 3 * x.shape[1])
    parts = quantize(x, FORMATS[name])
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_array_equal(parts.scales, whole.scales)
    if whole.minimums is not None:
        np.testing.assert_array_equal(parts.minimums, whole.minimums)


def test_refusals() -> None:
    good = np.ones((2, 32), np.float32)
    with pytest.raises(CompileError, match="multiple of 32"):
        quantize(np.ones((2, 40), np.float32), FORMATS["q4_1"])
    with pytest.raises(CompileError, match="q6_k"):
        quantize(good, FORMATS["q6_k"])
    for bad in (np.nan, np.inf, 1e6):
        x = good.copy()
        x[1, 3] = bad
        with pytest.raises(CompileError, match="the weight holds"):
            quantize(x, FORMATS["q8_0"])


def test_command_line_names() -> None:
    assert {k: f.name for k, f in WEIGHT_CHOICES.items()} == {
        "q4": "q4_1", "q4-128": "q4_128", "q8": "q8_0", "fp8": "fp8"}
