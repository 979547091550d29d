"""Activations to float8 e4m3: x[t, K] → codes and a float32 scale for each row, for the matmul of both (gemm_many.py). A
block has a row, reads it once and keeps it in registers. The codes lie in the order of K of packed weights (packing.py).

    largest = max(|x[row]|, 2^-110)    scale = largest / 448    code = e4m3(x * (448 / largest)), nearest even

in float32, divisions rounded. So a row of zeros has codes of zero, and a row with a NaN or an infinity gives NaN.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import finish, with_handles
from relaxpack.schedules.kernels.cuda.fragments import high, low, shuffle_xor
from tvm.script import tirx as T

LARGEST_CODE, SMALLEST = 448.0, 2.0 ** -110     # 448 / SMALLEST and SMALLEST / 448 are normal numbers
LOAD, STORE = "ld.global.v4.b32", "st.global.v4.b32"
TO_E4M3 = "cvt.rn.satfinite.e4m3x2.f32"         # the second number in the lower byte
PIECE = 16                                      # numbers of a thread: 8 of either half of 64
MOST_THREADS, MOST_PIECES = 512, 8


def can_quantize(K: int) -> bool:
    return padded_columns(K) // PIECE <= MOST_THREADS * MOST_PIECES


def padded_columns(K: int) -> int:
    return -(-K // 64) * 64


def quantize_rows(K: int, dtype: str, *, dependent_launch: bool = False, name: str = "quantize_rows"):
    """PrimFunc x I`[t, K]` → codes u8`[t, K padded to 64]`, scales f32`[t]`. K is a multiple of 8."""
    assert K % 8 == 0 and can_quantize(K)
    PADDED = padded_columns(K)
    PIECES = PADDED // PIECE
    THREADS = min(MOST_THREADS, -(-PIECES // 32 // 2) * 32)
    ROUNDS, WARPS = -(-PIECES // THREADS), THREADS // 32
    exact, whole = PIECES % THREADS == 0, K % 64 == 0

    @T.inline
    def bind(handles):
        t = T.int64()
        x = T.match_buffer(handles[0], (t, K), dtype, align=16)
        codes = T.match_buffer(handles[1], (t, PADDED), "uint8", align=16)
        scales = T.match_buffer(handles[2], (t,), "float32", align=16)
        T.device_entry()
        row = T.cta_id([T.Cast("int32", t)])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        of_warps = pool.alloc((max(WARPS, 4),), "float32", align=16)
        pool.commit()
        w = T.alloc_buffer((ROUNDS * 8,), "uint32", scope="local")
        out = T.alloc_buffer((4,), "uint32", scope="local")
        pair = T.alloc_buffer((2,), "uint16", scope="local")
        largest = T.alloc_buffer((1,), "float32", scope="local")
        number = T.alloc_buffer((2,), "float32", scope="local")
        if dependent_launch:
            T.ptx["griddepcontrol.launch_dependents"]()     # it waits for this kernel, which ends after its own wait
            T.ptx["griddepcontrol.wait"]()
        largest[0] = T.float32(SMALLEST)
        for r in T.unroll(ROUNDS):
            piece = T.meta_var(r * THREADS + tx)
            for half in T.unroll(2):
                k = T.meta_var(piece // 4 * 64 + half * 32 + piece % 4 * 8)
                o = T.meta_var(r * 8 + half * 4)
                for e in T.unroll(4):
                    w[o + e] = T.uint32(0)
                if T.bool(True) if exact and whole else k < K:
                    T.ptx[LOAD](w[o], w[o + 1], w[o + 2], w[o + 3], x.ptr_to([row, k]))
        for i in T.unroll(ROUNDS * 8):
            largest[0] = T.max(largest[0], T.max(T.abs(low(dtype, w[i])), T.abs(high(dtype, w[i]))))
        for e in T.unroll(5):
            largest[0] = T.max(largest[0], shuffle_xor(largest[0], T.shift_left(1, e)))
        if WARPS > 1:
            if tx % 32 == 0:
                of_warps[tx // 32] = largest[0]
            T.cuda.cta_sync()
            for e in T.unroll(WARPS):
                largest[0] = T.max(largest[0], of_warps[e])
        T.ptx["div.rn.f32"](number[0], T.float32(LARGEST_CODE), largest[0])
        if tx == 0:
            T.ptx["div.rn.f32"](number[1], largest[0], T.float32(LARGEST_CODE))
            scales[row] = number[1]
        for r in T.unroll(ROUNDS):
            piece = T.meta_var(r * THREADS + tx)
            for i in T.unroll(4):                   # numbers 0, 2, 1, 3 of four in bytes 0 .. 3
                first = T.meta_var(w[r * 8 + i * 2])
                second = T.meta_var(w[r * 8 + i * 2 + 1])
                T.ptx[TO_E4M3](pair[0], low(dtype, second) * number[0], low(dtype, first) * number[0])
                T.ptx[TO_E4M3](pair[1], high(dtype, second) * number[0], high(dtype, first) * number[0])
                out[i] = T.Cast("uint32", pair[0]) | (T.Cast("uint32", pair[1]) << T.uint32(16))
            if T.bool(True) if exact else piece < PIECES:
                T.ptx[STORE](codes.ptr_to([row, piece * PIECE]), out[0], out[1], out[2], out[3])

    return finish(with_handles(3, bind), name, dependent_launch)
