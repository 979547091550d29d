"""Paged prefill attention for Hopper (sm_90a): wgmma fed by a producer warpgroup, softmax overlapped with the matmuls.

Two consumer warpgroups own 64 query rows each; the third fetches queries, keys and values through the page table with
cp.async into 128-byte-swizzled shared memory, so any page size works and unseen keys become zeros, and announces
them on mbarriers. Each consumer issues the scores of the next tile before the output product of the current one and
computes the softmax of the former while the latter runs. `attention_prefill.py` is the version for other cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.fragments import (
    COMMIT,
    COPY16,
    EXP2,
    FULL_MASK,
    LOG2_E,
    NEG_BIG,
    SHORT,
    WAIT,
    pack,
    shuffle,
    shuffle_up,
    shuffle_xor,
)
from tvm.script import tirx as T

ROWS, GROUP, CONSUMERS, STAGES = 128, 128, 2, 2
# shared-memory matrix descriptors without address, 128-byte swizzle, 16-byte units. Rows of 64 elements (128 bytes);
# 8 rows (1024 bytes) repeat with the stride field; for operands whose rows are the reduction dimension (values) the
# leading field is the distance between chunks of 64 columns.
K_MAJOR = (1 << 62) | (64 << 32) | (1 << 16)
_FENCE = """
__device__ __forceinline__ void wgmma_pin(float& r) { asm volatile("" : "+f"(r) :: "memory"); }
"""


@dataclass(frozen=True)
class HopperTuning:
    """The search space: keys of a tile and registers of producer and consumers."""

    keys: int = 128
    ping_pong: bool = True        # the consumers issue their matmuls in turns, so that one's softmax meets the other's
    producer_registers: int = 80
    consumer_registers: int = 208


def supported(spec: AttentionSpec) -> bool:
    return spec.head_dim in (64, 128, 256)


def default_tuning(spec: AttentionSpec) -> HopperTuning:
    return HopperTuning(keys=128 if spec.head_dim <= 128 else 64)


def shared_bytes(spec: AttentionSpec, tuning: HopperTuning) -> int:
    return (ROWS + 2 * STAGES * tuning.keys) * spec.head_dim * 2 + 8 * (4 * STAGES + 1)


def function(spec: AttentionSpec, tuning: HopperTuning) -> Any:
    D, H, KV, PS, MP, L = (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages,
                           spec.num_layers)
    G, KEYS, HALVES = H // KV, tuning.keys, D // 64
    act, kv = spec.activation_dtype, spec.kv_dtype
    short = SHORT[kv]
    PING_PONG = tuning.ping_pong
    WINDOWED, WINDOW = spec.window is not None, spec.window or 0
    SCALE = spec.scale * LOG2_E
    QK = f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.{short}.{short}"
    PV = f"wgmma.mma_async.sync.aligned.m64n{D}k16.f32.{short}.{short}"
    PACK_P, PACK_Y = pack(kv), pack(act)
    SCORES, OUT = KEYS // 2, D // 2                        # accumulators per thread
    CHUNKS = D // 8
    V_MAJOR = (1 << 62) | (64 << 32) | ((KEYS * 8) << 16)
    KV_PASSES, Q_PASSES = KEYS * CHUNKS // GROUP, ROWS * CHUNKS // GROUP
    STAGE16 = KEYS * D * 2 // 16

    def registers(buffer: Any, count: int) -> list[Any]:
        return [buffer[i] for i in range(count)]

    def spot(row: Any, column: Any) -> list[Any]:
        """Half, row and element of 16-byte chunk `column` of a row."""
        return [column // 8, row, (column % 8 ^ row % 8) * 8]

    @T.prim_func
    def prefill_attention(q_h: T.handle, layer: T.int64, pages_h: T.handle, page_table_h: T.handle,
                          query_start_h: T.handle, lengths_h: T.handle, y_h: T.handle):
        t = T.int64()
        b = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, H * D), act, align=16)
        pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
        page_table = T.match_buffer(page_table_h, (b, MP), "int32")
        query_start = T.match_buffer(query_start_h, (b + 1,), "int32")
        lengths = T.match_buffer(lengths_h, (b,), "int32")
        y = T.match_buffer(y_h, (t, H * D), act, align=16)
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        head, by = T.cta_id([H, T.Cast("int32", T.ceildiv(t, ROWS) + b)])
        wid = T.warp_id([(CONSUMERS + 1) * 4])
        tx = T.thread_id([(CONSUMERS + 1) * GROUP])
        pool = T.SMEMPool()
        queries = pool.alloc((HALVES, ROWS, 64), act, align=1024)
        keys = pool.alloc((STAGES, HALVES, KEYS, 64), kv, align=1024)
        values = pool.alloc((STAGES, HALVES, KEYS, 64), kv, align=1024)
        full_q = pool.alloc((1,), "uint64", align=8)
        full_k = pool.alloc((STAGES,), "uint64", align=8)
        full_v = pool.alloc((STAGES,), "uint64", align=8)
        empty_k = pool.alloc((STAGES,), "uint64", align=8)
        empty_v = pool.alloc((STAGES,), "uint64", align=8)
        pool.commit()
        lane = T.meta_var(tx % 32)
        sequences = T.meta_var(T.Cast("int32", b))
        tile: T.int32
        base: T.int32
        count: T.int32
        sum: T.int32
        slot: T.int32
        found: T.int32
        seq: T.int32
        start: T.int32
        rows: T.int32
        position: T.int32
        key: T.int32
        end: T.int32
        step: T.int32

        @T.inline
        def scan():
            # `count` becomes the tiles of sequence base + lane, `sum` their inclusive prefix within these 32
            count = 0
            if base + lane < sequences:
                count = (query_start[base + lane + 1] - query_start[base + lane] + (ROWS - 1)) // ROWS
            sum = count
            for i in T.unroll(5):
                slot = shuffle_up(sum, 1 << i)
                if lane >= (1 << i):
                    sum = sum + slot

        tile = T.Cast("int32", T.ceildiv(t, ROWS) + b) - 1 - by        # later (longer) tiles start first
        base = 0
        found = 0
        while T.And(found == 0, base < sequences):
            scan()
            slot = shuffle(sum, 31)
            if tile < slot:
                seq = base + T.Cast("int32", T.popcount(
                    T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", sum <= tile))))
                tile = tile - shuffle(sum - count, seq - base)
                found = 1
            else:
                tile = tile - slot
                base = base + 32
        if found == 1:
            start = query_start[seq] + tile * ROWS
            rows = T.min(query_start[seq + 1] - start, ROWS)
            position = lengths[seq] - (query_start[seq + 1] - start)    # of the first row of this tile
            end = position + rows                                       # no row here sees a key from `end` on
            key = T.max(position - (WINDOW - 1), 0) // KEYS * KEYS if WINDOWED else T.int32(0)
            step = 0
            if tx == 0:
                T.ptx.mbarrier.init.shared.b64(full_q.ptr_to([0]), T.uint32(GROUP))
                for s in T.unroll(STAGES):
                    T.ptx.mbarrier.init.shared.b64(full_k.ptr_to([s]), T.uint32(GROUP))
                    T.ptx.mbarrier.init.shared.b64(full_v.ptr_to([s]), T.uint32(GROUP))
                    T.ptx.mbarrier.init.shared.b64(empty_k.ptr_to([s]), T.uint32(CONSUMERS * 4))
                    T.ptx.mbarrier.init.shared.b64(empty_v.ptr_to([s]), T.uint32(CONSUMERS * 4))
                T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()
            if wid >= CONSUMERS * 4:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](tuning.producer_registers)
                me = T.meta_var(tx - CONSUMERS * GROUP)
                page = T.alloc_buffer((KV_PASSES,), "int32", scope="local")     # of this thread's rows of a tile

                @T.inline
                def find_pages(first):
                    # all look-ups at once: a copy must not wait for one
                    for i in T.unroll(KV_PASSES):
                        r = T.meta_var(first + (me + GROUP * i) // CHUNKS)
                        page[i] = 0
                        if T.And(r < end, r > position - WINDOW if WINDOWED else T.bool(True)):
                            page[i] = page_table[seq, r // PS]

                @T.inline
                def copy(which, destination, stage):
                    for i in T.unroll(KV_PASSES):
                        r = T.meta_var((me + GROUP * i) // CHUNKS)
                        c = T.meta_var((me + GROUP * i) % CHUNKS)
                        live = T.meta_var(T.And(key + r < end,
                                                key + r > position - WINDOW if WINDOWED else T.bool(True)))
                        T.ptx[COPY16](destination.ptr_to([stage, *spot(r, c)]),
                                      pages.ptr_to([layer, T.Cast("int64", page[i]), which, T.Cast("int64", head // G),
                                                    T.Cast("int64", (key + r) % PS), c * 8]), 16,
                                      T.if_then_else(live, T.uint32(16), T.uint32(0)))
                    T.ptx[COMMIT]()

                @T.inline
                def announce(barrier, index):
                    T.ptx.fence.proxy.async_.shared__cta()
                    T.ptx.mbarrier.arrive.shared.b64(barrier.ptr_to([index]))

                for i in T.unroll(Q_PASSES):
                    r = T.meta_var((me + GROUP * i) // CHUNKS)
                    c = T.meta_var((me + GROUP * i) % CHUNKS)
                    T.ptx[COPY16](queries.ptr_to(spot(r, c)),
                                  q.ptr_to([start + T.min(r, rows - 1), head * D + c * 8]), 16,
                                  T.if_then_else(r < rows, T.uint32(16), T.uint32(0)))
                T.ptx[COMMIT]()
                find_pages(key)
                # Three copies are in flight; one is announced when the second after it has been issued.
                while key < end:
                    T.cuda.mbarrier_wait(empty_k.ptr_to([step % STAGES]), step // STAGES % 2 ^ 1)
                    copy(0, keys, step % STAGES)
                    if step > 0:
                        T.ptx[WAIT](2)
                        announce(full_k, (step + (STAGES - 1)) % STAGES)
                    T.cuda.mbarrier_wait(empty_v.ptr_to([step % STAGES]), step // STAGES % 2 ^ 1)
                    copy(1, values, step % STAGES)
                    find_pages(key + KEYS)
                    T.ptx[WAIT](2)
                    if step == 0:
                        announce(full_q, 0)
                    else:
                        announce(full_v, (step + (STAGES - 1)) % STAGES)
                    key = key + KEYS
                    step = step + 1
                T.ptx[WAIT](1)
                announce(full_k, (step + (STAGES - 1)) % STAGES)
                T.ptx[WAIT](0)
                announce(full_v, (step + (STAGES - 1)) % STAGES)
            else:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](tuning.consumer_registers)
                score = T.alloc_buffer((SCORES,), "float32", scope="local")
                acc = T.alloc_buffer((OUT,), "float32", scope="local")
                prob = T.alloc_buffer((SCORES // 2,), "uint32", scope="local")
                top = T.alloc_buffer((2,), "float32", scope="local")
                total = T.alloc_buffer((2,), "float32", scope="local")
                factor = T.alloc_buffer((2,), "float32", scope="local")
                peak: T.float32
                word: T.uint32
                q_desc: T.uint64
                k_desc: T.uint64
                v_desc: T.uint64
                wg = T.meta_var(wid // 4)
                first = T.meta_var(position + wg * 64 + wid % 4 * 16 + lane // 4)   # position of this thread's row 0

                @T.inline
                def pin(buffer, count):
                    for i in T.unroll(count):
                        T.cuda.func_call("wgmma_pin", buffer[i], source_code=_FENCE)

                @T.inline
                def release(barrier, index):
                    T.ptx.mbarrier.arrive.shared.b64(barrier.ptr_to([index]), pred=lane == 0)

                @T.inline
                def issue_scores(stage):
                    pin(score, SCORES)
                    T.ptx.wgmma.fence.sync.aligned()
                    for k in T.unroll(D // 16):
                        T.ptx[QK](*registers(score, SCORES),
                                  q_desc + T.uint64(k // 4 * (ROWS * 8) + k % 4 * 2),
                                  k_desc + T.Cast("uint64", stage * STAGE16) + T.uint64(k // 4 * (KEYS * 8) + k % 4 * 2),
                                  T.bool(k > 0), 1, 1, 0, 0)
                    T.ptx.wgmma.commit_group.sync.aligned()

                @T.inline
                def issue_output(stage):
                    pin(acc, OUT)
                    T.ptx.wgmma.fence.sync.aligned()
                    for k in T.unroll(KEYS // 16):
                        T.ptx[PV](*registers(acc, OUT), prob[4 * k], prob[4 * k + 1], prob[4 * k + 2], prob[4 * k + 3],
                                  v_desc + T.Cast("uint64", stage * STAGE16) + T.uint64(k * 128), T.bool(True), 1, 1, 1)
                    T.ptx.wgmma.commit_group.sync.aligned()

                @T.inline
                def softmax():
                    if T.Or(key + (KEYS - 1) > position + wg * 64,
                            key <= end - 1 - WINDOW if WINDOWED else T.bool(False)):
                        for i in T.unroll(SCORES):
                            at = T.meta_var(first + i % 4 // 2 * 8)
                            k = T.meta_var(key + i // 4 * 8 + lane % 4 * 2 + i % 2)
                            seen = T.meta_var(T.And(k <= at, k > at - WINDOW if WINDOWED else T.bool(True)))
                            score[i] = T.if_then_else(seen, score[i], T.float32("-inf"))
                    for r in T.unroll(2):
                        peak = score[2 * r]
                        for n in T.unroll(KEYS // 8):
                            for j in T.unroll(2):
                                peak = T.max(peak, score[4 * n + 2 * r + j])
                        for i in T.unroll(2):
                            peak = T.max(peak, shuffle_xor(peak, 1 << i))
                        peak = T.max(peak * T.float32(SCALE), top[r])
                        T.ptx[EXP2](factor[r], top[r] - peak)
                        top[r] = peak
                        total[r] = total[r] * factor[r]
                        for n in T.unroll(KEYS // 8):
                            for j in T.unroll(2):
                                T.ptx[EXP2](score[4 * n + 2 * r + j], score[4 * n + 2 * r + j] * T.float32(SCALE) - peak)
                                total[r] = total[r] + score[4 * n + 2 * r + j]

                @T.inline
                def my_turn():
                    T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(CONSUMERS * GROUP))

                @T.inline
                def other_turn():
                    T.ptx["bar.arrive"](T.Cast("uint32", 2 - wg), T.uint32(CONSUMERS * GROUP))

                @T.inline
                def to_prob():
                    for i in T.unroll(SCORES // 2):
                        T.ptx[PACK_P](prob[i], score[2 * i + 1], score[2 * i])

                q_desc = T.uint64(K_MAJOR) + T.Cast("uint64", (T.cuda.cvta_generic_to_shared(
                    queries.ptr_to([0, 0, 0])) >> T.uint32(4)) + T.Cast("uint32", wg * (64 * 8)))
                k_desc = T.uint64(K_MAJOR) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
                    keys.ptr_to([0, 0, 0, 0])) >> T.uint32(4))
                v_desc = T.uint64(V_MAJOR) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
                    values.ptr_to([0, 0, 0, 0])) >> T.uint32(4))
                for r in T.unroll(2):
                    top[r] = T.float32(NEG_BIG)
                    total[r] = T.float32(0)
                for i in T.unroll(OUT):
                    acc[i] = T.float32(0)
                if PING_PONG:
                    if wg == 1:
                        other_turn()                      # the first consumer begins
                T.cuda.mbarrier_wait(full_q.ptr_to([0]), 0)
                T.cuda.mbarrier_wait(full_k.ptr_to([0]), 0)
                if PING_PONG:
                    my_turn()
                issue_scores(0)
                if PING_PONG:
                    other_turn()
                T.ptx.wgmma.wait_group.sync.aligned(0)
                pin(score, SCORES)
                release(empty_k, 0)
                softmax()
                to_prob()
                key = key + KEYS
                while key < end:
                    T.cuda.mbarrier_wait(full_k.ptr_to([(step + 1) % STAGES]), (step + 1) // STAGES % 2)
                    if PING_PONG:
                        my_turn()
                    issue_scores((step + 1) % STAGES)
                    T.cuda.mbarrier_wait(full_v.ptr_to([step % STAGES]), step // STAGES % 2)
                    issue_output(step % STAGES)
                    if PING_PONG:
                        other_turn()
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    pin(score, SCORES)
                    release(empty_k, (step + 1) % STAGES)
                    softmax()
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    pin(acc, OUT)
                    release(empty_v, step % STAGES)
                    for i in T.unroll(OUT):
                        acc[i] = acc[i] * factor[i % 4 // 2]
                    to_prob()
                    key = key + KEYS
                    step = step + 1
                if PING_PONG:
                    if wg == 0:
                        my_turn()                         # take the turn that is left over
                T.cuda.mbarrier_wait(full_v.ptr_to([step % STAGES]), step // STAGES % 2)
                issue_output(step % STAGES)
                T.ptx.wgmma.wait_group.sync.aligned(0)
                pin(acc, OUT)
                for r in T.unroll(2):
                    row = T.meta_var(wg * 64 + wid % 4 * 16 + r * 8 + lane // 4)
                    for i in T.unroll(2):
                        total[r] = total[r] + shuffle_xor(total[r], 1 << i)
                    peak = T.float32(1) / total[r]
                    if row < rows:
                        for n in T.unroll(D // 8):
                            T.ptx[PACK_Y](word, acc[4 * n + 2 * r + 1] * peak, acc[4 * n + 2 * r] * peak)
                            T.ptx["st.global.b32"](y.ptr_to([start + row, head * D + n * 8 + lane % 4 * 2]), word)

    return prefill_attention
