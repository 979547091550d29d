"""float8 e4m3fn: what the codes mean, how numbers become codes, and both scale layouts, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from relaxpack.errors import CompileError
from relaxpack.relax_models.quantize import quantize, to_e4m3
from relaxpack.weight_format import BLOCK, E4M3, E4M3_LARGEST, FORMATS, QuantizedTensor

FP8, FP8_BLOCK = FORMATS["fp8"], FORMATS["fp8_block"]
CODES = np.arange(256, dtype=np.uint8)
FINITE = CODES[(CODES & 0x7F) != 0x7F]


def test_codes_mean_what_ml_dtypes_says() -> None:
    np.testing.assert_array_equal(E4M3, CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert np.isnan(E4M3).sum() == 2 and np.nanmax(E4M3) == E4M3_LARGEST
    assert E4M3[1] == 2.0 ** -9 and np.signbit(E4M3[0x80])
    np.testing.assert_array_equal(to_e4m3(E4M3[FINITE]), FINITE)


def test_rounding_is_to_the_nearest_even_and_saturates() -> None:
    positive = np.sort(E4M3[FINITE & 0x7F])[::2]     # both signs gave each twice
    middle = ((positive[1:] + positive[:-1]) / 2).astype(np.float32)
    codes = to_e4m3(middle)
    assert (codes % 2 == 0).all()                    # a tie goes to the even mantissa, across binades and in subnormals
    np.testing.assert_array_equal(to_e4m3(np.nextafter(middle, np.float32(0))), np.arange(len(middle)))
    np.testing.assert_array_equal(to_e4m3(np.nextafter(middle, np.float32(1e9))), np.arange(len(middle)) + 1)
    np.testing.assert_array_equal(E4M3[to_e4m3(np.array([448, 449, 480, 1e30, -1e30], np.float32))],
                                  [448, 448, 448, 448, -448])


@pytest.mark.parametrize("fmt", [FP8, FP8_BLOCK], ids=lambda f: f.name)
@pytest.mark.parametrize("columns", [64, 128, 300])
def test_error_is_half_a_step(rng: np.random.Generator, fmt: object, columns: int) -> None:
    x = (rng.standard_normal((20, columns)) * np.exp(2 * rng.standard_normal((20, 1)))).astype(np.float32)
    x[3], x[4, 5] = 0, 1e20
    got = quantize(x, fmt)  # type: ignore[arg-type]
    groups = 1 if fmt is FP8 else -(-columns // BLOCK)
    assert got.codes.shape == x.shape and got.scales.shape == (20, groups) and got.scales.dtype == np.float32
    scale = got.scales if fmt is FP8 else np.repeat(got.scales, BLOCK, axis=1)[:, :columns]
    error = np.abs(got.dequantize() - x)
    assert (error <= np.maximum(np.abs(x) * 2.0**-4, scale * 2.0**-10) * 1.0001).all()
    assert (got.dequantize()[3] == 0).all()
    assert got.dequantize()[4, 5] == pytest.approx(1e20)


def test_what_is_e4m3_already_keeps_its_codes(rng: np.random.Generator) -> None:
    """A power of two as scale, and a row that reaches the largest number."""
    codes = rng.choice(FINITE, (6, 300)).astype(np.uint8)
    codes[:, ::100] = 0x7E
    weight = QuantizedTensor(FP8, codes, np.exp2(rng.integers(-9, 5, (6, 1))).astype(np.float32))
    again = quantize(weight.dequantize(), FP8)
    np.testing.assert_array_equal(again.codes, codes)
    np.testing.assert_array_equal(again.scales, weight.scales)


def test_rows_do_not_depend_on_their_neighbours(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from relaxpack.relax_models import quantize as module

    x = rng.standard_normal((37, 200)).astype(np.float32)
    whole = quantize(x, FP8_BLOCK)
    monkeypatch.setattr(module, "_CHUNK", 900)
    parts = quantize(x, FP8_BLOCK)
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_array_equal(parts.scales, whole.scales)


def test_tiny_rows_vanish_and_numbers_beyond_float32_are_refused() -> None:
    x = np.full((2, 8), 1e-38, np.float32)
    assert (quantize(x, FP8).dequantize() == 0).all()
    for bad in (np.nan, np.inf):
        x[1, 3] = bad
        with pytest.raises(CompileError, match=f"the weight holds {bad}"):
            quantize(x, FP8)
    with pytest.raises(CompileError, match="two dimensions"):
        quantize(np.ones(8, np.float32), FP8)


def test_bytes_of_a_weight() -> None:
    assert FP8.bytes_per_weight() == 1 and FP8_BLOCK.bytes_per_weight() == 1 + 4 / 128
    assert FP8.quantized and FP8.groups(1000) == 1 and FP8_BLOCK.groups(1000) == 8
    assert not any(f.e4m3 for f in FORMATS.values() if f not in (FP8, FP8_BLOCK))
