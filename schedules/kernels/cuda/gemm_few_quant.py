"""Matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit, 8-bit and fp8 weights and 9 to 64 rows, on mma.m16n8k16 (sm_80 and newer).
As in gemm_rows_quant.py codes go straight into registers and scales are applied to float32 sums; but here the warps of a
block own different weight rows and share x, which cp.async brings to shared memory, so x is read once per block.

A lane reads the 16 bytes of x that belong to its 8 codes. The chunks of a shared row are permuted by the row number, and
column 2i + b of an 8-column tile is row i + 4b of x, so that the two rows a quarter warp reads lie in different banks.
On Hopper the `split` blocks of a cluster cut K and add their sums through distributed shared memory in a fixed order.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_fp8 import codes_of
from relaxpack.schedules.kernels.cuda.common import block_ids, finish, glu_product, mma_name, quant_entry
from relaxpack.schedules.kernels.cuda.fragments import COMMIT, COPY16, WAIT
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

STAGES = 4                      # chunks of x in shared memory


def gemm_few_quant(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 16, strips: int = 1,
                   warps: int = 8, split: int = 1, bias: bool = False, residual: bool = False, glu: str | None = None,
                   dependent_launch: bool = False, convert: bool = False, name: str = "gemm_few_quant"):
    """Buffers as in gemm_rows_quant. columns: rows of x per block; strips: blocks of 16 weight rows per warp; split: blocks
    of a cluster along K (more than 1 on Hopper only). Groups of 32, or fp8."""
    assert weight.group_size != 16 and K % 8 == 0 and columns % 8 == 0 and 1 <= split <= 8
    STRIPS, KC = -(-N // 16), -(-K // 64)
    F = codes_of(weight, dtype, KC, convert)
    NT, W, S = columns // 8, warps, split
    BM = 16 * strips * W
    MMA = mma_name(dtype)
    PITCH = BM + 4
    gated = glu is not None
    OUT, BO = (N // 2, BM // 2) if gated else (N, BM)
    THREADS = W * 32
    CW, SW, ACC = F.words, F.scale_words, strips * NT * 4
    REG_C, REG_S = strips * CW, strips * SW
    GROUPS = -(-STRIPS // (strips * W))
    clustered, stored, one = S > 1, F.stored, F.one
    COPIES = columns * 8                            # 16-byte copies of one chunk of x
    load_piece, decode = F.load, F.decode

    @T.inline
    def gather(v, target, partial, peers, offset):
        if clustered:
            for i in T.unroll(S):
                T.ptx["ld.shared::cluster.f32"](v[2 + i], peers[i] + T.Cast("uint32", offset * 4))
            v[target] = v[2]
            for i in T.unroll(S - 1):
                v[target] = v[target] + v[3 + i]
        else:
            v[target] = partial[offset]

    @T.inline
    def store(partial, peers, bias_buffer, residual_buffer, y, v, first, m, column, f):
        """Output feature `first` + f of row m; f counts inside the block."""
        base = T.meta_var(f // 8 * 16 + f % 8 if gated else f)
        gather(v, 0, partial, peers, column * PITCH + base)
        if gated:
            gather(v, 1, partial, peers, column * PITCH + base + 8)
        row = T.meta_var((first * 2 if gated else first) + base)
        if bias:
            v[0] = v[0] + bias_buffer[row]
            if gated:
                v[1] = v[1] + bias_buffer[row + 8]
        if gated:
            v[0] = glu_product(glu, v[0], v[1])
        if residual:
            v[0] = v[0] + T.Cast("float32", residual_buffer[m, first + f])
        y[m, first + f] = T.Cast(out_dtype, v[0])

    @T.inline
    def body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t):
        T.device_entry()
        ids = T.meta_var(block_ids(GROUPS * T.Cast("int32", T.ceildiv(t, columns)), S))
        wid = T.warp_id([W])
        tx = T.thread_id([THREADS])
        lane = T.meta_var(tx % 32)
        g = T.meta_var(lane // 4)
        q = T.meta_var(lane % 4)
        group = T.meta_var(ids[0] % GROUPS)
        first_row = T.meta_var(ids[0] // GROUPS * columns)
        rows = T.meta_var(T.Cast("int32", t))
        start = T.meta_var(ids[1] * KC // S)
        pool = T.SMEMPool()
        xs = pool.alloc((STAGES, columns * 64), dtype, align=128)
        partial = pool.alloc((columns * PITCH,), "float32", align=16)
        pool.commit()
        c = T.alloc_buffer((2 * REG_C,), "uint32", scope="local")
        sc = T.alloc_buffer((2 * REG_S,), "uint32", scope="local")
        mn = T.alloc_buffer((2 * REG_S if stored else 1,), "uint32", scope="local")
        v = T.alloc_buffer((4 * NT,), "uint32", scope="local")
        a = T.alloc_buffer((9,), "uint32", scope="local")
        part = T.alloc_buffer((4,), "float32", scope="local")
        sums = T.alloc_buffer((NT * 4 if stored else 1,), "float32", scope="local")
        acc = T.alloc_buffer((ACC,), "float32", scope="local")
        result = T.alloc_buffer((2 + S,), "float32", scope="local")
        peers = T.alloc_buffer((S,), "uint32", scope="local")
        count: T.int32
        count = (ids[1] + 1) * KC // S - start

        @T.inline
        def load_x(i):
            """Chunk i of this block's share of K into its stage."""
            for r in T.unroll(-(-COPIES // THREADS)):
                item = T.meta_var(r * THREADS + tx)
                row = T.meta_var(item // 8)
                k = T.meta_var((start + i) * 64 + item % 8 * 8)
                m = T.meta_var(first_row + row)
                if T.bool(True) if COPIES % THREADS == 0 else item < COPIES:
                    T.ptx[COPY16](xs.ptr_to([i % STAGES, row * 64 + (item % 8 ^ (row % 8)) * 8]),
                                  x.ptr_to([T.min(m, rows - 1), T.min(k, K - 8)]), 16,
                                  T.if_then_else(T.And(m < rows, k < K), T.uint32(16), T.uint32(0)))

        @T.inline
        def load_weights(i, slot):
            for s in T.unroll(strips):
                strip = T.meta_var((group * W + wid) * strips + s)
                load_piece(c, slot * REG_C + s * CW, sc, mn, slot * REG_S + s * SW, codes, scales, minimums, strip,
                           start + i, lane, strip < STRIPS)

        @T.inline
        def multiply(i, slot):
            for j in T.unroll(2):
                for n in T.unroll(NT):
                    row = T.meta_var(n * 8 + g // 2 + g % 2 * 4)
                    T.ptx["ld.shared.v4.b32"](v[n * 4], v[n * 4 + 1], v[n * 4 + 2], v[n * 4 + 3],
                                              xs.ptr_to([i % STAGES, row * 64 + ((j * 4 + q) ^ (row % 8)) * 8]))
                if stored:                          # sums of x over the group, by a matrix of ones
                    for n in T.unroll(NT):
                        for e in T.unroll(4):
                            sums[n * 4 + e] = T.float32(0)
                        for p in T.unroll(2):
                            T.ptx[MMA](sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3], T.uint32(one),
                                       T.uint32(one), T.uint32(one), T.uint32(one), v[n * 4 + p * 2], v[n * 4 + p * 2 + 1],
                                       sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3])
                for s in T.unroll(strips):
                    o = T.meta_var(slot * REG_C + s * CW)
                    so = T.meta_var(slot * REG_S + s * SW)
                    for p in T.unroll(2):
                        for e in T.unroll(4):       # e: row g + 8 * (e % 2), pair e // 2 of the step
                            decode(a, p * 4 + e, 8, F.pair(c, o, j, e % 2, p * 2 + e // 2), F.less(sc, so, e % 2))
                    for n in T.unroll(NT):
                        for e in T.unroll(4):
                            part[e] = T.float32(0)
                        for p in T.unroll(2):
                            T.ptx[MMA](part[0], part[1], part[2], part[3],
                                       a[p * 4], a[p * 4 + 1], a[p * 4 + 2], a[p * 4 + 3],
                                       v[n * 4 + p * 2], v[n * 4 + p * 2 + 1], part[0], part[1], part[2], part[3])
                        for e in T.unroll(4):
                            d = T.meta_var((s * NT + n) * 4 + e)
                            acc[d] = acc[d] + part[e] * F.scale(sc, so, e // 2, j)
                            if stored:
                                acc[d] = acc[d] + sums[n * 4 + e % 2] * F.scale(mn, so, e // 2, j)

        load_weights(0, 0)                          # weights do not depend on the kernel before
        if dependent_launch:
            T.ptx["griddepcontrol.wait"]()
            T.ptx["griddepcontrol.launch_dependents"]()
        for i in T.unroll(ACC):
            acc[i] = T.float32(0)
        for i in T.unroll(STAGES - 1):
            if i < count:
                load_x(i)
            T.ptx[COMMIT]()
        for pair_of in T.serial(T.ceildiv(count, 2)):
            for b in T.unroll(2):
                i = T.meta_var(pair_of * 2 + b)
                if i + 1 < count:
                    load_weights(i + 1, 1 - b)
                T.ptx[WAIT](STAGES - 2)
                T.cuda.cta_sync()
                if i + STAGES - 1 < count:
                    load_x(i + STAGES - 1)
                T.ptx[COMMIT]()
                if i < count:
                    multiply(i, b)
        for s in T.unroll(strips):
            for n in T.unroll(NT):
                for e in T.unroll(4):               # e: row g + 8 * (e // 2); column 2 q + e % 2 is row q + 4 (e % 2) of x
                    partial[(n * 8 + q + e % 2 * 4) * PITCH + (wid * strips + s) * 16 + e // 2 * 8 + g] = (
                        acc[(s * NT + n) * 4 + e])
        if clustered:
            T.ptx["barrier.cluster.arrive.release"]()
            T.ptx["barrier.cluster.wait.acquire"]()
            for i in T.unroll(S):
                T.ptx["mapa.shared::cluster.u32"](peers[i], T.cuda.cvta_generic_to_shared(partial.ptr_to([0])), T.uint32(i))
        else:
            T.cuda.cta_sync()
        for i in T.serial(-(-columns * BO // (THREADS * S))):
            item = T.meta_var((i * S + ids[1]) * THREADS + tx)
            m = T.meta_var(first_row + item // BO)
            f = T.meta_var(item % BO)
            if item < columns * BO:
                if T.And(m < rows, group * BO + f < OUT):
                    store(partial, peers, bias_buffer, residual_buffer, y, result, group * BO, m, item // BO, f)
        if clustered:                               # no block may leave while another still reads its partial sums
            T.ptx["barrier.cluster.arrive"]()
            T.ptx["barrier.cluster.wait"]()

    func = quant_entry(body, N, K, OUT, weight, dtype, out_dtype, bias, residual)
    return finish(func, name, dependent_launch, S)
