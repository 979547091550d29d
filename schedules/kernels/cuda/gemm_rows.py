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
from relaxpack.schedules.kernels.cuda.common import device, glu_product, linear_func, mma_name
from tvm.script import tirx as T

CHUNK = 64                     # values of K a warp takes at a time: 128 bytes of each weight row
LOAD_WEIGHT = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32"
LOAD_X = "ld.global.v4.b32"


def rows_body(N: int, K: int, dtype: str, out_dtype: str, *, columns: int = 8, strips: int = 1, warps: int = 8,
              unroll: int = 2, bias: bool = False, residual: bool = False, glu: str | None = None,
              dependent_launch: bool = False, tail: tuple[Any, Any] | None = None):
    """Inline over x `[t, K]`, weight `[N, K]`, [bias f32 `[N]`], [residual `[t, N]`] → y `[t, N]` (`[t, N/2]` with
    `glu`, where rows come in blocks of 8 gate rows, then their 8 up rows).

    columns: rows of x per block (multiple of 8); strips: blocks of 16 weight rows per warp; unroll: chunks in flight.
    `tail`: what a block ends with, a maker of its shared buffers and an inline over these, y, bx, tx, rows and `after`,
    which the body was given for it."""
    gated = glu is not None
    assert K % 8 == 0 and columns % 8 == 0 and (not gated or N % 16 == 0)
    BM, NT, W, U = 16 * strips, columns // 8, warps, unroll
    chunks = -(-K // CHUNK)
    rounds = -(-chunks // (W * U))
    exact = K % CHUNK == 0 and chunks % (W * U) == 0
    full_rows = N % BM == 0
    MMA = mma_name(dtype)
    PITCH = BM + 4                                  # shared row pitch in floats: no bank conflicts when writing
    OUT = N // 2 if gated else N
    BO = BM // 2 if gated else BM                  # outputs per block and row of x
    THREADS, has_tail = W * 32, tail is not None
    tail_shared, tail_end = tail if tail is not None else (lambda pool: None, None)
    REG_W, REG_X, ACC = U * strips * 16, 8 * NT, strips * NT * 4

    @T.inline
    def store(partial, bias_buffer, residual_buffer, y, total, bx, m, column, f):
        base = T.meta_var(f // 8 * 16 + f % 8 if gated else f)     # its (gate) row inside the block
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for i in T.unroll(W):
            total[0] = total[0] + partial[i, column * PITCH + base]
            if gated:
                total[1] = total[1] + partial[i, column * PITCH + base + 8]
        if bias:
            total[0] = total[0] + bias_buffer[bx * BM + base]
            if gated:
                total[1] = total[1] + bias_buffer[bx * BM + base + 8]
        if gated:
            total[0] = glu_product(glu, total[0], total[1])
        if residual:
            total[0] = total[0] + T.Cast("float32", residual_buffer[m, bx * BO + f])
        y[m, bx * BO + f] = T.Cast(out_dtype, total[0])

    @T.inline
    def body(x, weight, bias_buffer, residual_buffer, y, t, after=None):
        with device():
            bx, by = T.cta_id([T.int32(-(-N // BM)), T.Cast("int32", T.ceildiv(t, columns))])
            wid = T.warp_id([W])
            tx = T.thread_id([THREADS])
            lane = T.meta_var(tx % 32)
            g = T.meta_var(lane // 4)
            q = T.meta_var(lane % 4)
            pool = T.SMEMPool()
            partial = pool.alloc((W, columns * PITCH), "float32", align=16)
            shared = T.meta_var(tail_shared(pool))
            pool.commit()
            w = T.alloc_buffer((REG_W,), "uint32", scope="local")
            v = T.alloc_buffer((REG_X,), "uint32", scope="local")
            acc = T.alloc_buffer((ACC,), "float32", scope="local")
            total = T.alloc_buffer((2,), "float32", scope="local")
            rows = T.meta_var(T.Cast("int32", t))
            for i in T.unroll(ACC):
                acc[i] = T.float32(0)
            for r in T.serial(rounds):
                for u in T.unroll(U):
                    chunk = T.meta_var((r * U + u) * W + wid)
                    for s in T.unroll(strips):
                        for h in T.unroll(2):           # rows g and g + 8 of the strip
                            for j in T.unroll(2):       # halves of the chunk
                                k = T.meta_var(chunk * CHUNK + j * 32 + q * 8)
                                o = T.meta_var(u * (strips * 16) + s * 16 + h * 8 + j * 4)
                                n = T.meta_var(bx * BM + s * 16 + h * 8 + g)
                                row = T.meta_var(n if full_rows else T.min(n, N - 1))
                                if exact:
                                    T.ptx[LOAD_WEIGHT](w[o], w[o + 1], w[o + 2], w[o + 3], weight.ptr_to([row, k]))
                                else:
                                    for e in T.unroll(4):
                                        w[o + e] = T.uint32(0)
                                    if k < K:
                                        T.ptx[LOAD_WEIGHT](w[o], w[o + 1], w[o + 2], w[o + 3], weight.ptr_to([row, k]))
                if dependent_launch:
                    if r == 0:
                        T.ptx["griddepcontrol.wait"]()
                        T.ptx["griddepcontrol.launch_dependents"]()
                for u in T.unroll(U):
                    chunk = T.meta_var((r * U + u) * W + wid)
                    for c in T.unroll(NT):
                        for j in T.unroll(2):
                            k = T.meta_var(chunk * CHUNK + j * 32 + q * 8)
                            m = T.meta_var(by * columns + c * 8 + g)
                            o = T.meta_var((c * 2 + j) * 4)
                            for e in T.unroll(4):
                                v[o + e] = T.uint32(0)
                            if T.And(m < rows, T.bool(True) if exact else k < K):
                                T.ptx[LOAD_X](v[o], v[o + 1], v[o + 2], v[o + 3], x.ptr_to([m, k]))
                    for j in T.unroll(2):
                        for s in T.unroll(strips):
                            a = T.meta_var(u * (strips * 16) + s * 16 + j * 4)
                            for c in T.unroll(NT):
                                d = T.meta_var((s * NT + c) * 4)
                                for p in T.unroll(2):
                                    T.ptx[MMA](acc[d], acc[d + 1], acc[d + 2], acc[d + 3],
                                               w[a + p * 2], w[a + 8 + p * 2], w[a + p * 2 + 1], w[a + 8 + p * 2 + 1],
                                               v[(c * 2 + j) * 4 + p * 2], v[(c * 2 + j) * 4 + p * 2 + 1],
                                               acc[d], acc[d + 1], acc[d + 2], acc[d + 3])
            for s in T.unroll(strips):
                for c in T.unroll(NT):
                    for e in T.unroll(4):               # e: row g + 8 * (e // 2), column 2 q + e % 2
                        partial[wid, (c * 8 + q * 2 + e % 2) * PITCH + s * 16 + e // 2 * 8 + g] = (
                            acc[(s * NT + c) * 4 + e])
            T.cuda.cta_sync()
            for i in T.serial(-(-columns * BO // THREADS)):
                item = T.meta_var(i * THREADS + tx)
                m = T.meta_var(by * columns + item // BO)
                f = T.meta_var(item % BO)               # output feature inside the block
                if item < columns * BO:
                    if T.And(m < rows, bx * BO + f < OUT):
                        store(partial, bias_buffer, residual_buffer, y, total, bx, m, item // BO, f)
            if has_tail:
                tail_end(shared, y, bx, tx, rows, after)

    return body


def gemm_rows(N: int, K: int, dtype: str, out_dtype: str, *, name: str = "gemm_rows", **options):
    """PrimFunc around rows_body, which documents the options."""
    body = rows_body(N, K, dtype, out_dtype, **options)
    return linear_func(body, N, K, dtype, out_dtype, name, grid="xy", **options)
