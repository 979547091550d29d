"""Weight layouts of the CUDA kernels and their packers (NumPy, at build time). No kernels here.

Float weights stay `[N, K]` row-major; only gate and up rows of a gated linear unit are interleaved in blocks of 8, so that
one thread of every kernel holds both. Quantised weights become tensor-core fragments, in pieces of 16 rows x 64 values of K
(N and K padded with zeros): lane 4g+q of a warp owns rows g and g+8 and, of each half of 32 values, the 8 values at

    groups of 32: 8q .. 8q+7            groups of 16: 4q .. 4q+3 and 16+4q .. 16+4q+3

    codes, 4 bits  u32[N/16, K/64, lane 32, half 2, row 2]           value 2p at bits 4p, 2p+1 at bits 16+4p
    codes, 8 bits  u32[N/16, K/64, half 2, lane 32, row 2, word 2]   values 0, 2, 1, 3 in bytes 0 .. 3
    scales, minimums  [N/16, K/64, g 8, row 2, group]                of the format's scale dtype

fp8 keeps the values of a lane and row together, where wgmma can read them from shared memory: blocks of 8 rows x 64 bytes
with that instruction's 64-byte swizzle.

    codes, fp8     u32[N/16, K/64, row 2, g 8, q ^ g/2 % 4, half 2, word 2]     values 0, 2, 1, 3 in bytes 0 .. 3

Scales of formats with long groups (fp8, fp8_block, q4_128) are [N/16, G, g 8, row 2] with G = 1 for whole rows and K/128
(rounded up) for groups of 128: f32, or for q4_128 u32 words of the float16 scale and, in the upper half, the zero. The codes
of q4_128 are in the first order.
"""

from __future__ import annotations

import numpy as np

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import WeightLayout
from relaxpack.weight_format import QuantizedTensor, WeightFormat


def weight_layout(weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
    """The one layout that all CUDA kernels read. Raises CompileError for shapes that no kernel serves."""
    n, k = out_features, in_features
    if k % 8:
        raise CompileError(f"a CUDA matmul needs in_features to be a multiple of 8 (16-byte loads), got {k}")
    if gated and n % 16:
        raise CompileError(f"gate and up rows must each be a multiple of 8, got {n // 2}")
    if n * k >= 1 << 31:
        raise CompileError(f"a weight of {n} x {k} values is too large for 32-bit indices in CUDA kernels")
    suffix = "_gate8" if gated else ""
    if not weight.quantized:
        if weight.name == "f32":
            raise CompileError("CUDA kernels have no float32 weights: build with weights in bf16 or f16")
        return WeightLayout(f"cuda.rows_{weight.name}{suffix}", (("", (n, k), weight.dtype),))
    strips, chunks = -(-n // 16), -(-k // 64)
    if not weight.long_groups and (weight.group_size not in (16, 32) or k % weight.group_size):
        raise CompileError(f"weight format {weight.name}: in_features {k} is not a multiple of its group size "
                           f"{weight.group_size}" if weight.group_size in (16, 32) else
                           f"weight format {weight.name}: group size {weight.group_size} has no CUDA kernel")
    words = strips * chunks * 1024 * weight.bits // 32
    groups = strips * 16 * weight.groups(k) if weight.long_groups else strips * chunks * 1024 // weight.group_size
    buffers: list[tuple[str, tuple[int, ...], str]] = [("codes", (words,), "uint32"),
                                                       ("scales", (groups,), scale_storage(weight))]
    if weight.minimum == "stored":
        buffers.append(("minimums", (groups,), weight.scale_dtype))
    return WeightLayout(f"cuda.fragments_{weight.name}_{n}x{k}{suffix}", tuple(buffers))


def scale_storage(weight: WeightFormat) -> str:
    """dtype of the buffer with scales."""
    return "uint32" if weight.zeros else weight.scale_dtype


def pack(layout: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
    """Canonical `[N, K]` weight → buffers by suffix, for a layout that `weight_layout` returned."""
    gated = layout.name.endswith("_gate8")
    if isinstance(weight, QuantizedTensor):
        order = row_order(weight.shape[0], gated)
        scales = weight.scales
        if weight.zeros is not None:
            scales = scales.view(np.uint16) | weight.zeros.astype(np.uint32) << 16
        packed = {"codes": pack_codes(weight.format, weight.codes[order]),
                  "scales": _pack_groups(weight.format, scales[order])}
        if weight.minimums is not None:
            packed["minimums"] = _pack_groups(weight.format, weight.minimums[order])
    else:
        packed = {"": np.ascontiguousarray(weight[row_order(weight.shape[0], True)] if gated else weight)}
    for suffix, shape, dtype in layout.buffers:
        array = packed[suffix]
        if array.shape != shape or str(array.dtype) != dtype:
            raise CompileError(f"layout {layout.name} wants {dtype}{list(shape)} for {suffix or 'the weight'}, the packed "
                               f"weight is {array.dtype}{list(array.shape)}")
    return packed


def row_order(rows: int, gated: bool) -> np.ndarray:
    """Source row of each packed row: gate rows then up rows become blocks of 8 gate rows and their 8 up rows."""
    index = np.arange(rows)
    return index.reshape(2, rows // 16, 8).transpose(1, 0, 2).reshape(-1) if gated else index


def _pieces(array: np.ndarray, columns: int) -> np.ndarray:
    """`[N, C]` → `[N/16, C/columns, row 2, g 8, columns]`, padded with zeros."""
    n, c = array.shape
    array = np.pad(array, ((0, -n % 16), (0, -c % columns)))
    strips, chunks = array.shape[0] // 16, array.shape[1] // columns
    return array.reshape(strips, 2, 8, chunks, columns).transpose(0, 3, 1, 2, 4)


def pack_codes(weight: WeightFormat, codes: np.ndarray) -> np.ndarray:
    """Codes `[N, K]` → uint32 words in fragment order."""
    pieces = _pieces(codes.view(np.uint8), 64)                       # [strip, chunk, row, g, 64]
    strips, chunks = pieces.shape[:2]
    if weight.group_size != 16:
        lanes = pieces.reshape(strips, chunks, 2, 8, 2, 4, 8)        # ..., half, q, value
    else:
        lanes = pieces.reshape(strips, chunks, 2, 8, 2, 2, 4, 4).transpose(0, 1, 2, 3, 4, 6, 5, 7)
        lanes = lanes.reshape(strips, chunks, 2, 8, 2, 4, 8)
    # value order as the axes (strip, chunk, half, g, q, row, value)
    lanes = lanes.transpose(0, 1, 4, 3, 5, 2, 6).astype(np.uint32)
    if weight.bits == 4:
        shifts = np.array([4 * (v // 2) + 16 * (v % 2) for v in range(8)], np.uint32)
        words = np.bitwise_or.reduce(lanes << shifts, axis=-1)       # [strip, chunk, half, g, q, row]
        return np.ascontiguousarray(words.transpose(0, 1, 3, 4, 2, 5)).reshape(-1)
    shifts = np.array([0, 16, 8, 24], np.uint32)
    words = np.bitwise_or.reduce(lanes.reshape(*lanes.shape[:-1], 2, 4) << shifts, axis=-1)
    if weight.e4m3:
        words = words.transpose(0, 1, 5, 3, 4, 2, 6)                 # [strip, chunk, row, g, q, half, word]
        places = np.arange(4) ^ np.arange(8)[:, None] // 2 % 4
        words = np.take_along_axis(words, places[None, None, None, :, :, None, None], axis=4)
    return np.ascontiguousarray(words).reshape(-1)                   # [strip, chunk, half, g, q, row, word]


def _pack_groups(weight: WeightFormat, values: np.ndarray) -> np.ndarray:
    """Scales or minimums `[N, K / group]` → fragment order."""
    pieces = _pieces(values, 1 if weight.long_groups else 64 // weight.group_size)   # [strip, chunk, row, g, group]
    return np.ascontiguousarray(pieces.transpose(0, 1, 3, 2, 4)).reshape(-1)
