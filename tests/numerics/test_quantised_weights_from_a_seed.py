"""The weights that GPU benchmarks draw in place of a checkpoint's: packing what they stand for gives the buffers back."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu.quantised_weights import DEVIATION, make
from relaxpack.schedules.kernels.cuda.packing import _pack_groups, pack, row_order, weight_layout
from relaxpack.weight_format import E4M3, FORMATS, QuantizedTensor, WeightFormat


def unpacked(fmt: WeightFormat, buffers: dict[str, np.ndarray], n: int, k: int, gated: bool) -> QuantizedTensor:
    """What packs to these buffers, found by packing the number of every place."""
    def places(dtype: type, columns: int, planes: int, read) -> np.ndarray:
        index = np.arange(n * columns, dtype=np.uint32).reshape(n, columns)
        return sum(read((index >> fmt.bits * p & (1 << fmt.bits) - 1).astype(dtype)).astype(np.int64) << fmt.bits * p
                   for p in range(planes))

    def codes_of(words: np.ndarray) -> np.ndarray:
        bits = words.view(np.uint8)
        return np.stack([bits & 15, bits >> 4], -1).reshape(-1) if fmt.bits == 4 else bits

    layout = weight_layout(fmt, n, k, gated)
    few = np.zeros((n, fmt.groups(k)))
    blank = {"scales": few.astype(fmt.scale_dtype),
             "minimums": few.astype(fmt.scale_dtype) if "minimums" in buffers else None,
             "zeros": few.astype(np.uint8) if fmt.zeros else None}
    order = places(np.uint8, k, -(-(n * k).bit_length() // fmt.bits), lambda codes: codes_of(pack(layout, QuantizedTensor(
        fmt, codes.view(np.int8 if fmt.signed else np.uint8), **blank))["codes"]))
    codes = np.empty(n * k, np.uint8)
    codes[order] = codes_of(buffers["codes"])
    index = np.arange(n * fmt.groups(k)).reshape(n, -1)[row_order(n, gated)]
    where = _pack_groups(fmt, index)

    def grouped(values: np.ndarray) -> np.ndarray:
        found = np.empty_like(values)
        found[where] = values
        return found.reshape(n, -1)

    scales, zeros = buffers["scales"], None
    if fmt.zeros:
        zeros, scales = grouped((scales >> 16).astype(np.uint8)), (scales & 0xFFFF).astype(np.uint16).view(np.float16)
    return QuantizedTensor(fmt, codes.reshape(n, k).view(np.int8 if fmt.signed else np.uint8), grouped(scales),
                           grouped(buffers["minimums"]) if "minimums" in buffers else None, zeros)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q4_k", "q4_128", "q8_0", "fp8", "fp8_block"])
def test_they_are_what_they_stand_for(name: str, gated: bool) -> None:
    fmt, n, k = FORMATS[name], 32, 320
    buffers, plain = make(fmt, n, k, gated, torch.Generator("cpu").manual_seed(1))
    arrays = {key: value.numpy().view(np.uint32) if value.dtype == torch.int32 else value.numpy()
              for key, value in buffers.items()}
    assert {key: (array.shape, str(array.dtype)) for key, array in arrays.items()} == {
        suffix: (shape, dtype) for suffix, shape, dtype in weight_layout(fmt, n, k, gated).buffers}
    weight = unpacked(fmt, arrays, n, k, gated)
    for suffix, array in pack(weight_layout(fmt, n, k, gated), weight).items():
        np.testing.assert_array_equal(array, arrays[suffix])
    np.testing.assert_allclose(plain.numpy(), weight.dequantize(), rtol=1e-6, atol=1e-9)
    assert not fmt.e4m3 or not np.isnan(E4M3[weight.codes.view(np.uint8)]).any()
    assert 0.7 < plain.std() / DEVIATION < 1.5


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="q6_k"):
        make(FORMATS["q6_k"], 32, 64, False, torch.Generator("cpu"))
    with pytest.raises(ValueError, match="40 x 64"):
        make(FORMATS["q8_0"], 40, 64, False, torch.Generator("cpu"))
