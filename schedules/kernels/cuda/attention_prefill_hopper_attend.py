"""The consumers of Hopper's prefill attention: a warpgroup attends for 64 rows of a tile of queries. It issues the scores of
the next tile of keys before the output product of the current one and computes the softmax of the former while the
latter runs.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_memory import (
    END,
    FIRST_KEY,
    HEAD,
    POSITION,
    START,
    TOKENS_LEFT,
    PrefillMemory,
    advance,
)
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import GROUP, HopperTuning
from relaxpack.schedules.kernels.cuda.fragments import EXP2, LOG2_E, NEG_BIG, SHORT, pack, shuffle_xor
from tvm.script import tirx as T

# shared-memory matrix descriptor of rows of 64 elements (128 bytes), 128-byte swizzle, without address and strides
SWIZZLED = 1 << 62
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
_FENCE = """
__device__ __forceinline__ void wgmma_pin(float& r) { asm volatile("" : "+f"(r) :: "memory"); }
"""
# The end of a basic block that needs every weight (their sum is never negative): without one ptxas moves the wait for
# the output product to before the softmax, and they no longer overlap.
_WEIGHTS_DONE = """
__device__ __forceinline__ void weights_done(float a, float b) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p exit; }" : : "f"(a + b) : "memory"); }
"""


def attend_tiles(spec: AttentionSpec, tuning: HopperTuning, shared_keys: bool = False) -> Any:
    """Inline: the whole work of a consumer. Scalars from `key` on are the kernel's, which the fetching warp has too.
    `shared_keys`: every row sees all keys up to the one that `info` names, and `y` is a triple: outputs not divided by
    their sums f32[t, parts, H*D], maxima and sums f32[t, parts, H, 2], and which part it is."""
    D, act = spec.head_dim, spec.activation_dtype
    KEYS, HALVES, STAGES, QUERY_STAGES = tuning.keys, D // 64, tuning.stages, tuning.query_stages
    CONSUMERS, ROWS, PING_PONG = tuning.consumers, tuning.rows, tuning.ping_pong
    G = spec.num_heads // spec.num_kv_heads if tuning.packed else 1      # query heads of a tile
    WINDOWED, WINDOW = spec.window is not None, spec.window or 0
    SCALE = spec.scale * LOG2_E
    QK = f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.{SHORT[act]}.{SHORT[act]}"
    PV = f"wgmma.mma_async.sync.aligned.m64n{D}k16.f32.{SHORT[act]}.{SHORT[act]}"
    PACK = pack(act)
    SCORES, OUT = KEYS // 2, D // 2                        # accumulators per thread
    CHUNKS = D // 8                                        # 16-byte chunks of a row
    # Keys and values lie as [group of 8 rows][half][row][64]. Units of 16 bytes: 8 rows of a half are 64.
    Q_DESC = SWIZZLED | 64 << 32 | 1 << 16
    K_DESC = SWIZZLED | 64 * HALVES << 32 | 1 << 16
    V_DESC = SWIZZLED | 64 * HALVES << 32 | 64 << 16       # the leading field leads from one half to the next
    STAGE16, QUERY16 = KEYS * D * 2 // 16, ROWS * D * 2 // 16

    def registers(buffer: Any, count: int) -> list[Any]:
        return [buffer[i] for i in range(count)]

    @T.inline
    def attend_tiles(memory: PrefillMemory, y, wid, lane,
                     key, end, rows, position, start, head, q_stage, q_phase, k_stage, k_phase, v_stage, v_phase):
        score = T.alloc_buffer((SCORES,), "float32", scope="local")
        acc = T.alloc_buffer((OUT,), "float32", scope="local")
        prob = T.alloc_buffer((SCORES // 2,), "uint32", scope="local")
        top = T.alloc_buffer((2,), "float32", scope="local")
        total = T.alloc_buffer((2,), "float32", scope="local")
        factor = T.alloc_buffer((2,), "float32", scope="local")
        word = T.alloc_buffer((4,), "uint32", scope="local")
        peak: T.float32
        q_desc: T.uint64
        k_desc: T.uint64
        v_desc: T.uint64
        wg = T.meta_var(wid // 4)
        row = T.meta_var(wid * 16 + lane // 4)                  # this thread's row 0; the other one is 8 further

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
                          q_desc + T.Cast("uint64", q_stage * QUERY16) + T.uint64(k // 4 * (ROWS * 8) + k % 4 * 2),
                          k_desc + T.Cast("uint64", stage * STAGE16) + T.uint64(k // 4 * 64 + k % 4 * 2),
                          T.bool(k > 0), 1, 1, 0, 0)
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def issue_output(stage):
            pin(acc, OUT)
            T.ptx.wgmma.fence.sync.aligned()
            for k in T.unroll(KEYS // 16):
                T.ptx[PV](*registers(acc, OUT), prob[4 * k], prob[4 * k + 1], prob[4 * k + 2], prob[4 * k + 3],
                          v_desc + T.Cast("uint64", stage * STAGE16) + T.uint64(k * 128 * HALVES),
                          T.bool(True), 1, 1, 1)
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def mask():
            if T.Or(key + (KEYS - 1) > position + wg * 64 // G,
                    key <= end - 1 - WINDOW if WINDOWED else T.bool(False)):
                for i in T.unroll(SCORES):
                    at = T.meta_var(position + (row + i % 4 // 2 * 8) // G)
                    k = T.meta_var(key + i // 4 * 8 + lane % 4 * 2 + i % 2)
                    seen = T.meta_var(T.And(k <= at, k > at - WINDOW if WINDOWED else T.bool(True)))
                    score[i] = T.if_then_else(seen, score[i], T.float32("-inf"))

        @T.inline
        def softmax():
            if not shared_keys:
                mask()
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
            T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(2 * GROUP))

        @T.inline
        def next_turn():
            T.ptx["bar.arrive"](T.Cast("uint32", T.if_then_else(wg == CONSUMERS - 1, 1, wg + 2)),
                                T.uint32(2 * GROUP))

        @T.inline
        def to_prob():
            for i in T.unroll(SCORES // 2):
                T.ptx[PACK](prob[i], score[2 * i + 1], score[2 * i])

        @T.inline
        def store():
            # through this warp's own query rows, which nobody needs any more
            T.ptx["bar.sync"](T.Cast("uint32", wg + (CONSUMERS + 1)), T.uint32(GROUP))
            for r in T.unroll(2):
                for i in T.unroll(2):
                    total[r] = total[r] + shuffle_xor(total[r], 1 << i)
                factor[r] = T.float32(1) / total[r]
            for j in T.unroll(D // 16):
                for e in T.unroll(4):
                    T.ptx[PACK](word[e], acc[8 * j + 2 * e + 1] * factor[e % 2],
                                  acc[8 * j + 2 * e] * factor[e % 2])
                T.ptx[STMATRIX](memory.queries.ptr_to([q_stage, j // 4, wid * 16 + lane % 16,
                                                ((j % 4 * 2 + lane // 16) ^ lane % 8) * 8]),
                                word[0], word[1], word[2], word[3])
            T.cuda.warp_sync()
            for i in T.serial(CHUNKS // 2):
                r = T.meta_var(wid * 16 + (lane + 32 * i) // CHUNKS)
                c = T.meta_var((lane + 32 * i) % CHUNKS)
                T.ptx["ld.shared.v4.b32"](word[0], word[1], word[2], word[3],
                                          memory.queries.ptr_to([q_stage, c // 8, r, (c % 8 ^ r % 8) * 8]))
                if r // G < rows:
                    T.ptx["st.global.v4.b32"](y.ptr_to([start + r // G, (head * G + r % G) * D + c * 8]),
                                              word[0], word[1], word[2], word[3])
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warp_sync()
            release(memory.empty_q, q_stage)

        @T.inline
        def leave():
            for r in T.unroll(2):
                for i in T.unroll(2):
                    total[r] = total[r] + shuffle_xor(total[r], 1 << i)
                at = T.meta_var(row + r * 8)
                if at // G < rows:
                    for j in T.unroll(D // 8):
                        T.ptx["st.global.v2.f32"](
                            y[0].ptr_to([start + at // G, y[2], (head * G + at % G) * D + j * 8 + lane % 4 * 2]),
                            acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1])
                    if lane % 4 == 0:
                        y[1][start + at // G, y[2], head * G + at % G, 0] = top[r]
                        y[1][start + at // G, y[2], head * G + at % G, 1] = total[r]
            # Every lane for itself: racecheck does not take one lane's arrival for its warp's.
            T.ptx.mbarrier.arrive.shared.b64(memory.empty_q.ptr_to([q_stage]))

        @T.inline
        def enter():
            T.cuda.mbarrier_wait(memory.full_q.ptr_to([q_stage]), q_phase)
            rows = memory.info[q_stage, TOKENS_LEFT]

        q_desc = T.uint64(Q_DESC) + T.Cast("uint64", (T.cuda.cvta_generic_to_shared(
            memory.queries.ptr_to([0, 0, 0, 0])) >> T.uint32(4)) + T.Cast("uint32", wg * (64 * 8)))
        k_desc = T.uint64(K_DESC) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
            memory.keys.ptr_to([0, 0, 0, 0, 0])) >> T.uint32(4))
        v_desc = T.uint64(V_DESC) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
            memory.values.ptr_to([0, 0, 0, 0, 0])) >> T.uint32(4))
        if PING_PONG:
            if wg == CONSUMERS - 1:
                next_turn()                       # the first consumer begins
        enter()
        while rows > 0:
            start = memory.info[q_stage, START]
            position = memory.info[q_stage, POSITION]
            key = memory.info[q_stage, FIRST_KEY]
            head = memory.info[q_stage, HEAD]
            end = memory.info[q_stage, END] if shared_keys else position + rows
            for r in T.unroll(2):
                top[r] = T.float32(NEG_BIG)
                total[r] = T.float32(0)
            for i in T.unroll(OUT):
                acc[i] = T.float32(0)
            T.cuda.mbarrier_wait(memory.full_k.ptr_to([k_stage]), k_phase)
            if PING_PONG:
                my_turn()
            issue_scores(k_stage)
            if PING_PONG:
                next_turn()
            T.ptx.wgmma.wait_group.sync.aligned(0)
            pin(score, SCORES)
            release(memory.empty_k, k_stage)
            advance(k_stage, k_phase, STAGES)
            softmax()
            to_prob()
            key = key + KEYS
            while key < end:
                T.cuda.mbarrier_wait(memory.full_k.ptr_to([k_stage]), k_phase)
                if PING_PONG:
                    my_turn()
                issue_scores(k_stage)
                T.cuda.mbarrier_wait(memory.full_v.ptr_to([v_stage]), v_phase)
                issue_output(v_stage)
                if PING_PONG:
                    next_turn()
                T.ptx.wgmma.wait_group.sync.aligned(1)
                pin(score, SCORES)
                release(memory.empty_k, k_stage)
                advance(k_stage, k_phase, STAGES)
                softmax()
                T.cuda.func_call("weights_done", total[0], total[1], source_code=_WEIGHTS_DONE)
                T.ptx.wgmma.wait_group.sync.aligned(0)
                pin(acc, OUT)
                release(memory.empty_v, v_stage)
                advance(v_stage, v_phase, STAGES)
                for i in T.unroll(OUT):
                    acc[i] = acc[i] * factor[i % 4 // 2]
                to_prob()
                key = key + KEYS
            T.cuda.mbarrier_wait(memory.full_v.ptr_to([v_stage]), v_phase)
            issue_output(v_stage)
            T.ptx.wgmma.wait_group.sync.aligned(0)
            pin(acc, OUT)
            release(memory.empty_v, v_stage)
            advance(v_stage, v_phase, STAGES)
            if shared_keys:
                leave()
            else:
                store()
            advance(q_stage, q_phase, QUERY_STAGES)
            enter()
        if PING_PONG:
            if wg == 0:
                my_turn()                         # take the turn that is left over

    return attend_tiles
