"""Every GGUF block format, decoded into canonical form, against the gguf package's own dequantisation."""

from __future__ import annotations

import numpy as np
import pytest

from relaxpack.relax_models.gguf_blocks import GGML_TYPES, decode
from relaxpack.weight_format import QuantizedTensor

gguf = pytest.importorskip("gguf", reason="reference decoder: pip install relaxpack[gguf]")
from gguf.quants import dequantize, quantize

from tests.helpers.tiny_gguf import K_QUANTS, random_k_blocks

ROWS, COLUMNS = 24, 512
BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}
QUANTIZED = [name for name, kind in BY_NAME.items() if kind.format.quantized]


def make_blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """uint8 `[rows, bytes]`; extreme groups included: zeros, one value, large and tiny scales."""
    number = getattr(gguf.GGMLQuantizationType, name)
    if number in K_QUANTS:
        return random_k_blocks(number, ROWS, COLUMNS)
    values = rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
    values[0], values[1], values[2] = 0, 0.75, values[2] * 1e3
    values[3] *= 1e-4
    return quantize(values, number)


@pytest.mark.parametrize("name", QUANTIZED)
def test_equals_reference_bit_for_bit(name: str, rng: np.random.Generator) -> None:
    """Products of the stored integers and scales are exact in float32 and each side rounds the one addition alike, so
    no tolerance is needed."""
    blocks = make_blocks(name, rng)
    reference = dequantize(blocks, getattr(gguf.GGMLQuantizationType, name))
    got = decode(BY_NAME[name], blocks.reshape(-1), (ROWS, COLUMNS))
    assert isinstance(got, QuantizedTensor) and got.shape == (ROWS, COLUMNS)
    assert np.isfinite(reference).all() and np.ptp(reference) > 0
    np.testing.assert_array_equal(got.dequantize(), reference)


@pytest.mark.parametrize("name", QUANTIZED)
def test_canonical_form(name: str, rng: np.random.Generator) -> None:
    kind = BY_NAME[name]
    got = decode(kind, make_blocks(name, rng).reshape(-1), (ROWS, COLUMNS))
    assert isinstance(got, QuantizedTensor)
    f = kind.format
    width = {"Q4": 16, "Q5": 32, "Q6": 64, "Q8": 256}[name[:2]]
    low = -width // 2 if f.signed else 0
    assert got.codes.dtype == (np.int8 if f.signed else np.uint8)
    assert low <= got.codes.min() and got.codes.max() < low + width
    assert got.scales.dtype == np.dtype(f.scale_dtype) and got.scales.shape == (ROWS, COLUMNS // f.group_size)
    assert (got.minimums is not None) == (f.minimum == "stored")
    if got.minimums is not None:
        assert got.minimums.dtype == np.dtype(f.scale_dtype) and got.minimums.shape == got.scales.shape


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats(name: str, rng: np.random.Generator) -> None:
    values = rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
    data = quantize(values, getattr(gguf.GGMLQuantizationType, name)).view(np.uint8).reshape(-1)
    got = decode(BY_NAME[name], data, (ROWS, COLUMNS))
    assert isinstance(got, np.ndarray) and got.dtype.name == BY_NAME[name].format.dtype
    reference = dequantize(data.reshape(ROWS, -1), getattr(gguf.GGMLQuantizationType, name))
    np.testing.assert_array_equal(got.astype(np.float32), reference)


def test_unaligned_floats_are_copied(rng: np.random.Generator) -> None:
    values = rng.normal(0, 1, 8).astype(np.float32)
    data = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:]
    got = decode(BY_NAME["F32"], data, (8,))
    assert isinstance(got, np.ndarray) and got.flags.aligned
    np.testing.assert_array_equal(got, values)
