"""Few-row matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit, 8-bit and fp8 weights on mma.m16n8k16 (sm_80 and newer). Codes are
read once, turned into exact small integers (fp8: the numbers themselves) in registers and multiplied there; scales and
minimums are applied to the float32 sums of each group, so nothing is rounded that the format does not round.

The weight comes in fragments (see packing.py): for each 16 rows x 64 values of K, lane 4g+q holds the codes of rows g and
g+8 at those K that it also loads of x, 16 bytes per lane for 4-bit codes.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_fp8 import codes_of
from relaxpack.schedules.kernels.cuda.common import finish, quant_entry
from relaxpack.schedules.kernels.cuda.rows_epilogue import RowsEpilogue
from relaxpack.schedules.kernels.cuda.rows_product import RowsProduct, begin_rounds, register_sets, run_rounds
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T


def gemm_rows_quant(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 8,
                    strips: int = 1, warps: int = 8, unroll: int = 2, ahead: int = 0, blocks_per_sm: int = 0,
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
    limited = blocks_per_sm > 0
    OUT = N // 2 if glu else N
    E = RowsEpilogue(N, K, dtype, out_dtype, columns=columns, strips=strips, warps=warps, bias=bias, residual=residual,
                     glu=glu, norm_epsilon=norm_epsilon, prepares_norm=prepares_norm)
    PITCH, prefetch, request, scale, store = E.pitch, E.prefetch, E.request, E.scale, E.store
    CW, SW, ACC = F.words, F.scale_words, strips * NT * 4
    REG_C, REG_S, SETS = U * strips * CW, U * strips * SW, register_sets(rounds, ahead)
    P = RowsProduct(F, NT, dtype, K, exact)
    load_piece, load_share, add_x, product, stored = F.load, P.load_x, P.add_x, P.multiply, F.stored

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
                load_share(v, x, u, chunk, by * columns, rows, g, q, not exact)

        @T.inline
        def multiply(slot):
            for u in T.unroll(U):
                for j in T.unroll(2):
                    for d in T.unroll(F.groups):                          # groups in this half
                        add_x(sums, v, u, j, d)
                        for s in T.unroll(strips):
                            o = T.meta_var(slot * REG_C + (u * strips + s) * CW)
                            so = T.meta_var(slot * REG_S + (u * strips + s) * SW)
                            product(acc, s, part, a, sums, c, o, sc, mn, so, v, u, j, d)

        begin_rounds(rounds, ahead, load)
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
        run_rounds(rounds, ahead, load, load_x, multiply)
        for s in T.unroll(strips):
            for n in T.unroll(NT):
                for e in T.unroll(4):
                    partial[wid, (n * 8 + q * 2 + e % 2) * PITCH + s * 16 + e // 2 * 8 + g] = (
                        acc[(s * NT + n) * 4 + e])
        T.cuda.cta_sync()
        store(partial, scales_of_rows, bias_buffer, held, y, norm, total, bx, by, tx, rows)

    func = quant_entry(body, N, K, OUT, weight, dtype, out_dtype, bias, residual, norm_epsilon, prepares_norm)
    return finish(func, name, dependent_launch, grid="xy")
