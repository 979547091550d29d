"""Packing of weights for CUDA kernels, against the layout that packing.py describes; no compiler."""

from __future__ import annotations

import numpy as np
import pytest

from relaxpack.errors import CompileError
from relaxpack.schedules.kernels.cuda.packing import pack, row_order, weight_layout
from relaxpack.weight_format import FORMATS, QuantizedTensor


def quantized(name: str, n: int, k: int) -> QuantizedTensor:
    fmt = FORMATS[name]
    rng = np.random.default_rng(3)
    low, high = (0, 16) if fmt.bits == 4 else (-128, 128) if fmt.signed else (0, 32)
    codes = rng.integers(low, high, (n, k)).astype(np.int8 if fmt.signed else np.uint8)
    values = [rng.random((n, fmt.groups(k))).astype(fmt.scale_dtype) for _ in range(2)]
    zeros = rng.integers(0, 16, (n, fmt.groups(k))).astype(np.uint8) if fmt.zeros else None
    return QuantizedTensor(fmt, codes, values[0], values[1] if fmt.minimum == "stored" else None, zeros)


def unpacked(name: str, packed: dict[str, np.ndarray], n: int, k: int) -> np.ndarray:
    """Codes `[N, K]` read back by the documented formulas, one lane at a time."""
    fmt, chunks = FORMATS[name], -(-k // 64)
    out = np.zeros((-(-n // 16) * 16, chunks * 64), np.int64)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            strip, high, g = row // 16, row % 16 // 8, row % 8
            chunk, half, within = column // 64, column % 64 // 32, column % 32
            if fmt.group_size != 16:
                q, value = within // 8, within % 8
            else:
                q, value = within % 16 // 4, within // 16 * 4 + within % 4
            piece, lane = strip * chunks + chunk, 4 * g + q
            if fmt.bits == 4:
                word = int(packed["codes"][piece * 128 + lane * 4 + half * 2 + high])
                out[row, column] = word >> (4 * (value // 2) + 16 * (value % 2)) & 15
            else:
                word = int(packed["codes"][piece * 256 + half * 128 + lane * 4 + high * 2 + value // 4])
                byte = word >> (8 * (0, 2, 1, 3)[value % 4]) & 255
                out[row, column] = byte - 256 if fmt.signed and byte > 127 else byte
    return out


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "q6_k", "q5_1", "q4_128"])
@pytest.mark.parametrize(("n", "k"), [(32, 128), (24, 96)])
def test_codes_are_where_the_layout_says(name, n, k):
    weight = quantized(name, n, k)
    packed = pack(weight_layout(weight.format, n, k, False), weight)
    codes = unpacked(name, packed, n, k)
    assert np.array_equal(codes[:n, :k], weight.codes)
    assert not codes[n:].any() and not codes[:, k:].any()


@pytest.mark.parametrize("name", ["q4_1", "q6_k"])
def test_scales_follow_their_rows(name):
    weight = quantized(name, 24, 192)
    packed = pack(weight_layout(weight.format, 24, 192, False), weight)
    groups = 64 // weight.format.group_size
    scales = packed["scales"].reshape(2, 3, 8, 2, groups)
    for row in range(24):
        got = scales[row // 16, :, row % 8, row % 16 // 8].reshape(-1)
        assert np.array_equal(got, weight.scales[row])


@pytest.mark.parametrize("k", [384, 200])
def test_scales_and_zeros_share_words(k):
    weight = quantized("q4_128", 24, k)
    words = pack(weight_layout(weight.format, 24, k, False), weight)["scales"].reshape(2, -(-k // 128), 8, 2)
    for row in range(24):
        got = words[row // 16, :, row % 8, row % 16 // 8]
        assert np.array_equal((got & 0xFFFF).astype(np.uint16).view(np.float16), weight.scales[row])
        assert np.array_equal(got >> 16, weight.zeros[row])


def test_swiglu_interleaves_floats_and_codes_alike():
    plain = np.arange(32 * 64, dtype=np.float16).reshape(32, 64)
    packed = pack(weight_layout(FORMATS["f16"], 32, 64, True), plain)[""]
    assert np.array_equal(packed, plain[row_order(32, True)])
    weight = quantized("q4_0", 32, 64)
    codes = unpacked("q4_0", pack(weight_layout(weight.format, 32, 64, True), weight), 32, 64)
    assert np.array_equal(codes, weight.codes[row_order(32, True)])


def test_layouts_say_when_bytes_are_interchangeable():
    same = weight_layout(FORMATS["bf16"], 32, 64, False)
    assert same == weight_layout(FORMATS["bf16"], 32, 64, False)
    assert same != weight_layout(FORMATS["bf16"], 32, 64, True)


@pytest.mark.parametrize(("name", "n", "k", "gated", "says"), [
    ("bf16", 16, 60, False, "multiple of 8"), ("bf16", 24, 64, True, "multiple of 8"),
    ("bf16", 1 << 18, 1 << 13, False, "32-bit"), ("f32", 16, 64, False, "float32"), ("q4_0", 16, 40, False, "group size")])
def test_unserved_shapes_are_refused(name, n, k, gated, says):
    with pytest.raises(CompileError, match=says):
        weight_layout(FORMATS[name], n, k, gated)


def test_a_weight_of_the_wrong_shape_is_refused():
    with pytest.raises(CompileError, match="wants float16"):
        pack(weight_layout(FORMATS["f16"], 32, 64, False), np.zeros((16, 64), np.float16))
