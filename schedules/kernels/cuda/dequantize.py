"""From packed 4-bit, 8-bit and fp8 weights back to plain numbers: `eight_values` for one lane's share of a row, and the
kernel that unpacks a whole weight for the many-row matmul. The layout is explained in packing.py."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_fp8 import code_place
from relaxpack.schedules.kernels.cuda.codes_long import scale_place
from relaxpack.schedules.kernels.cuda.common import finish, fragment_sizes, optional, with_handles
from relaxpack.schedules.kernels.cuda.fragments import low, pack
from relaxpack.schedules.kernels.cuda.packing import scale_storage
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

STORE4, STORE2 = "st.global.v4.b32", "st.global.v2.b32"


def code_address(weight: WeightFormat, chunks: int, strip, chunk, half, lane, row):
    """Index of the first word that holds a lane's 8 codes of one row (`row` 0: g, 1: g + 8) and half chunk."""
    piece = strip * chunks + chunk
    if weight.bits == 4:
        return piece * 128 + lane * 4 + half * 2 + row
    if weight.e4m3:
        return piece * 256 + code_place(lane, row) + half * 2
    return piece * 256 + half * 128 + lane * 4 + row * 2


def scale_index(weight: WeightFormat, chunks: int, strip, chunk, half, g, row, second: int):
    """Index of the scale of a row's half chunk; `second` picks the second group of 16."""
    if weight.long_groups:
        return scale_place(weight, chunks, strip, chunk, g, row)
    groups = 64 // weight.group_size
    within = half if weight.group_size == 32 else half * 2 + second
    return (((strip * chunks + chunk) * 8 + g) * 2 + row) * groups + within


def value(weight: WeightFormat, codes, first, e, scale, minimum):
    """Number `e` (0..7) of a lane as float32 = scale * code + minimum, or scale * (code - minimum) where that is a zero."""
    if weight.bits == 4:
        code = (codes[first] >> T.Cast("uint32", e // 2 * 4 + e % 2 * 16)) & T.uint32(15)
        number = T.Cast("float32", T.Cast("int32", code) - (8 if weight.minimum == "-8*scale" else 0))
        number = number - minimum if weight.zeros else number
    else:
        byte = (codes[first + e // 4] >> T.Cast("uint32", e % 4 // 2 * 8 + e % 2 * 16)) & T.uint32(255)
        if weight.e4m3:     # float16 has the same fields; not float32, whose subnormals count as zero in CUDA's fast math
            bits = ((byte & T.uint32(0x80)) << T.uint32(8)) | ((byte & T.uint32(0x7F)) << T.uint32(7))
            number = low("float16", bits) * T.float32(256)
        elif weight.signed:
            number = T.Cast("float32", T.Cast("int32", byte ^ T.uint32(128)) - 128)
        else:
            number = T.Cast("float32", T.Cast("int32", byte))
    return number * scale + minimum if weight.minimum == "stored" else number * scale


def eight_values(weight: WeightFormat, chunks: int, dtype: str, factor: float = 1.0):
    """An inline that writes a lane's 8 values of one row and half chunk, times `factor`, to `target[index, :]`."""
    PACK, scaled, zeros = pack(dtype), factor != 1, weight.zeros

    @T.inline
    def run(codes, scales, minimums, word, pair, target, index, strip, chunk, half, lane, row, K):
        first = T.meta_var(code_address(weight, chunks, strip, chunk, half, lane, row))
        q = T.meta_var(lane % 4)
        g = T.meta_var(lane // 4)
        k = T.meta_var(chunk * 64 + half * 32)
        if weight.group_size != 16:
            at = T.meta_var(scale_index(weight, chunks, strip, chunk, half, g, row, 0))
            pair[0] = low("float16", scales[at]) if zeros else T.Cast("float32", scales[at])
            if zeros:
                pair[1] = T.Cast("float32", scales[at] >> T.uint32(16))
            if weight.minimum == "stored":
                pair[1] = T.Cast("float32", minimums[at])
            if scaled:
                pair[0] = pair[0] * T.float32(factor)
                if not zeros:
                    pair[1] = pair[1] * T.float32(factor)
            for e in T.unroll(4):
                T.ptx[PACK](word[e], value(weight, codes, first, e * 2 + 1, pair[0], pair[1]),
                            value(weight, codes, first, e * 2, pair[0], pair[1]))
            if k + q * 8 < K:
                T.ptx[STORE4](target.ptr_to([index, k + q * 8]), word[0], word[1], word[2], word[3])
        else:
            for d in T.unroll(2):
                at = T.meta_var(scale_index(weight, chunks, strip, chunk, half, g, row, d))
                pair[0] = T.Cast("float32", scales[at])
                if weight.minimum == "stored":
                    pair[1] = T.Cast("float32", minimums[at])
                if scaled:
                    pair[0] = pair[0] * T.float32(factor)
                    pair[1] = pair[1] * T.float32(factor)
                for e in T.unroll(2):
                    T.ptx[PACK](word[e], value(weight, codes, first, d * 4 + e * 2 + 1, pair[0], pair[1]),
                                value(weight, codes, first, d * 4 + e * 2, pair[0], pair[1]))
                if k + d * 16 + q * 4 < K:
                    T.ptx[STORE2](target.ptr_to([index, k + d * 16 + q * 4]), word[0], word[1])

    return run


def dequantize(N: int, K: int, weight: WeightFormat, dtype: str, *, name: str = "dequantize"):
    """PrimFunc codes, scales, [minimums] → plain `[N, K]` of `dtype`. One warp per 16 rows x 64 values."""
    strips, chunks = -(-N // 16), -(-K // 64)
    words, groups = fragment_sizes(weight, N, K)
    stored = weight.minimum == "stored"
    WARPS = 8
    run = eight_values(weight, chunks, dtype)

    @T.inline
    def bind(handles):
        codes = T.match_buffer(handles[0], (words,), "uint32", align=16)
        scales = T.match_buffer(handles[1], (groups,), scale_storage(weight), align=16)
        minimums = T.meta_var(optional(stored, "minimums", handles[2], (groups,), weight.scale_dtype))
        plain = T.match_buffer(handles[-1], (N, K), dtype, align=16)
        T.device_entry()
        bx = T.cta_id([T.int32(-(-strips * chunks // WARPS))])
        wid = T.warp_id([WARPS])
        tx = T.thread_id([WARPS * 32])
        lane = T.meta_var(tx % 32)
        word = T.alloc_buffer((4,), "uint32", scope="local")
        pair = T.alloc_buffer((2,), "float32", scope="local")
        piece = T.meta_var(bx * WARPS + wid)
        strip = T.meta_var(piece // chunks)
        if piece < strips * chunks:
            for half in T.unroll(2):
                for row in T.unroll(2):
                    n = T.meta_var(strip * 16 + row * 8 + lane // 4)
                    if n < N:
                        run(codes, scales, minimums, word, pair, plain, n, strip, piece % chunks, half, lane, row, K)

    return finish(with_handles(3 + stored, bind), name)
