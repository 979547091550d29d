"""Stage two of the paged decode attention: the parts of a (sequence, KV head) that stage one cut between blocks become one
result. At most one such cut starts in a block, so the grid is that of stage one; or, where there are fewer, as many blocks
as there are (sequence, KV head) pairs, each of which looks for its own cut.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import DecodeTuning
from relaxpack.schedules.kernels.cuda.fragments import AWAIT, EXP2, FULL_MASK, NEG_BIG, RELEASE
from tvm.script import tirx as T

MERGE_WARPS, MERGE_DEPTH = 8, 4
COMPACT_DEPTH = 8          # parts that a warp loads at once where registers are no matter: there are few blocks


def decode_merge_function(spec: AttentionSpec, tuning: DecodeTuning, early: bool) -> Any:
    D, H, KV, BLOCKS = spec.head_dim, spec.num_heads, spec.num_kv_heads, tuning.blocks
    G, WARPS, COMPACT = H // KV, MERGE_WARPS, tuning.compact
    DEPTH = COMPACT_DEPTH if COMPACT else MERGE_DEPTH
    COUNTS = -(-BLOCKS // 32)
    THREADS, PER_LANE = WARPS * 32, -(-D // 32)
    act = spec.activation_dtype

    @T.prim_func
    def decode_merge(partial_h: T.handle, stats_h: T.handle, cuts_h: T.handle, y_h: T.handle):
        t = T.int64()
        partial = T.match_buffer(partial_h, (2 * BLOCKS, G * D), "float32", align=16)
        stats = T.match_buffer(stats_h, (2 * BLOCKS, 2, G), "float32")
        cuts = T.match_buffer(cuts_h, (BLOCKS, 4), "int32", align=16)
        y = T.match_buffer(y_h, (t, H * D), act, align=16)
        T.device_entry()
        head, bx = T.cta_id([G, T.min(T.Cast("int32", t * KV), BLOCKS) if COMPACT else BLOCKS])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        sums = pool.alloc((WARPS, D), "float32", align=16)
        warp_stats = pool.alloc((2, WARPS), "float32", align=16)
        pool.commit()
        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        o = T.alloc_buffer((PER_LANE,), "float32", scope="local")
        part = T.alloc_buffer((DEPTH, PER_LANE), "float32", scope="local")
        tops = T.alloc_buffer((DEPTH,), "float32", scope="local")
        parts = T.alloc_buffer((DEPTH,), "float32", scope="local")
        cut = T.alloc_buffer((4,), "int32", scope="local")           # row, KV head, slot of the first part, parts
        top: T.float32
        total: T.float32
        peak: T.float32
        value: T.float32
        j: T.int32
        slot: T.int32
        if COMPACT:
            counts = T.alloc_buffer((COUNTS,), "int32", scope="local")
            place: T.int32
            match: T.uint32
            word: T.uint32
        first = T.meta_var(place if COMPACT else bx)                 # the block of stage one in which the cut starts

        @T.inline
        def find():
            # the bx-th block in which a cut starts; every warp looks for itself. `j` counts those before
            for i in T.unroll(COUNTS):
                counts[i] = 0
                if i * 32 + lane < BLOCKS:
                    counts[i] = cuts[i * 32 + lane, 3]
            place = -1
            j = 0
            for i in T.unroll(COUNTS):
                word = T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", counts[i] > 0))
                slot = j + T.Cast("int32", T.popcount(word & ((T.uint32(1) << T.Cast("uint32", lane)) - T.uint32(1))))
                match = T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", T.And(counts[i] > 0, slot == bx)))
                if match != T.uint32(0):
                    place = i * 32 + T.Cast("int32", T.popcount((match - T.uint32(1)) & ~match))
                j = j + T.Cast("int32", T.popcount(word))

        if early:
            T.ptx[RELEASE]()
            T.ptx[AWAIT]()
        if COMPACT:
            find()
            cut[3] = 0
            if place >= 0:
                T.ptx["ld.global.nc.v4.b32"](cut[0], cut[1], cut[2], cut[3], cuts.ptr_to([place, 0]))
        else:
            T.ptx["ld.global.nc.v4.b32"](cut[0], cut[1], cut[2], cut[3], cuts.ptr_to([bx, 0]))
        if cut[3] > 0:
            top = T.float32(NEG_BIG)
            total = T.float32(0)
            for e in T.unroll(PER_LANE):
                o[e] = T.float32(0)
            j = warp
            while j < cut[3]:
                for i in T.unroll(DEPTH):
                    tops[i] = T.float32(NEG_BIG)
                    parts[i] = T.float32(0)
                    for e in T.unroll(PER_LANE):
                        part[i, e] = T.float32(0)
                    if j + i * WARPS < cut[3]:
                        # the first part is some segment of its block, the others the first ones of theirs
                        slot = T.if_then_else(j + i * WARPS == 0, cut[2], 2 * (first + j + i * WARPS))
                        tops[i] = stats[slot, 0, head]
                        parts[i] = stats[slot, 1, head]
                        for e in T.unroll(PER_LANE):
                            if lane + e * 32 < D:
                                part[i, e] = partial[slot, head * D + lane + e * 32]
                peak = top
                for i in T.unroll(DEPTH):
                    peak = T.max(peak, tops[i])
                T.ptx[EXP2](value, top - peak)
                top = peak
                total = total * value
                for e in T.unroll(PER_LANE):
                    o[e] = o[e] * value
                for i in T.unroll(DEPTH):
                    T.ptx[EXP2](value, tops[i] - peak)
                    total = total + parts[i] * value
                    for e in T.unroll(PER_LANE):
                        o[e] = o[e] + part[i, e] * value
                j = j + WARPS * DEPTH
            if lane == 0:
                warp_stats[0, warp] = top
                warp_stats[1, warp] = total
            for e in T.unroll(PER_LANE):
                if lane + e * 32 < D:
                    sums[warp, lane + e * 32] = o[e]
            T.cuda.cta_sync()
            peak = T.float32(NEG_BIG)
            for w in T.unroll(WARPS):
                peak = T.max(peak, warp_stats[0, w])
            for i in T.unroll((D + THREADS - 1) // THREADS):
                if tx + i * THREADS < D:
                    total = T.float32(0)
                    top = T.float32(0)
                    for w in T.unroll(WARPS):
                        T.ptx[EXP2](value, warp_stats[0, w] - peak)
                        total = total + value * warp_stats[1, w]
                        top = top + value * sums[w, tx + i * THREADS]
                    y[cut[0], (cut[1] * G + head) * D + tx + i * THREADS] = T.Cast(act, top / total)

    return decode_merge
