"""How the kernels for few rows end (gemm_rows, gemm_rows_quant): the warps' partial sums are added in a fixed order, then
come norm, bias, SwiGLU and residual. No kernel lives here.

RMSNorm needs no kernel of its own between two of them. It is y = r * W (w * x) with r = 1 / sqrt(mean(x^2) + epsilon): the
kernel that makes x (`prepares_norm`) also writes w * x, rounded once, and for every 16 features the sum of their squares
as stored; the kernel that multiplies (`norm_epsilon`) takes w * x for its input and scales its sums by r. Its main loop is
the same; the sums of squares are loaded beside the first x and added by one warp per row.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.kernel_spec import NORM_GROUP
from relaxpack.schedules.kernels.cuda.common import glu_product
from relaxpack.schedules.kernels.cuda.fragments import low, shuffle_xor
from tvm.script import tirx as T

LOAD, LOAD_CONSTANT = "ld.global.b32", "ld.global.nc.b32"


class RowsEpilogue:
    """Device pieces for one kernel, to be called in this order: `prefetch` before the kernel waits for the one before it,
    `request` after, `scale` when the first x is on its way, `store` behind the barrier that the partial sums need. `held`:
    registers for what is stored with."""

    def __init__(self, N: int, K: int, dtype: str, out_dtype: str, *, columns: int, strips: int, warps: int,
                 bias: bool, residual: bool, glu: str | None, norm_epsilon: float | None, prepares_norm: bool) -> None:
        gated, normed = glu is not None, norm_epsilon is not None
        assert not prepares_norm or (residual and not gated and N % NORM_GROUP == 0 and dtype == out_dtype)
        assert norm_epsilon is None or (K % NORM_GROUP == 0 and not prepares_norm)
        assert not residual or N % 2 == 0
        BM = 16 * strips
        PITCH = BM + 4                                  # shared row pitch in floats: no bank conflicts when writing
        OUT, BO = (N // 2, BM // 2) if gated else (N, BM)      # outputs in all, and per block and row of x
        W, THREADS = warps, warps * 32
        ITEMS = -(-columns * BO // THREADS)             # outputs per thread
        PARTS = K // NORM_GROUP                         # sums of squares per row
        LANE_PARTS, WARP_ROWS = -(-PARTS // 32), -(-columns // W)
        COUNT = columns * BO                            # outputs of a block
        WHOLE = -(-COUNT // 32) * 32                    # lanes of the warps that have some: all of them shuffle
        self.pitch, self.outputs = PITCH, OUT
        self.held = ITEMS * (residual + prepares_norm) or 1
        self.squares = LANE_PARTS if normed else 1
        self.shared = columns if normed else 0

        @T.inline
        def prefetch(held, norm, bx, tx):
            """The weights of the next norm, behind the words of the residual."""
            if prepares_norm:
                for i in T.unroll(ITEMS):
                    f = T.meta_var(bx * BO + (i * THREADS + tx) % BO)
                    if f < OUT:
                        T.ptx[LOAD_CONSTANT](held[ITEMS + i], norm[0].ptr_to([f]))

        @T.inline
        def request(held, residual_buffer, bx, by, tx, rows):
            if residual:                                # pairs of neighbours: the word at an even feature
                for i in T.unroll(ITEMS):
                    item = T.meta_var(i * THREADS + tx)
                    m = T.meta_var(by * columns + item // BO)
                    f = T.meta_var(bx * BO + item % BO)
                    if T.And(item < columns * BO, T.And(m < rows, f < OUT)):
                        T.ptx[LOAD](held[i], residual_buffer.ptr_to([m, f // 2 * 2]))

        @T.inline
        def scale(scales, squares, total, norm, by, tx, wid, rows):
            """1 / root mean square of each row, into shared memory: a warp for each row. The loads take as long as those of
            the first x, for which the warp has to wait anyway."""
            if normed:
                for i in T.unroll(WARP_ROWS):
                    m = T.meta_var(by * columns + i * W + wid)
                    if T.And(i * W + wid < columns, m < rows):
                        for e in T.unroll(LANE_PARTS):
                            squares[e] = T.uint32(0)
                            if e * 32 + tx % 32 < PARTS:
                                T.ptx[LOAD](squares[e], norm[0].ptr_to([m, e * 32 + tx % 32]))
                        total[0] = T.float32(0)
                        for e in T.unroll(LANE_PARTS):
                            total[0] = total[0] + T.cuda.uint_as_float(squares[e])
                        for e in T.unroll(5):
                            total[0] = total[0] + shuffle_xor(total[0], T.shift_left(1, e))
                        if tx % 32 == 0:
                            scales[i * W + wid] = T.rsqrt(total[0] * T.float32(1.0 / K) + T.float32(norm_epsilon))

        @T.inline
        def finish(partial, scales, bias_buffer, held, y, norm, total, bx, i, m, column, f):
            base = T.meta_var(f // 8 * 16 + f % 8 if gated else f)     # its (gate) row inside the block
            total[0] = T.float32(0)
            total[1] = T.float32(0)
            for w in T.unroll(W):
                total[0] = total[0] + partial[w, column * PITCH + base]
                if gated:
                    total[1] = total[1] + partial[w, column * PITCH + base + 8]
            if normed:
                total[0] = total[0] * scales[column]
                if gated:
                    total[1] = total[1] * scales[column]
            if bias:
                total[0] = total[0] + bias_buffer[bx * BM + base]
                if gated:
                    total[1] = total[1] + bias_buffer[bx * BM + base + 8]
            if gated:
                total[0] = glu_product(glu, total[0], total[1])
            if residual:
                total[0] = total[0] + low(dtype, held[i] >> T.Cast("uint32", f % 2 * 16))
            y[m, bx * BO + f] = T.Cast(out_dtype, total[0])
            if prepares_norm:                           # of the total as stored
                total[0] = T.Cast("float32", T.Cast(dtype, total[0]))
                norm[1][m, bx * BO + f] = T.Cast(dtype, total[0] * T.cuda.uint_as_float(held[ITEMS + i]))
                total[2] = total[0] * total[0]

        @T.inline
        def store(partial, scales, bias_buffer, held, y, norm, total, bx, by, tx, rows):
            for i in T.unroll(ITEMS):
                item = T.meta_var(i * THREADS + tx)
                m = T.meta_var(by * columns + item // BO)
                f = T.meta_var(item % BO)               # output feature inside the block
                real = T.meta_var(T.And(m < rows, bx * BO + f < OUT))
                there = T.meta_var(real if COUNT == WHOLE else T.And(item < COUNT, real))
                if item < WHOLE:                        # the same in all lanes of a warp
                    if prepares_norm:
                        total[2] = T.float32(0)
                    if there:
                        finish(partial, scales, bias_buffer, held, y, norm, total, bx, i, m, item // BO, f)
                    if prepares_norm:
                        for e in T.unroll(4):
                            total[2] = total[2] + shuffle_xor(total[2], T.shift_left(1, e))
                        if T.And(there, f % NORM_GROUP == 0):
                            norm[2][m, (bx * BO + f) // NORM_GROUP] = total[2]

        self.prefetch, self.request, self.scale, self.store = prefetch, request, scale, store

    def alloc_scales(self, pool):
        """A float of shared memory per row of x, where there is a norm before the kernel."""
        return pool.alloc((self.shared,), "float32", align=16) if self.shared else None
