"""Packed CPU weights hold every stored number at the documented byte, and nothing is compiled to find that out."""

from __future__ import annotations

import numpy as np
import pytest

from relaxpack.errors import CompileError
from relaxpack.schedules.kernels.cpu.layout import OFFSETS, bfloat16_bits, pack, weight_layout
from relaxpack.weight_format import FORMATS, QuantizedTensor

FLOATS = [name for name, f in FORMATS.items() if not f.quantized]
QUANTIZED = [name for name, f in FORMATS.items() if f.quantized and not f.long_groups]


def quantized(name: str, n: int, k: int) -> QuantizedTensor:
    fmt, rng = FORMATS[name], np.random.default_rng(1)
    low, high = {"q5_0": (-16, 15), "q6_k": (-32, 31), "q8_0": (-128, 127)}.get(name, (0, 15 if fmt.bits == 4 else 31))
    shape = (n, k // fmt.group_size)
    return QuantizedTensor(fmt, rng.integers(low, high, (n, k), endpoint=True).astype("int8" if fmt.signed else "uint8"),
                           rng.standard_normal(shape).astype(fmt.scale_dtype),
                           rng.standard_normal(shape).astype(fmt.scale_dtype) if fmt.minimum == "stored" else None)


def place(row: int, n: int, gate_up: bool) -> tuple[int, int, int]:
    """Panel, half and lane of canonical row `row`, by the rule in the layout's docstring."""
    if not gate_up:
        return row // 32, row % 32 // 16, row % 16
    half, row = divmod(row, n // 2)
    return row // 16, half, row % 16


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_bytes(name: str, gate_up: bool) -> None:
    n, k = 42, 64
    weight = quantized(name, n, k)
    fmt = weight.format
    packed = pack(weight_layout(fmt, n, k, gate_up), weight)[""]
    code_bytes, width = 16 * fmt.group_size * fmt.bits // 8, np.dtype(fmt.scale_dtype).itemsize
    for row in (0, 1, 15, 16, 20, 21, 31, 32, 41):
        panel, half, lane = place(row, n, gate_up)
        for column in range(k):
            record, i = packed[panel, column // fmt.group_size, half], column % fmt.group_size
            if fmt.bits == 4:
                code = record[i // 8 * 64 + lane * 4 + i % 4] >> (4 if i % 8 >= 4 else 0) & 15
            else:
                code = record[i // 4 * 64 + lane * 4 + i % 4]
            assert int(code) == int(weight.codes[row, column]) + (OFFSETS[name] if fmt.signed else 0)
        for which, table in enumerate([weight.scales, weight.minimums]):
            if table is not None:
                at = code_bytes + which * 16 * width + lane * width
                stored = packed[panel, :, half, at:at + width].copy().view(fmt.scale_dtype)[:, 0]
                np.testing.assert_array_equal(stored, table[row])


def test_zeros_become_minimums_of_short_groups() -> None:
    """Without loss, the last group of a row may be short."""
    fmt, rng = FORMATS["q4_128"], np.random.default_rng(4)
    codes, zeros = (rng.integers(0, 16, (42, columns)).astype("uint8") for columns in (224, 2))
    weight = QuantizedTensor(fmt, codes, rng.standard_normal((42, 2)).astype("float16"), zeros=zeros)
    short = weight.in_groups_of_32()
    np.testing.assert_array_equal(short.dequantize(), weight.dequantize())
    layout = weight_layout(fmt, 42, 224, True)
    assert layout == weight_layout(FORMATS["q4_k"], 42, 224, True) and short.scales.shape == (42, 7)
    np.testing.assert_array_equal(pack(layout, weight)[""], pack(layout, short)[""])


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("name", FLOATS)
def test_float_panels(name: str, gate_up: bool) -> None:
    n, k = 42, 7
    weight = np.random.default_rng(2).standard_normal((n, k)).astype("float32")
    stored = {"f32": weight, "f16": weight.astype("float16"), "bf16": bfloat16_bits(weight)}[name]
    packed = pack(weight_layout(FORMATS[name], n, k, gate_up), weight)[""]
    for row in range(n):
        panel, half, lane = place(row, n, gate_up)
        np.testing.assert_array_equal(packed[panel, :, half * 16 + lane], stored[row])


def test_rows_beyond_the_last_are_zero() -> None:
    weight = np.ones((33, 8), "float32")
    packed = pack(weight_layout(FORMATS["f32"], 33, 8, False), weight)[""]
    assert packed.shape == (2, 8, 32)
    assert packed[1, :, 0].all() and not packed[1, :, 1:].any()


def test_bfloat16_rounds_to_nearest_even_and_takes_bits_as_they_are() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5], "float32")  # the middle two lie between two bfloat16
    assert bfloat16_bits(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020]
    bits = np.array([0x3F80, 0x7F80], "uint16")
    assert bfloat16_bits(bits) is bits


def test_layouts_are_equal_exactly_when_bytes_are_interchangeable() -> None:
    def of(name: str, gated: bool) -> object:
        return weight_layout(FORMATS[name], 64, 64, gated)

    assert of("q8_0", False) == of("q8_0", False)
    assert of("q8_0", False) != of("q8_0", True)
    assert of("q4_0", False) != of("q5_0", False)
    assert of("q5_0", False) != of("q8_0", False)  # same shape, other offset


def test_bad_weights_are_refused() -> None:
    with pytest.raises(CompileError, match="80 input features"):
        weight_layout(FORMATS["q4_0"], 64, 80, False)
    with pytest.raises(CompileError, match="must be even, got 63"):
        weight_layout(FORMATS["f32"], 63, 64, True)
    weight = quantized("q5_0", 32, 32)
    weight.codes[3, 4] = 16
    with pytest.raises(CompileError, match=r"-16\.\.15, got -16\.\.16"):
        pack(weight_layout(weight.format, 32, 32, False), weight)
