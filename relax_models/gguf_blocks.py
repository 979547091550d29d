"""GGUF block formats, decoded losslessly into canonical `QuantizedTensor`s (or plain float arrays).

Source of the layouts: the block structs documented by ggml (`block_q4_0` ... `block_q6_K`). Integers and scales are
kept as stored; nothing is dequantised. Reading files is `gguf_file.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from relaxpack.weight_format import FORMATS, QuantizedTensor, WeightFormat

Blocks = np.ndarray  # uint8 [rows, blocks per row, bytes per block]


@dataclass(frozen=True)
class GgmlType:
    """`block` weights take `size` bytes."""

    name: str
    format: WeightFormat
    block: int
    size: int


# By the type number in the file.
GGML_TYPES = {number: GgmlType(name, FORMATS[name.lower()], block, size) for number, name, block, size in (
    (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2),
    (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34),
    (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210),
)}

# Named in errors; not read.
UNSUPPORTED_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}

_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def decode(kind: GgmlType, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | QuantizedTensor:
    """`data`: uint8 vector of exactly this tensor's bytes; `shape` in numpy order, last axis contiguous."""
    if kind.name in _FLOATS:
        array = data.view(_FLOATS[kind.name]).reshape(shape)
        return array if array.flags.aligned else array.copy()
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    codes, scales, minimums = _DECODERS[kind.name](data.reshape(rows, columns // kind.block, kind.size))
    groups = (rows, columns // kind.format.group_size)
    return QuantizedTensor(kind.format, np.ascontiguousarray(codes.reshape(rows, columns)), scales.reshape(groups),
                           None if minimums is None else minimums.reshape(groups))


Decoded = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes, scales, minimums


def _half(blocks: Blocks, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, `[rows, blocks]`."""
    return np.ascontiguousarray(blocks[..., at:at + 2]).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Along the last axis: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: Blocks, at: int) -> np.ndarray:
    """The 32 high bits of a 5-bit block, as 0 or 16 per weight."""
    return np.unpackbits(blocks[..., at:at + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Blocks) -> Decoded:
    return _nibbles(blocks[..., 2:]), _half(blocks, 0), None


def _q4_1(blocks: Blocks) -> Decoded:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Decoded:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return codes.view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Blocks) -> Decoded:
    return _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Decoded:
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0), None


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes -> 8 six-bit sub-scales and 8 six-bit sub-minimums of a K super-block."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales, minimums


def _k_scales(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """float32 `[rows, blocks, 8]`: an 11-bit significand times 6 bits is exact in float32."""
    scales, minimums = _six_bit_pairs(blocks[..., 4:16])
    scale, minimum = (_half(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    return scale * scales, -(minimum * minimums)


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """128 bytes -> 8 groups of 32: each run of 32 bytes holds one group low and the next one high."""
    runs = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _q4_k(blocks: Blocks) -> Decoded:
    return _k_nibbles(blocks[..., 16:]), *_k_scales(blocks)


def _q5_k(blocks: Blocks) -> Decoded:
    # Byte l of the 32 high bytes holds bit g of weight l of group g.
    high = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _k_nibbles(blocks[..., 48:]) | (high << np.uint8(4)), *_k_scales(blocks)


def _q6_k(blocks: Blocks) -> Decoded:
    # Per half of 128 weights: 64 bytes of low nibbles, 32 bytes with four 2-bit high parts.
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*blocks.shape[:-1], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    sub_scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return codes, _half(blocks, 208).astype(np.float32)[..., None] * sub_scales, None


_DECODERS: dict[str, Callable[[Blocks], Decoded]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
