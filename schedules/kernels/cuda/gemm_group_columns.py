"""Matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit weights and one row of x (or 2 or 4) on mma.m16n8k16 (sm_80 and newer): as
gemm_rows_quant.py, but the eight columns of the product are eight groups of 32 values of K instead of eight rows of x.

In a step for one group only the column of that group holds x, the others are zero, so one accumulator collects the sums of
eight groups, and scales, minimums and their float32 products are needed once for 16 x 256 values, each lane holding just
its own. Codes are multiplied as 16 + c, exact with two instructions for two of them; sums of x, one product for all eight
groups, take the 16 (and what a format subtracts) away in float32. Of longer groups, neighbouring columns have one scale.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes import sixteen
from relaxpack.schedules.kernels.cuda.codes_fp8 import codes_of
from relaxpack.schedules.kernels.cuda.common import finish, mma_name, quant_entry
from relaxpack.schedules.kernels.cuda.fragments import SHORT, shuffle_xor
from relaxpack.schedules.kernels.cuda.rows_epilogue import RowsEpilogue
from relaxpack.schedules.kernels.cuda.rows_product import begin_rounds, register_sets, run_rounds
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

LOAD_X = "ld.global.v4.b32"
LOAD_CODES = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32"
MINUS_ZERO = 0x80008000


def gemm_group_columns(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 1, warps: int = 8,
                   unroll: int = 1, ahead: int = 0, blocks_per_sm: int = 0, bias: bool = False, residual: bool = False,
                   glu: str | None = None, norm_epsilon: float | None = None, prepares_norm: bool = False,
                   dependent_launch: bool = False, convert: bool = False, name: str = "gemm_group_columns"):
    """Buffers as in gemm_rows_quant. columns: rows of x per block, 1, 2 or 4; unroll: units of 256, 128 or 64 values of K
    (eight groups by columns) that a warp loads together; ahead: so many rounds more already while these are multiplied. With
    two or more, as many are asked for before the kernel waits for the one before it."""
    assert K % 8 == 0 and columns in (1, 2, 4) and weight.bits == 4
    STRIPS, KC = -(-N // 16), -(-K // 64)
    F = codes_of(weight, dtype, KC)
    W, U = warps, unroll
    PER = 8 // columns                              # groups of a row that are columns of one product
    CH = PER // 2                                   # chunks of a unit
    UNITS = -(-KC // CH)
    rounds = -(-UNITS // (W * U))
    exact = K % (64 * CH) == 0 and UNITS % (W * U) == 0
    E = RowsEpilogue(N, K, dtype, out_dtype, columns=columns, strips=1, warps=warps, bias=bias, residual=residual, glu=glu,
                     norm_epsilon=norm_epsilon, prepares_norm=prepares_norm)
    PITCH, prefetch, request, scale, store = E.pitch, E.prefetch, E.request, E.scale, E.store
    SW, stored, SETS = F.scale_words, F.stored, register_sets(rounds, ahead)
    MMA, fma, one = mma_name(dtype), f"fma.rn.{SHORT[dtype]}x2", F.one
    decode = sixteen(dtype)
    limited = blocks_per_sm > 0
    load_scales, first_scale = F.load_scales, F.first_scale

    @T.inline
    def body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t, norm=None):
        T.device_entry()
        if limited:
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": blocks_per_sm})
        bx, by = T.cta_id([T.int32(STRIPS), T.Cast("int32", T.ceildiv(t, columns))])
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
        c = T.alloc_buffer((SETS * U * CH * 4,), "uint32", scope="local")
        sc = T.alloc_buffer((SETS * U * SW,), "uint32", scope="local")
        mn = T.alloc_buffer((SETS * U * SW if stored else 1,), "uint32", scope="local")
        v = T.alloc_buffer((U * 4,), "uint32", scope="local")
        keep = T.alloc_buffer((PER,), "uint32", scope="local")
        a = T.alloc_buffer((4,), "uint32", scope="local")
        b = T.alloc_buffer((2,), "uint32", scope="local")
        part = T.alloc_buffer((8,), "float32", scope="local")
        sums = T.alloc_buffer((4,), "float32", scope="local")
        acc = T.alloc_buffer((4,), "float32", scope="local")
        total = T.alloc_buffer((3,), "float32", scope="local")
        rows = T.meta_var(T.Cast("int32", t))

        @T.inline
        def load(r, slot):
            """Codes of round r, and the scales of the two groups that are this lane's columns, into register set `slot`."""
            for u in T.unroll(U):
                unit = T.meta_var((r * U + u) * W + wid)
                for e in T.unroll(CH):
                    o = T.meta_var(((slot * U + u) * CH + e) * 4)
                    if T.bool(True) if exact else unit * CH + e < KC:
                        T.ptx[LOAD_CODES](c[o], c[o + 1], c[o + 2], c[o + 3],
                                          codes.ptr_to([(bx * KC + unit * CH + e) * 128 + lane * 4]))
                    else:
                        for i in T.unroll(4):
                            c[o + i] = T.uint32(0)
                so = T.meta_var((slot * U + u) * SW)
                chunk = T.meta_var(unit * CH + q % CH)
                if T.bool(True) if exact else chunk < KC:
                    load_scales(sc, so, scales, first_scale(bx, chunk, g))
                    if stored:
                        load_scales(mn, so, minimums, first_scale(bx, chunk, g))
                else:
                    for i in T.unroll(SW):
                        sc[so + i] = T.uint32(0)
                        if stored:
                            mn[so + i] = T.uint32(0)

        @T.inline
        def load_x(r):
            """Lane (g, q): 8 values of row g // PER in group g % PER of the unit; what is not there is zero."""
            for u in T.unroll(U):
                m = T.meta_var(by * columns + g // PER)
                k = T.meta_var(((r * U + u) * W + wid) * (CH * 64) + g % PER * 32 + q * 8)
                if T.And(m < rows, T.bool(True) if exact else k < K):
                    T.ptx[LOAD_X](v[u * 4], v[u * 4 + 1], v[u * 4 + 2], v[u * 4 + 3], x.ptr_to([m, k]))
                else:
                    for i in T.unroll(4):
                        v[u * 4 + i] = T.uint32(0)

        @T.inline
        def multiply(slot):
            for u in T.unroll(U):
                for i in T.unroll(4):
                    sums[i] = T.float32(0)
                for i in T.unroll(8):
                    part[i] = T.float32(0)
                for p in T.unroll(2):
                    T.ptx[MMA](sums[0], sums[1], sums[2], sums[3], T.uint32(one), T.uint32(one), T.uint32(one),
                               T.uint32(one), v[u * 4 + p * 2], v[u * 4 + p * 2 + 1], sums[0], sums[1], sums[2], sums[3])
                for n in T.unroll(PER):
                    for p in T.unroll(2):
                        for e in T.unroll(4):           # e: row g + 8 * (e % 2), pair e // 2 of the step
                            decode(a, e, c[((slot * U + u) * CH + n // 2) * 4 + n % 2 * 2 + e % 2], p * 2 + e // 2)
                        for i in T.unroll(2):
                            T.ptx[fma](b[i], v[u * 4 + p * 2 + i], keep[n], T.uint32(MINUS_ZERO))
                        T.ptx[MMA](part[p * 4], part[p * 4 + 1], part[p * 4 + 2], part[p * 4 + 3], a[0], a[1], a[2], a[3],
                                   b[0], b[1], part[p * 4], part[p * 4 + 1], part[p * 4 + 2], part[p * 4 + 3])
                so = T.meta_var((slot * U + u) * SW)
                for e in T.unroll(4):                   # row g + 8 * (e // 2), group 2q + e % 2 of the columns
                    acc[e] = acc[e] + (part[e] + part[e + 4] - F.zero(sc, so, e // 2, 16) * sums[e]) * F.scale(
                        sc, so, e // 2, e % 2)
                    if stored:
                        acc[e] = acc[e] + sums[e] * F.scale(mn, so, e // 2, e % 2)

        begin_rounds(rounds, ahead, load)
        prefetch(held, norm, bx, tx)
        for n in T.unroll(PER):
            keep[n] = T.if_then_else(g % PER == n, T.uint32(one), T.uint32(0))
        if dependent_launch:
            T.ptx["griddepcontrol.launch_dependents"]()      # it waits for this kernel, which ends after its own wait
            T.ptx["griddepcontrol.wait"]()
        request(held, residual_buffer, bx, by, tx, rows)
        load_x(0)
        scale(scales_of_rows, squares, total, norm, by, tx, wid, rows)
        for i in T.unroll(4):
            acc[i] = T.float32(0)
        run_rounds(rounds, ahead, load, load_x, multiply)
        for h in T.unroll(2):                   # over the groups of a row: its columns lie in CH neighbouring lanes
            acc[h * 2] = acc[h * 2] + acc[h * 2 + 1]
            if CH >= 2:
                acc[h * 2] = acc[h * 2] + shuffle_xor(acc[h * 2], 1)
            if CH == 4:
                acc[h * 2] = acc[h * 2] + shuffle_xor(acc[h * 2], 2)
            if q % CH == 0:
                partial[wid, q // CH * PITCH + h * 8 + g] = acc[h * 2]
        T.cuda.cta_sync()
        store(partial, scales_of_rows, bias_buffer, held, y, norm, total, bx, by, tx, rows)

    func = quant_entry(body, N, K, E.outputs, weight, dtype, out_dtype, bias, residual, norm_epsilon, prepares_norm)
    return finish(func, name, dependent_launch, grid="xy")
