"""The end of the Hopper matmuls whose weight rows are wgmma's M side. Partial sums lie in shared memory, `[column of the
tile, weight row]`; the blocks of a cluster that cut K add them through distributed shared memory in a fixed order. Bias,
gate and residual follow, four neighbouring outputs at a time. No kernel lives here."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import glu_product
from relaxpack.schedules.kernels.cuda.fragments import high, low, pack
from tvm.script import tirx as T


class SplitEpilogue:
    """`finish` for tiles of `rows` weight rows (gate and up in blocks of 8 where gated) and `columns` rows of x, summed over
    `split` blocks of a cluster by `threads` threads each; `groups` sets of partial sums, one behind the other, in each."""

    def __init__(self, dtype: str, out_dtype: str, *, out_features: int, rows: int, columns: int, split: int, threads: int,
                 clustered: bool, bias: bool, residual: bool, glu: str | None, groups: int = 1) -> None:
        OUT, BM, NB, S, THREADS = out_features, rows, columns, split, threads
        gated = glu is not None
        BO = BM // 2 if gated else BM                   # outputs of a tile
        PITCH, PACK = BM + 4, pack(dtype)
        G, SET = groups, NB * PITCH                     # sets of partial sums in each block
        self.pitch, self.outputs = PITCH, BO

        @T.inline
        def gather(v, target, partial, peers, offset):
            """v[target .. target + 3] = sums over the cluster of four neighbouring partial sums, blocks and their sets in
            order. All loads are issued before the first addition."""
            for i in T.unroll(S * G):
                if clustered:
                    T.ptx["ld.shared::cluster.v4.f32"](v[8 + i * 4], v[9 + i * 4], v[10 + i * 4], v[11 + i * 4],
                                                       peers[i // G] + T.Cast("uint32", (i % G * SET + offset) * 4))
                else:
                    T.ptx["ld.shared.v4.f32"](v[8 + i * 4], v[9 + i * 4], v[10 + i * 4], v[11 + i * 4],
                                              partial.ptr_to([i * SET + offset]))
            for e in T.unroll(4):
                v[target + e] = v[8 + e]
                for i in T.unroll(S * G - 1):
                    v[target + e] = v[target + e] + v[12 + i * 4 + e]

        @T.inline
        def store(partial, peers, bias_buffer, residual_buffer, y, v, w, tile, m, column, f):
            """Outputs f .. f + 3 of row m."""
            base = T.meta_var(f // 8 * 16 + f % 8 if gated else f)
            gather(v, 0, partial, peers, column * PITCH + base)
            if gated:
                gather(v, 4, partial, peers, column * PITCH + base + 8)
            for e in T.unroll(4):
                if bias:
                    v[e] = v[e] + bias_buffer[tile * BM + base + e]
                    if gated:
                        v[4 + e] = v[4 + e] + bias_buffer[tile * BM + base + 8 + e]
                if gated:
                    v[e] = glu_product(glu, v[e], v[4 + e])
            if residual:
                T.ptx["ld.global.v2.b32"](w[0], w[1], residual_buffer.ptr_to([m, tile * BO + f]))
                for e in T.unroll(2):
                    v[e * 2] = v[e * 2] + low(dtype, w[e])
                    v[e * 2 + 1] = v[e * 2 + 1] + high(dtype, w[e])
            if out_dtype == "float32":
                T.ptx["st.global.v4.f32"](y.ptr_to([m, tile * BO + f]), v[0], v[1], v[2], v[3])
            else:
                T.ptx[PACK](w[0], v[1], v[0])
                T.ptx[PACK](w[1], v[3], v[2])
                T.ptx["st.global.v2.b32"](y.ptr_to([m, tile * BO + f]), w[0], w[1])

        @T.inline
        def finish(partial, bias_buffer, residual_buffer, y, tile, part, member, first_row, rows, tx):
            """Every thread of every block of the cluster, after its block wrote its partial sums. `part` is the block's
            place along K, `member` the place of its strip among strips that share x."""
            if clustered:
                T.ptx["barrier.cluster.arrive.release"]()
                T.ptx["barrier.cluster.wait.acquire"]()
            else:
                T.cuda.cta_sync()
            v = T.alloc_buffer((8 + 4 * S * G,), "float32", scope="local")
            w = T.alloc_buffer((2,), "uint32", scope="local")
            peers = T.alloc_buffer((S,), "uint32", scope="local")
            if clustered:
                for i in T.unroll(S):
                    T.ptx["mapa.shared::cluster.u32"](
                        peers[i], T.cuda.cvta_generic_to_shared(partial.ptr_to([0])),
                        T.Cast("uint32", member * S + i))
            for i in T.serial(-(-NB * BO // 4 // (THREADS * S))):
                item = T.meta_var((i * S + part) * THREADS + tx)
                m = T.meta_var(first_row + item // (BO // 4))
                f = T.meta_var(item % (BO // 4) * 4)
                if item < NB * BO // 4:
                    if T.And(m < rows, tile * BO + f < OUT):
                        store(partial, peers, bias_buffer, residual_buffer, y, v, w, tile, m, item // (BO // 4), f)
            if clustered:                   # no block may leave while another still reads its partial sums
                T.ptx["barrier.cluster.arrive"]()
                T.ptx["barrier.cluster.wait"]()

        self.finish = finish
