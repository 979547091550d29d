"""Few-row matmul y[t, N] = x[t, K] W[N, K]^T for float weights on mma.m16n8k16 (sm_80 and newer): memory-bound, weights
read once and straight into registers. Right for any t; fast up to about 16 rows, where shared memory brings nothing.

The weight rows are the M side of the instruction and the activation rows its N side, so one row wastes arithmetic but no
bandwidth. A lane loads 16 contiguous bytes (8 values of K) per weight row, which is not the order in which the
instruction numbers K; since x is loaded in the same order, the sum is the same.

One block: `warps` warps share one strip of 16 * strips weight rows and take chunks of 64 of K in turn (128 bytes a row);
their partial sums meet in shared memory and are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import device, linear_func, mma_name
from relaxpack.schedules.kernels.cuda.rows_epilogue import RowsEpilogue
from tvm.script import tirx as T

CHUNK = 64                     # values of K a warp takes at a time: 128 bytes of each weight row
LOAD_WEIGHT = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32"
LOAD_X = "ld.global.v4.b32"


def rows_body(N: int, K: int, dtype: str, out_dtype: str, *, columns: int = 8, strips: int = 1, warps: int = 8,
              unroll: int = 2, ahead: bool = False, blocks_per_sm: int = 0, bias: bool = False, residual: bool = False,
              glu: str | None = None, norm_epsilon: float | None = None, prepares_norm: bool = False,
              dependent_launch: bool = False, tail: tuple[Any, Any] | None = None):
    """Inline over x `[t, K]`, weight `[N, K]`, [bias f32 `[N]`], [residual `[t, N]`] → y `[t, N]` (`[t, N/2]` with
    `glu`, where rows come in blocks of 8 gate rows, then their 8 up rows). Norms: see rows_epilogue.py; `norm` is what
    `common.norm_buffers` binds.

    columns: rows of x per block (multiple of 8); strips: blocks of 16 weight rows per warp; unroll: chunks in flight; ahead:
    twice as many, in registers of their own; blocks_per_sm: limits registers so that so many blocks fit (0: no limit).
    `tail`: what a block ends with, a maker of its shared buffers and an inline over these, y, bx, tx, rows and `after`,
    which the body was given for it."""
    assert K % 8 == 0 and columns % 8 == 0 and (glu is None or N % 16 == 0)
    BM, NT, W, U = 16 * strips, columns // 8, warps, unroll
    chunks = -(-K // CHUNK)
    rounds = -(-chunks // (W * U))
    exact = K % CHUNK == 0 and chunks % (W * U) == 0
    full_rows, limited = N % BM == 0, blocks_per_sm > 0
    MMA = mma_name(dtype)
    REG_W, REG_X, ACC, SETS = U * strips * 16, 8 * NT * U, strips * NT * 4, 2 if ahead else 1
    E = RowsEpilogue(N, K, dtype, out_dtype, columns=columns, strips=strips, warps=warps, bias=bias, residual=residual,
                     glu=glu, norm_epsilon=norm_epsilon, prepares_norm=prepares_norm)
    has_tail = tail is not None
    tail_shared, tail_end = tail if tail is not None else (lambda pool: None, None)
    PITCH, prefetch, request, scale, store = E.pitch, E.prefetch, E.request, E.scale, E.store

    @T.inline
    def body(x, weight, bias_buffer, residual_buffer, y, t, after=None, norm=None):
        with device():
            if limited:
                T.attr({"tirx.launch_bounds_min_blocks_per_sm": blocks_per_sm})
            bx, by = T.cta_id([T.int32(-(-N // BM)), T.Cast("int32", T.ceildiv(t, columns))])
            wid = T.warp_id([W])
            tx = T.thread_id([W * 32])
            lane = T.meta_var(tx % 32)
            g = T.meta_var(lane // 4)
            q = T.meta_var(lane % 4)
            pool = T.SMEMPool()
            partial = pool.alloc((W, columns * PITCH), "float32", align=16)
            shared = T.meta_var(tail_shared(pool))
            scales = T.meta_var(E.alloc_scales(pool))
            pool.commit()
            held = T.alloc_buffer((E.held,), "uint32", scope="local")
            squares = T.alloc_buffer((E.squares,), "uint32", scope="local")
            w = T.alloc_buffer((SETS * REG_W,), "uint32", scope="local")
            v = T.alloc_buffer((REG_X,), "uint32", scope="local")
            acc = T.alloc_buffer((ACC,), "float32", scope="local")
            total = T.alloc_buffer((3,), "float32", scope="local")
            rows = T.meta_var(T.Cast("int32", t))
            @T.inline
            def load(r, slot):
                """Weights of round r into register set `slot`."""
                for u in T.unroll(U):
                    for s in T.unroll(strips):
                        for h in T.unroll(2):               # rows g and g + 8 of the strip
                            for j in T.unroll(2):           # halves of the chunk
                                k = T.meta_var(((r * U + u) * W + wid) * CHUNK + j * 32 + q * 8)
                                o = T.meta_var(slot * REG_W + u * (strips * 16) + s * 16 + h * 8 + j * 4)
                                n = T.meta_var(bx * BM + s * 16 + h * 8 + g)
                                row = T.meta_var(n if full_rows else T.min(n, N - 1))
                                if exact:
                                    T.ptx[LOAD_WEIGHT](w[o], w[o + 1], w[o + 2], w[o + 3], weight.ptr_to([row, k]))
                                else:
                                    for e in T.unroll(4):
                                        w[o + e] = T.uint32(0)
                                    if k < K:
                                        T.ptx[LOAD_WEIGHT](w[o], w[o + 1], w[o + 2], w[o + 3], weight.ptr_to([row, k]))

            @T.inline
            def load_x(r):
                """Rows that are not there stay zero."""
                for u in T.unroll(U):
                    for c in T.unroll(NT):
                        for j in T.unroll(2):
                            k = T.meta_var(((r * U + u) * W + wid) * CHUNK + j * 32 + q * 8)
                            m = T.meta_var(by * columns + c * 8 + g)
                            o = T.meta_var(((u * NT + c) * 2 + j) * 4)
                            if not exact:
                                for e in T.unroll(4):
                                    v[o + e] = T.uint32(0)
                            if T.And(m < rows, T.bool(True) if exact else k < K):
                                T.ptx[LOAD_X](v[o], v[o + 1], v[o + 2], v[o + 3], x.ptr_to([m, k]))

            @T.inline
            def multiply(slot):
                for u in T.unroll(U):
                    for j in T.unroll(2):
                        for s in T.unroll(strips):
                            a = T.meta_var(slot * REG_W + u * (strips * 16) + s * 16 + j * 4)
                            for c in T.unroll(NT):
                                d = T.meta_var((s * NT + c) * 4)
                                b = T.meta_var(((u * NT + c) * 2 + j) * 4)
                                for p in T.unroll(2):
                                    T.ptx[MMA](acc[d], acc[d + 1], acc[d + 2], acc[d + 3],
                                               w[a + p * 2], w[a + 8 + p * 2], w[a + p * 2 + 1], w[a + 8 + p * 2 + 1],
                                               v[b + p * 2], v[b + p * 2 + 1], acc[d], acc[d + 1], acc[d + 2], acc[d + 3])

            for i in T.unroll(SETS):                        # weights do not depend on the kernel before
                if i < rounds:
                    load(i, i)
            prefetch(held, norm, bx, tx)
            for i in T.unroll(ACC):
                acc[i] = T.float32(0)
            for i in T.unroll(REG_X):
                v[i] = T.uint32(0)
            if dependent_launch:
                T.ptx["griddepcontrol.launch_dependents"]()      # it waits for this kernel, which ends after its own wait
                T.ptx["griddepcontrol.wait"]()
            request(held, residual_buffer, bx, by, tx, rows)
            load_x(0)
            scale(scales, squares, total, norm, by, tx, wid, rows)
            for r in T.serial(-(-rounds // SETS)):
                for b in T.unroll(SETS):
                    if r * SETS + b < rounds:
                        if r * SETS + b > 0:
                            load_x(r * SETS + b)
                        multiply(b)
                    if r * SETS + b + SETS < rounds:
                        load(r * SETS + b + SETS, b)
            for s in T.unroll(strips):
                for c in T.unroll(NT):
                    for e in T.unroll(4):               # e: row g + 8 * (e // 2), column 2 q + e % 2
                        partial[wid, (c * 8 + q * 2 + e % 2) * PITCH + s * 16 + e // 2 * 8 + g] = (
                            acc[(s * NT + c) * 4 + e])
            T.cuda.cta_sync()
            store(partial, scales, bias_buffer, held, y, norm, total, bx, by, tx, rows)
            if has_tail:
                tail_end(shared, y, bx, tx, rows, after)

    return body


def gemm_rows(N: int, K: int, dtype: str, out_dtype: str, *, name: str = "gemm_rows", **options):
    """PrimFunc around rows_body, which documents the options."""
    body = rows_body(N, K, dtype, out_dtype, **options)
    return linear_func(body, N, K, dtype, out_dtype, name, grid="xy", **options)
