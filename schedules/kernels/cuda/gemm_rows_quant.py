"""Few-row matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit, 8-bit and fp8 weights on mma.m16n8k16 (sm_80 and newer). Codes are
read once, turned into exact small integers (fp8: the numbers themselves) in registers and multiplied there; scales and
minimums are applied to the float32 sums of each group, so nothing is rounded that the format does not round.

The weight comes in fragments (see packing.py): for each 16 rows x 64 values of K, lane 4g+q holds the codes of rows g and
g+8 at those K that it also loads of x, 16 bytes per lane for 4-bit codes.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_fp8 import codes_of
from relaxpack.schedules.kernels.cuda.common import finish, mma_name, quant_entry
from relaxpack.schedules.kernels.cuda.rows_epilogue import RowsEpilogue
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

LOAD_X4, LOAD_X2 = "ld.global.v4.b32", "ld.global.v2.b32"


def gemm_rows_quant(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 8,
                    strips: int = 1, warps: int = 8, unroll: int = 2, ahead: bool = False, blocks_per_sm: int = 0,
                    bias: bool = False, residual: bool = False, glu: str | None = None, norm_epsilon: float | None = None,
                    prepares_norm: bool = False, dependent_launch: bool = False, convert: bool = False,
                    name: str = "gemm_rows_quant"):
    """Buffers: x `[t, K]`, weight codes, scales, [minimums] as packing.py lays them out, [bias], [residual] → y. Arguments
    as in gemm_rows; convert: the GPU has an instruction from fp8. N and K of the packed weight are rounded up to 16 and 64
    with zeros."""
    assert K % 8 == 0 and columns % 8 == 0
    STRIPS, KC = -(-N // 16), -(-K // 64)           # strips of 16 rows, chunks of 64
    F = codes_of(weight, dtype, KC, convert)
    NT, W, U = columns // 8, warps, unroll
    BM = 16 * strips
    rounds = -(-KC // (W * U))
    exact = K % 64 == 0 and KC % (W * U) == 0
    strips_exact = STRIPS % strips == 0
    MMA = mma_name(dtype)
    limited = blocks_per_sm > 0
    OUT = N // 2 if glu else N
    E = RowsEpilogue(N, K, dtype, out_dtype, columns=columns, strips=strips, warps=warps, bias=bias, residual=residual,
                     glu=glu, norm_epsilon=norm_epsilon, prepares_norm=prepares_norm)
    PITCH, prefetch, request, scale, store = E.pitch, E.prefetch, E.request, E.scale, E.store
    CW, SW, ACC = F.words, F.scale_words, strips * NT * 4
    REG_C, REG_S, SETS = U * strips * CW, U * strips * SW, 2 if ahead else 1
    stored, wide, one = F.stored, F.wide, F.one
    load_piece, decode = F.load, F.decode

    @T.inline
    def body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t, norm=None):
        T.device_entry()
        if limited:
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": blocks_per_sm})
        bx, by = T.cta_id([T.int32(-(-STRIPS // strips)), T.Cast("int32", T.ceildiv(t, columns))])
        wid = T.warp_id([W])
        tx = T.thread_id([W * 32])
        lane = T.meta_var(tx % 32)
        g = T.meta_var(lane // 4)
        q = T.meta_var(lane % 4)
        pool = T.SMEMPool()
        partial = pool.alloc((W, columns * PITCH), "float32", align=16)
        scales_of_rows = T.meta_var(E.alloc_scales(pool))
        pool.commit()
        held = T.alloc_buffer((E.held,), "uint32", scope="local")
        squares = T.alloc_buffer((E.squares,), "uint32", scope="local")
        c = T.alloc_buffer((SETS * REG_C,), "uint32", scope="local")
        sc = T.alloc_buffer((SETS * REG_S,), "uint32", scope="local")
        mn = T.alloc_buffer((SETS * REG_S if stored else 1,), "uint32", scope="local")
        v = T.alloc_buffer((8 * NT * U,), "uint32", scope="local")
        a = T.alloc_buffer((9,), "uint32", scope="local")
        part = T.alloc_buffer((4,), "float32", scope="local")
        sums = T.alloc_buffer((NT * 4,), "float32", scope="local")
        acc = T.alloc_buffer((ACC,), "float32", scope="local")
        total = T.alloc_buffer((3,), "float32", scope="local")
        rows = T.meta_var(T.Cast("int32", t))

        @T.inline
        def load(r, slot):
            """Codes and scales of round r into register set `slot`."""
            for u in T.unroll(U):
                chunk = T.meta_var((r * U + u) * W + wid)
                for s in T.unroll(strips):
                    strip = T.meta_var(bx * strips + s)
                    load_piece(c, slot * REG_C + (u * strips + s) * CW, sc, mn, slot * REG_S + (u * strips + s) * SW,
                               codes, scales, minimums, strip, chunk, lane,
                               T.bool(True) if exact and strips_exact else T.And(chunk < KC, strip < STRIPS))

        @T.inline
        def load_x(r):
            """Rows that are not there stay zero."""
            for u in T.unroll(U):
                chunk = T.meta_var((r * U + u) * W + wid)
                for n in T.unroll(NT):
                    for j in T.unroll(2):
                        m = T.meta_var(by * columns + n * 8 + g)
                        o = T.meta_var(((u * NT + n) * 2 + j) * 4)
                        if not exact:
                            for e in T.unroll(4):
                                v[o + e] = T.uint32(0)
                        if wide:
                            k = T.meta_var(chunk * 64 + j * 32 + q * 8)
                            if T.And(m < rows, T.bool(True) if exact else k < K):
                                T.ptx[LOAD_X4](v[o], v[o + 1], v[o + 2], v[o + 3], x.ptr_to([m, k]))
                        else:
                            for p in T.unroll(2):
                                k = T.meta_var(chunk * 64 + j * 32 + p * 16 + q * 4)
                                if T.And(m < rows, T.bool(True) if exact else k < K):
                                    T.ptx[LOAD_X2](v[o + p * 2], v[o + p * 2 + 1], x.ptr_to([m, k]))

        @T.inline
        def multiply(slot):
            for u in T.unroll(U):
                for j in T.unroll(2):
                    for d in T.unroll(F.groups):                          # groups in this half
                        if stored:                                  # sums of x over the group, by a matrix of ones
                            for n in T.unroll(NT):
                                for e in T.unroll(4):
                                    sums[n * 4 + e] = T.float32(0)
                                for p in T.unroll(F.steps):
                                    w = T.meta_var(((u * NT + n) * 2 + j) * 4 + F.step(p, d) * 2)
                                    T.ptx[MMA](sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3],
                                               T.uint32(one), T.uint32(one), T.uint32(one),
                                               T.uint32(one), v[w], v[w + 1],
                                               sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3])
                        for s in T.unroll(strips):
                            o = T.meta_var(slot * REG_C + (u * strips + s) * CW)
                            so = T.meta_var(slot * REG_S + (u * strips + s) * SW)
                            for p in T.unroll(F.steps):
                                for e in T.unroll(4):               # e: row g + 8 * (e % 2), pair e // 2 of the step
                                    decode(a, p * 4 + e, 8, F.pair(c, o, j, e % 2, F.step(p, d) * 2 + e // 2))
                            for n in T.unroll(NT):
                                for e in T.unroll(4):
                                    part[e] = T.float32(0)
                                for p in T.unroll(F.steps):
                                    w = T.meta_var(((u * NT + n) * 2 + j) * 4 + F.step(p, d) * 2)
                                    T.ptx[MMA](part[0], part[1], part[2], part[3],
                                               a[p * 4], a[p * 4 + 1], a[p * 4 + 2], a[p * 4 + 3], v[w], v[w + 1],
                                               part[0], part[1], part[2], part[3])
                                for e in T.unroll(4):
                                    i = T.meta_var((s * NT + n) * 4 + e)
                                    acc[i] = acc[i] + part[e] * F.scale(sc, so, e // 2, j * F.groups + d)
                                    if stored:
                                        acc[i] = acc[i] + sums[n * 4 + e % 2] * F.scale(mn, so, e // 2, j * F.groups + d)

        load(0, 0)                              # weights do not depend on the kernel before
        prefetch(held, norm, bx, tx)
        if dependent_launch:
            T.ptx["griddepcontrol.launch_dependents"]()      # it waits for this kernel, which ends after its own wait
            T.ptx["griddepcontrol.wait"]()
        request(held, residual_buffer, bx, by, tx, rows)
        for i in T.unroll(8 * NT * U):
            v[i] = T.uint32(0)
        load_x(0)
        scale(scales_of_rows, squares, total, norm, by, tx, wid, rows)
        for i in T.unroll(ACC):
            acc[i] = T.float32(0)
        if ahead:                               # the next round's weights are on their way while this one multiplies
            for r in T.serial(-(-rounds // 2)):
                for b in T.unroll(2):
                    if r * 2 + b + 1 < rounds:
                        load(r * 2 + b + 1, 1 - b)
                    if r * 2 + b < rounds:
                        if r * 2 + b > 0:
                            load_x(r * 2 + b)
                        multiply(b)
        else:
            for r in T.serial(rounds):
                if r > 0:
                    load(r, 0)
                    load_x(r)
                multiply(0)
        for s in T.unroll(strips):
            for n in T.unroll(NT):
                for e in T.unroll(4):
                    partial[wid, (n * 8 + q * 2 + e % 2) * PITCH + s * 16 + e // 2 * 8 + g] = (
                        acc[(s * NT + n) * 4 + e])
        T.cuda.cta_sync()
        store(partial, scales_of_rows, bias_buffer, held, y, norm, total, bx, by, tx, rows)

    func = quant_entry(body, N, K, OUT, weight, dtype, out_dtype, bias, residual, norm_epsilon, prepares_norm)
    return finish(func, name, dependent_launch, grid="xy")
