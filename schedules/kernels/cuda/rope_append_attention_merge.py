"""How the warps of a cluster put their parts of decode attention together, through distributed shared memory: every block
merges its part of head_dim, in a fixed order.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_decode_tile import DecodeTile
from relaxpack.schedules.kernels.cuda.fragments import EXP2, MAPA, NEG_BIG, REMOTE_STORE, shuffle_xor
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import FusedTuning, units
from tvm.script import tirx as T


class ClusterMerge:
    """`send` gives a warp's sums to the blocks that need them, `merge` makes a block's part of y of what has come. `sources`
    warps send; `stats` is their maximum and sum for `heads` query heads, an even number."""

    def __init__(self, spec: AttentionSpec, tuning: FusedTuning, tile: DecodeTile) -> None:
        D, act, G = spec.head_dim, spec.activation_dtype, spec.num_heads // spec.num_kv_heads
        C, THREADS, NT, UNITS, settle = tuning.cluster, tuning.warps * 32, tile.columns // 8, D // 8, tile.settle()
        SOURCES, PER_BLOCK, GP = C * tuning.warps, units(spec, tuning), G + G % 2
        ITEMS = PER_BLOCK * GP * 4                                       # pairs of results that a block merges
        PARTS = 1                                                        # threads that share one
        while PARTS * 2 <= min(32, SOURCES) and ITEMS * PARTS * 2 <= THREADS and SOURCES % (PARTS * 2) == 0:
            PARTS *= 2
        self.sources, self.heads = SOURCES, GP

        @T.inline
        def send(inbox, stats, acc, top, total, source, attended, lane):
            """A warp's results to the blocks that merge them."""
            to = T.alloc_buffer((C,), "uint32", scope="local")
            remote: T.uint32
            settle(acc, total)
            for n in T.unroll(NT):
                for j in T.unroll(2):
                    for i in T.unroll(3):
                        total[n, j] = total[n, j] + shuffle_xor(total[n, j], 4 << i)
            for n in T.unroll(NT):
                pair = T.meta_var(n * 4 + lane % 4)
                for i in T.unroll((C + 7) // 8):
                    if T.And(lane // 4 + 8 * i < C, pair * 2 < GP):
                        T.ptx[MAPA](remote, T.cuda.cvta_generic_to_shared(stats.ptr_to([source, pair, 0])),
                                    T.Cast("uint32", lane // 4 + 8 * i))
                        T.ptx[REMOTE_STORE + ".v4.f32"](remote, top[n, 0], top[n, 1], total[n, 0], total[n, 1])
            if attended == 1:
                for i in T.unroll(C):
                    T.ptx[MAPA](to[i], T.cuda.cvta_generic_to_shared(inbox.ptr_to([source, 0, lane // 4, lane % 4 * 2])),
                                T.uint32(i))
                for u in T.unroll(UNITS):
                    for n in T.unroll(NT):
                        if n * 8 + lane % 4 * 2 < GP:
                            T.ptx[REMOTE_STORE + ".v2.f32"](
                                to[u // PER_BLOCK] + T.uint32((u % PER_BLOCK * 8 * GP + n * 8) * 4),
                                acc[u // 2, n, u % 2 * 2], acc[u // 2, n, u % 2 * 2 + 1])

        @T.inline
        def merge(inbox, stats, y, row, kv_head, member, tx):
            """A thread has every PARTS-th warp's part of one element of two heads; neighbours add theirs."""
            peak = T.alloc_buffer((2,), "float32", scope="local")
            sum = T.alloc_buffer((2,), "float32", scope="local")
            value = T.alloc_buffer((2,), "float32", scope="local")
            stat = T.alloc_buffer((4,), "float32", scope="local")        # maximum and sum of both heads
            sent = T.alloc_buffer((2,), "float32", scope="local")
            factor: T.float32
            for i in T.unroll((ITEMS * PARTS + THREADS - 1) // THREADS):
                item = T.meta_var(tx // PARTS + i * (THREADS // PARTS))
                pair = T.meta_var(item // 8 % (GP // 2))
                unit = T.meta_var(item // (4 * GP))
                live = T.meta_var(T.And(item < ITEMS, member * PER_BLOCK + unit < UNITS))
                for j in T.unroll(2):
                    peak[j] = T.float32(NEG_BIG)
                    sum[j] = T.float32(0)
                    value[j] = T.float32(0)
                if live:
                    for s in T.unroll(SOURCES // PARTS):
                        T.ptx["ld.shared.v4.f32"](stat[0], stat[1], stat[2], stat[3],
                                                  stats.ptr_to([s * PARTS + tx % PARTS, pair, 0]))
                        for j in T.unroll(2):
                            peak[j] = T.max(peak[j], stat[j])
                for k in T.unroll(PARTS.bit_length() - 1):
                    for j in T.unroll(2):
                        peak[j] = T.max(peak[j], shuffle_xor(peak[j], 1 << k))
                if live:
                    for s in T.unroll(SOURCES // PARTS):
                        T.ptx["ld.shared.v4.f32"](stat[0], stat[1], stat[2], stat[3],
                                                  stats.ptr_to([s * PARTS + tx % PARTS, pair, 0]))
                        T.ptx["ld.shared.v2.f32"](sent[0], sent[1],
                                                  inbox.ptr_to([s * PARTS + tx % PARTS, unit, item % 8, pair * 2]))
                        for j in T.unroll(2):
                            T.ptx[EXP2](factor, stat[j] - peak[j])
                            sum[j] = sum[j] + factor * stat[2 + j]
                            # a warp without keys has a sum of 0 and has sent nothing else
                            value[j] = value[j] + factor * T.if_then_else(stat[2 + j] == T.float32(0), T.float32(0), sent[j])
                for k in T.unroll(PARTS.bit_length() - 1):
                    for j in T.unroll(2):
                        sum[j] = sum[j] + shuffle_xor(sum[j], 1 << k)
                        value[j] = value[j] + shuffle_xor(value[j], 1 << k)
                if T.And(live, tx % PARTS == 0):
                    element = T.meta_var(tile.output_at(member * PER_BLOCK + unit, item % 8))
                    for j in T.unroll(2):
                        if pair * 2 + j < G:
                            y[row, (kv_head * G + pair * 2 + j) * D + element] = T.Cast(
                                act, T.if_then_else(sum[j] == T.float32(0), T.float32(0), value[j] / sum[j]))

        self.send, self.merge = send, merge
