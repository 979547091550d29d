"""Many-row matmul y[t, N] = x[t, K] W[N, K]^T for every architecture from sm_80 on: mma.m16n8k16, operands brought to
shared memory by cp.async. Hopper has its own kernel (gemm_many.py); this one serves the others.

One block of 8 warps computes 128 rows x 128 weight rows, each warp 64 x 32, over stages of 64 values of K. The 16-byte
chunks of a shared row are permuted by the row number, so that ldmatrix meets no bank twice.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import device, glu_product, linear_func, mma_name
from relaxpack.schedules.kernels.cuda.fragments import COMMIT, COPY16, LDMATRIX, WAIT
from tvm.script import tirx as T

BM, BN, BK, WARPS, STAGES = 128, 128, 64, 8, 3
THREADS = WARPS * 32
COPIES = BM * BK // 8 // THREADS                    # 16-byte copies per thread, operand and stage


def tiles_body(N: int, K: int, dtype: str, out_dtype: str, *, bias: bool = False, residual: bool = False,
               glu: str | None = None):
    """Buffers as in gemm_rows; grid (blocks of weight rows, blocks of rows)."""
    gated = glu is not None
    assert K % 8 == 0 and (not gated or N % 16 == 0)
    OUT = N // 2 if gated else N
    KT = -(-K // BK)
    MMA = mma_name(dtype)

    def address(buffer, slot, row, chunk):
        """Of the 16-byte chunk (0..7) of a row of a stage."""
        return buffer.ptr_to([slot, row * BK + (chunk ^ (row % 8)) * 8])

    @T.inline
    def body(x, weight, bias_buffer, residual_buffer, y, t):
        with device():
            bx, by = T.cta_id([T.int32(-(-N // BN)), T.Cast("int32", T.ceildiv(t, BM))])
            wid = T.warp_id([WARPS])
            tx = T.thread_id([THREADS])
            lane = T.meta_var(tx % 32)
            pool = T.SMEMPool()
            xs = pool.alloc((STAGES, BM * BK), dtype, align=128)
            ws = pool.alloc((STAGES, BN * BK), dtype, align=128)
            pool.commit()
            acc = T.alloc_buffer((64,), "float32", scope="local")
            a = T.alloc_buffer((16,), "uint32", scope="local")
            b = T.alloc_buffer((8,), "uint32", scope="local")
            value = T.alloc_buffer((1,), "float32", scope="local")
            rows = T.meta_var(T.Cast("int32", t))
            warp_m = T.meta_var(wid % 2 * 64)
            warp_n = T.meta_var(wid // 2 * 32)

            @T.inline
            def load(slot, kt):
                for i in T.unroll(COPIES):
                    row = T.meta_var((i * THREADS + tx) // 8)
                    chunk = T.meta_var(tx % 8)
                    k = T.meta_var(kt * BK + chunk * 8)
                    m = T.meta_var(by * BM + row)
                    n = T.meta_var(bx * BN + row)
                    T.ptx[COPY16](address(xs, slot, row, chunk), x.ptr_to([T.min(m, rows - 1), T.min(k, K - 8)]), 16,
                                  T.if_then_else(T.And(m < rows, k < K), T.uint32(16), T.uint32(0)))
                    T.ptx[COPY16](address(ws, slot, row, chunk), weight.ptr_to([T.min(n, N - 1), T.min(k, K - 8)]), 16,
                                  T.if_then_else(T.And(n < N, k < K), T.uint32(16), T.uint32(0)))

            for i in T.unroll(64):
                acc[i] = T.float32(0)
            for s in T.unroll(STAGES - 1):
                if s < KT:
                    load(s, s)
                T.ptx[COMMIT]()
            for kt in T.serial(KT):
                T.ptx[WAIT](STAGES - 2)
                T.cuda.cta_sync()
                if kt + STAGES - 1 < KT:
                    load((kt + STAGES - 1) % STAGES, kt + STAGES - 1)
                T.ptx[COMMIT]()
                slot = T.meta_var(kt % STAGES)
                for k in T.unroll(BK // 16):
                    for i in T.unroll(4):
                        T.ptx[LDMATRIX](a[i * 4], a[i * 4 + 1], a[i * 4 + 2], a[i * 4 + 3],
                                        address(xs, slot, warp_m + i * 16 + lane % 16, k * 2 + lane // 16))
                    for j in T.unroll(2):
                        T.ptx[LDMATRIX](b[j * 4], b[j * 4 + 1], b[j * 4 + 2], b[j * 4 + 3],
                                        address(ws, slot, warp_n + j * 16 + lane // 16 * 8 + lane % 8,
                                                k * 2 + lane // 8 % 2))
                    for i in T.unroll(4):
                        for j in T.unroll(4):
                            d = T.meta_var((i * 4 + j) * 4)
                            T.ptx[MMA](acc[d], acc[d + 1], acc[d + 2], acc[d + 3],
                                       a[i * 4], a[i * 4 + 1], a[i * 4 + 2], a[i * 4 + 3], b[j * 2], b[j * 2 + 1],
                                       acc[d], acc[d + 1], acc[d + 2], acc[d + 3])
            for i in T.unroll(4):
                for j in T.unroll(2 if gated else 4):
                    for e in T.unroll(4):
                        m = T.meta_var(by * BM + warp_m + i * 16 + e // 2 * 8 + lane // 4)
                        r = T.meta_var(bx * BN + warp_n + j * (16 if gated else 8) + lane % 4 * 2 + e % 2)   # weight row
                        n = T.meta_var((bx * BN + warp_n) // 2 + j * 8 + lane % 4 * 2 + e % 2 if gated else r)
                        d = T.meta_var((i * 4 + j * (2 if gated else 1)) * 4 + e)
                        if T.And(m < rows, n < OUT):
                            value[0] = acc[d]
                            if bias:
                                value[0] = value[0] + bias_buffer[r]
                            if gated:
                                if bias:
                                    value[0] = glu_product(glu, value[0], acc[d + 4] + bias_buffer[r + 8])
                                else:
                                    value[0] = glu_product(glu, value[0], acc[d + 4])
                            if residual:
                                value[0] = value[0] + T.Cast("float32", residual_buffer[m, n])
                            y[m, n] = T.Cast(out_dtype, value[0])

    return body


def gemm_tiles(N: int, K: int, dtype: str, out_dtype: str, *, name: str = "gemm_tiles", **options):
    """PrimFunc around tiles_body, which documents the options."""
    body = tiles_body(N, K, dtype, out_dtype, **options)
    return linear_func(body, N, K, dtype, out_dtype, name, grid="xy", **options)
