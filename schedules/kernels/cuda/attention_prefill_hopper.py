"""Paged prefill attention for Hopper (sm_90a): TMA fetches pages, wgmma multiplies, softmax overlaps with the matmuls.

Each consumer warpgroup owns 64 query rows of a tile (a token's query heads of one KV head are neighbouring rows); one
warp of the last warpgroup finds the tiles, fetches queries, keys and values into 128-byte-swizzled shared memory, one
bulk copy a page, and announces them on mbarriers. A consumer issues the scores of the next key tile before the output
product of the current one and computes the softmax of the former while the latter runs. Blocks are persistent: the
next tile is fetched while the current one ends. `attention_prefill.py` is the version for other cards and page sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.common import device
from relaxpack.schedules.kernels.cuda.fragments import (
    AWAIT,
    EXP2,
    FULL_MASK,
    LOG2_E,
    NEG_BIG,
    RELEASE,
    SHORT,
    pack,
    shuffle,
    shuffle_up,
    shuffle_xor,
)
from tvm.script import tirx as T

SHARED_LIMIT = 227 * 1024
GROUP = 128                       # threads of a warpgroup
INFO = 8                          # words that describe a tile of queries to the consumers
START, TOKENS_LEFT, POSITION, FIRST_KEY, HEAD = range(5)
SWIZZLE_128, PROMOTE_128 = 3, 2
# shared-memory matrix descriptor of rows of 64 elements (128 bytes), 128-byte swizzle, without address and strides
SWIZZLED = 1 << 62
TMA_LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
_GRID = """
__device__ __forceinline__ int grid_size() { return gridDim.x; }
"""
_WARP_SUM = """
__device__ __forceinline__ int warp_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }
"""
_WARP_MAX = """
__device__ __forceinline__ int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
"""
_FENCE = """
__device__ __forceinline__ void wgmma_pin(float& r) { asm volatile("" : "+f"(r) :: "memory"); }
"""
# The end of a basic block that needs every weight (their sum is never negative): without one ptxas moves the wait for
# the output product to before the softmax, and they no longer overlap.
_WEIGHTS_DONE = """
__device__ __forceinline__ void weights_done(float a, float b) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p exit; }" : : "f"(a + b) : "memory"); }
"""


@dataclass(frozen=True)
class HopperTuning:
    """The search space. `keys` of a tile, `stages` of key and value tiles, `query_stages` of query tiles; `packed`: the
    query heads of a KV head share a tile; `blocks`: persistent blocks, 0 for one a tile; `ping_pong`: the consumers issue
    their matmuls in turns, so that one's softmax meets the other's."""

    consumers: int = 2
    keys: int = 128
    stages: int = 2
    query_stages: int = 2
    packed: bool = True
    blocks: int = 132
    ping_pong: bool = True

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * GROUP

    def tokens(self, spec: AttentionSpec) -> int:
        """Tokens of a tile of queries."""
        return self.rows // (spec.num_heads // spec.num_kv_heads) if self.packed else self.rows

    def grid(self, spec: AttentionSpec, t: Any, sequences: Any, least: Any = min) -> Any:
        """Number of blocks for `t` tokens of so many sequences."""
        tiles = ((t + self.tokens(spec) - 1) // self.tokens(spec) + sequences) * (
            spec.num_kv_heads if self.packed else spec.num_heads)
        return least(tiles, self.blocks) if self.blocks else tiles


def supported(spec: AttentionSpec) -> bool:
    return not spec.fp8 and spec.head_dim in (64, 128, 256) and fits(spec, default_tuning(spec))


def fits(spec: AttentionSpec, tuning: HopperTuning) -> bool:
    """Whether a tile of keys is whole boxes of 8-row groups of pages, and accumulators and tiles have room."""
    size, keys = spec.page_size, tuning.keys
    boxes = size % 8 == 0 and keys // min(size, keys) <= 32 and (keys % size == 0 or size % keys == 0)
    registers = spec.head_dim // 2 + keys // 2 + keys // 4 + 30
    group = spec.num_heads // spec.num_kv_heads
    return (boxes and registers <= (232 if tuning.consumers == 2 else 160) and not (tuning.packed and group > tuning.rows)
            and shared_bytes(spec, tuning) <= SHARED_LIMIT)


def default_tuning(spec: AttentionSpec) -> HopperTuning:
    if spec.head_dim == 256:
        return HopperTuning(keys=64, query_stages=1)
    return HopperTuning(consumers=3 if spec.head_dim == 64 else 2)


def default_for_few(spec: AttentionSpec) -> tuple[int, HopperTuning] | None:
    """Narrower tiles while they do not fill the multiprocessors once."""
    narrow = HopperTuning()
    if spec.head_dim != 64 or not fits(spec, narrow):
        return None
    return narrow.blocks * narrow.rows // spec.num_heads, narrow


def shared_bytes(spec: AttentionSpec, tuning: HopperTuning) -> int:
    rows = tuning.query_stages * tuning.rows + 2 * tuning.stages * tuning.keys
    return rows * spec.head_dim * 2 + (8 + 8 + 4 * INFO) * tuning.query_stages + 8 * (4 * tuning.stages + 1)


def _body(spec: AttentionSpec, tuning: HopperTuning) -> Any:
    D, H, KV, PS = spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size
    L = spec.num_layers
    KEYS, HALVES, STAGES, QUERY_STAGES = tuning.keys, D // 64, tuning.stages, tuning.query_stages
    CONSUMERS, ROWS, TOKENS = tuning.consumers, tuning.rows, tuning.tokens(spec)
    GROUPED = H // KV
    G, HEADS = (GROUPED, KV) if tuning.packed else (1, H)  # query heads of a tile, tiles of the same tokens
    BOX = min(PS, KEYS)                                    # keys of one copy
    BOXES = KEYS // BOX
    BOX_BYTES, QUERY_BYTES = BOX * D * 2, TOKENS * G * D * 2
    PRODUCER = CONSUMERS * 4                               # the warp that fetches
    act, kv = spec.activation_dtype, spec.kv_dtype
    short = SHORT[kv]
    PING_PONG = tuning.ping_pong
    WINDOWED, WINDOW = spec.window is not None, spec.window or 0
    SCALE = spec.scale * LOG2_E
    QK = f"wgmma.mma_async.sync.aligned.m64n{KEYS}k16.f32.{short}.{short}"
    PV = f"wgmma.mma_async.sync.aligned.m64n{D}k16.f32.{short}.{short}"
    PACK_P, PACK_Y = pack(kv), pack(act)
    SCORES, OUT = KEYS // 2, D // 2                        # accumulators per thread
    CHUNKS = D // 8                                        # 16-byte chunks of a row
    # Keys and values lie as [group of 8 rows][half][row][64]. Units of 16 bytes: 8 rows of a half are 64.
    Q_DESC = SWIZZLED | 64 << 32 | 1 << 16
    K_DESC = SWIZZLED | 64 * HALVES << 32 | 1 << 16
    V_DESC = SWIZZLED | 64 * HALVES << 32 | 64 << 16       # the leading field leads from one half to the next
    STAGE16, QUERY16 = KEYS * D * 2 // 16, ROWS * D * 2 // 16
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = (40, 232) if CONSUMERS == 2 else (32, 160)
    assert fits(spec, tuning) and CONSUMERS in (2, 3)

    def registers(buffer: Any, count: int) -> list[Any]:
        return [buffer[i] for i in range(count)]

    def warp_sum(value: Any) -> Any:
        return T.cuda.func_call("warp_sum", value, source_code=_WARP_SUM, return_type="int32")

    def warp_max(value: Any) -> Any:
        return T.cuda.func_call("warp_max", value, source_code=_WARP_MAX, return_type="int32")

    def live(lane: Any, first: Any, length: Any, low: Any) -> Any:
        """Whether a lane of the producer fetches a box of the keys from `first` on."""
        at = first + lane * BOX
        inside = T.And(lane < BOXES, at < length)
        return T.And(inside, at + BOX > low) if WINDOWED else inside

    @T.inline
    def body(q, layer, pages, page_table, query_start, lengths, y, t, b, p):
        q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", q_map, act, 4, q.data, 64, H, t, HALVES, D * 2, H * D * 2, 128,
                      64, G, TOKENS, 1, 1, 1, 1, 1, 0, SWIZZLE_128, PROMOTE_128, 0)
        # the pages as [groups of 8 rows][half][row][64]: a box of any number of groups arrives as wgmma reads it
        page_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", page_map, kv, 4, pages.data,
                      64, 8, HALVES, L * p * (2 * KV * PS // 8), D * 2, 128, D * 16,
                      64, 8, HALVES, BOX // 8, 1, 1, 1, 1, 0, SWIZZLE_128, PROMOTE_128, 0)
        with device():
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            bx = T.cta_id([T.Cast("int32", tuning.grid(spec, t, b, T.min))])
            wid = T.warp_id([(CONSUMERS + 1) * 4])
            tx = T.thread_id([(CONSUMERS + 1) * GROUP])
            pool = T.SMEMPool()
            queries = pool.alloc((QUERY_STAGES, HALVES, ROWS, 64), act, align=1024)
            keys = pool.alloc((STAGES, KEYS // 8, HALVES, 8, 64), kv, align=1024)
            values = pool.alloc((STAGES, KEYS // 8, HALVES, 8, 64), kv, align=1024)
            full_q = pool.alloc((QUERY_STAGES,), "uint64", align=8)
            empty_q = pool.alloc((QUERY_STAGES,), "uint64", align=8)
            full_k = pool.alloc((STAGES,), "uint64", align=8)
            empty_k = pool.alloc((STAGES,), "uint64", align=8)
            full_v = pool.alloc((STAGES + 1,), "uint64", align=8)      # the last one: a tile whose unseen rows become zeros
            empty_v = pool.alloc((STAGES,), "uint64", align=8)
            info = pool.alloc((QUERY_STAGES, INFO), "int32", align=16)
            pool.commit()
            lane = T.meta_var(tx % 32)
            key: T.int32
            end: T.int32
            rows: T.int32
            position: T.int32
            start: T.int32
            head: T.int32
            q_stage: T.int32
            q_phase: T.int32
            k_stage: T.int32
            k_phase: T.int32
            v_stage: T.int32
            v_phase: T.int32

            @T.inline
            def advance(stage, phase, stages):
                stage = stage + 1
                if stage == stages:
                    stage = 0
                    phase = phase ^ 1

            if tx == 0:
                T.ptx["prefetch.tensormap"](T.address_of(q_map))
                T.ptx["prefetch.tensormap"](T.address_of(page_map))
                for s in T.unroll(QUERY_STAGES):
                    T.ptx.mbarrier.init.shared.b64(full_q.ptr_to([s]), T.uint32(1))
                    T.ptx.mbarrier.init.shared.b64(empty_q.ptr_to([s]), T.uint32(CONSUMERS * 4))
                for s in T.unroll(STAGES):
                    T.ptx.mbarrier.init.shared.b64(full_k.ptr_to([s]), T.uint32(1))
                    T.ptx.mbarrier.init.shared.b64(empty_k.ptr_to([s]), T.uint32(CONSUMERS * 4))
                    T.ptx.mbarrier.init.shared.b64(empty_v.ptr_to([s]), T.uint32(CONSUMERS * 4))
                for s in T.unroll(STAGES + 1):
                    T.ptx.mbarrier.init.shared.b64(full_v.ptr_to([s]), T.uint32(1))
                T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
            q_stage = 0
            q_phase = 0
            k_stage = 0
            k_phase = 0
            v_stage = 0
            v_phase = 0
            if wid >= PRODUCER:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS)
                if wid == PRODUCER:
                    sequences = T.meta_var(T.Cast("int32", b))
                    grid: T.int32
                    tiles: T.int32
                    tour: T.int32
                    order: T.int32
                    tile: T.int32
                    base: T.int32
                    count: T.int32
                    sum: T.int32
                    slot: T.int32
                    shorter: T.int32
                    longer: T.int32
                    middle: T.int32
                    seq: T.int32
                    first_query: T.int32
                    queries_here: T.int32
                    length_here: T.int32
                    length: T.int32
                    low: T.int32
                    page: T.int32
                    next_page: T.int32
                    bytes: T.uint32
                    edge_phase: T.int32

                    @T.inline
                    def scan():
                        # `count` becomes the tiles of sequence base + lane, `sum` their inclusive prefix within these 32
                        count = 0
                        length_here = 0
                        if base + lane < sequences:
                            first_query = query_start[base + lane]
                            queries_here = query_start[base + lane + 1] - first_query
                            length_here = lengths[base + lane]
                            count = (queries_here + (TOKENS - 1)) // TOKENS
                        sum = count
                        for i in T.unroll(5):
                            slot = shuffle_up(sum, 1 << i)
                            if lane >= (1 << i):
                                sum = sum + slot

                    @T.inline
                    def count_beyond(bound, result):
                        # tiles of this lane's sequence that see a key from `bound` tiles of keys on
                        result = T.max(count - T.max(bound * KEYS - (length_here - queries_here), 0) // TOKENS, 0)

                    @T.inline
                    def choose():
                        # the tile of rank `tile` by the number of keys it sees, among these 32 sequences
                        shorter = 0
                        longer = (warp_max(length_here) + TOKENS) // KEYS + 1
                        while longer - shorter > 1:
                            middle = (shorter + longer) // 2
                            count_beyond(middle, slot)
                            if warp_sum(slot) > tile:
                                shorter = middle
                            else:
                                longer = middle
                        count_beyond(longer, slot)
                        tile = tile - warp_sum(slot)
                        count_beyond(shorter, middle)                  # these tiles and longer ones
                        longer = middle - slot
                        sum = longer
                        for i in T.unroll(5):
                            slot = shuffle_up(sum, 1 << i)
                            if lane >= (1 << i):
                                sum = sum + slot
                        slot = T.Cast("int32", T.popcount(
                            T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", sum <= tile))))
                        tile = tile - shuffle(sum - longer, slot) + shuffle(count - middle, slot)

                    @T.inline
                    def locate():
                        base = 0
                        if sequences == 1:
                            slot = 0
                            tile = tiles - 1 - tile
                        else:
                            if sequences > 32:
                                scan()
                                while tile >= shuffle(sum, 31):
                                    tile = tile - shuffle(sum, 31)
                                    base = base + 32
                                    scan()
                            choose()
                        seq = base + slot
                        start = shuffle(first_query, slot) + tile * TOKENS
                        rows = shuffle(queries_here, slot) - tile * TOKENS
                        length = shuffle(length_here, slot)

                    @T.inline
                    def find_page(first):
                        next_page = 0
                        if T.And(live(lane, first, length, low), first < end):
                            next_page = page_table[seq, (first + lane * BOX) // PS]

                    @T.inline
                    def fetch(which, first, id, buffer, stage, barrier, index):
                        bytes = T.Cast("uint32", T.popcount(T.cuda.ballot_sync(
                            T.uint32(FULL_MASK), T.Cast("int32", live(lane, first, length, low))))) * T.uint32(BOX_BYTES)
                        if lane == 0:
                            T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier.ptr_to([index]), bytes)
                        T.cuda.warp_sync()
                        if live(lane, first, length, low):
                            of_page = T.meta_var(((layer * p + T.Cast("int64", id)) * 2 + which) * KV
                                                 + T.Cast("int64", head * G // GROUPED))
                            T.ptx[TMA_LOAD](buffer.ptr_to([stage, lane * (BOX // 8), 0, 0, 0]), T.address_of(page_map),
                                            0, 0, 0,
                                            T.Cast("int32", of_page * (PS // 8) + T.Cast("int64", first % PS // 8)),
                                            barrier.ptr_to([index]))

                    @T.inline
                    def fetch_keys(first, id):
                        T.cuda.mbarrier_wait(empty_k.ptr_to([k_stage]), k_phase ^ 1)
                        fetch(0, first, id, keys, k_stage, full_k, k_stage)
                        advance(k_stage, k_phase, STAGES)

                    @T.inline
                    def fetch_values(first, id):
                        T.cuda.mbarrier_wait(empty_v.ptr_to([v_stage]), v_phase ^ 1)
                        if T.Or(first + KEYS > length, first < low if WINDOWED else T.bool(False)):
                            # Nobody sees some rows; their weight is 0, but 0 * NaN would be NaN.
                            fetch(1, first, id, values, v_stage, full_v, STAGES)
                            T.cuda.mbarrier_wait(full_v.ptr_to([STAGES]), edge_phase)
                            edge_phase = edge_phase ^ 1
                            for i in T.serial(KEYS * CHUNKS // 32):
                                r = T.meta_var((lane + 32 * i) // CHUNKS)
                                c = T.meta_var((lane + 32 * i) % CHUNKS)
                                if T.Or(first + r >= length, first + r < low if WINDOWED else T.bool(False)):
                                    T.ptx["st.shared.v4.b32"](values.ptr_to([v_stage, r // 8, c // 8, r % 8, c % 8 * 8]),
                                                              T.uint32(0), T.uint32(0), T.uint32(0), T.uint32(0))
                            T.ptx.fence.proxy.async_.shared__cta()
                            T.cuda.warp_sync()
                            if lane == 0:
                                T.ptx.mbarrier.arrive.shared.b64(full_v.ptr_to([v_stage]))
                        else:
                            fetch(1, first, id, values, v_stage, full_v, v_stage)
                        advance(v_stage, v_phase, STAGES)

                    # not the expression of the launch: the host would pass its value as one more argument
                    grid = T.cuda.func_call("grid_size", source_code=_GRID, return_type="int32")
                    first_query = 0
                    queries_here = 0
                    tiles = 0
                    base = 0
                    while base < sequences:
                        scan()
                        tiles = tiles + shuffle(sum, 31)
                        base = base + 32
                    edge_phase = 0
                    tour = 0
                    order = bx
                    while order < tiles * HEADS:
                        # Long tiles come first, heads of one KV head are neighbours in time.
                        head = order % HEADS
                        tile = order // HEADS
                        locate()
                        position = length - rows                       # of the first token of this tile
                        rows = T.min(rows, TOKENS)
                        end = position + rows                          # no token here sees a key from `end` on
                        low = T.max(position - (WINDOW - 1), 0) if WINDOWED else T.int32(0)
                        key = low // KEYS * KEYS
                        find_page(key)
                        page = next_page
                        T.cuda.mbarrier_wait(empty_q.ptr_to([q_stage]), q_phase ^ 1)
                        if lane == 0:
                            info[q_stage, START] = start
                            info[q_stage, TOKENS_LEFT] = rows
                            info[q_stage, POSITION] = position
                            info[q_stage, FIRST_KEY] = key
                            info[q_stage, HEAD] = head
                            T.ptx.mbarrier.arrive.expect_tx.shared.b64(full_q.ptr_to([q_stage]), T.uint32(QUERY_BYTES))
                            for h in T.unroll(HALVES):
                                T.ptx[TMA_LOAD](queries.ptr_to([q_stage, h, 0, 0]), T.address_of(q_map),
                                                0, head * G, start, h, full_q.ptr_to([q_stage]))
                        advance(q_stage, q_phase, QUERY_STAGES)
                        fetch_keys(key, page)
                        while key < end:
                            find_page(key + KEYS)
                            if key + KEYS < end:
                                fetch_keys(key + KEYS, next_page)
                            fetch_values(key, page)
                            page = next_page
                            key = key + KEYS
                        tour = tour + 1
                        order = tour * grid + T.if_then_else(tour % 2 == 0, bx, grid - 1 - bx)     # evens out the lengths
                    T.cuda.mbarrier_wait(empty_q.ptr_to([q_stage]), q_phase ^ 1)
                    if lane == 0:
                        info[q_stage, TOKENS_LEFT] = 0
                        T.ptx.mbarrier.arrive.shared.b64(full_q.ptr_to([q_stage]))
            else:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](CONSUMER_REGISTERS)
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
                def softmax():
                    if T.Or(key + (KEYS - 1) > position + wg * 64 // G,
                            key <= end - 1 - WINDOW if WINDOWED else T.bool(False)):
                        for i in T.unroll(SCORES):
                            at = T.meta_var(position + (row + i % 4 // 2 * 8) // G)
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
                    T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(2 * GROUP))

                @T.inline
                def next_turn():
                    T.ptx["bar.arrive"](T.Cast("uint32", T.if_then_else(wg == CONSUMERS - 1, 1, wg + 2)),
                                        T.uint32(2 * GROUP))

                @T.inline
                def to_prob():
                    for i in T.unroll(SCORES // 2):
                        T.ptx[PACK_P](prob[i], score[2 * i + 1], score[2 * i])

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
                            T.ptx[PACK_Y](word[e], acc[8 * j + 2 * e + 1] * factor[e % 2],
                                          acc[8 * j + 2 * e] * factor[e % 2])
                        T.ptx[STMATRIX](queries.ptr_to([q_stage, j // 4, wid * 16 + lane % 16,
                                                        ((j % 4 * 2 + lane // 16) ^ lane % 8) * 8]),
                                        word[0], word[1], word[2], word[3])
                    T.cuda.warp_sync()
                    for i in T.serial(CHUNKS // 2):
                        r = T.meta_var(wid * 16 + (lane + 32 * i) // CHUNKS)
                        c = T.meta_var((lane + 32 * i) % CHUNKS)
                        T.ptx["ld.shared.v4.b32"](word[0], word[1], word[2], word[3],
                                                  queries.ptr_to([q_stage, c // 8, r, (c % 8 ^ r % 8) * 8]))
                        if r // G < rows:
                            T.ptx["st.global.v4.b32"](y.ptr_to([start + r // G, (head * G + r % G) * D + c * 8]),
                                                      word[0], word[1], word[2], word[3])
                    T.ptx.fence.proxy.async_.shared__cta()
                    T.cuda.warp_sync()
                    release(empty_q, q_stage)

                @T.inline
                def enter():
                    T.cuda.mbarrier_wait(full_q.ptr_to([q_stage]), q_phase)
                    rows = info[q_stage, TOKENS_LEFT]

                q_desc = T.uint64(Q_DESC) + T.Cast("uint64", (T.cuda.cvta_generic_to_shared(
                    queries.ptr_to([0, 0, 0, 0])) >> T.uint32(4)) + T.Cast("uint32", wg * (64 * 8)))
                k_desc = T.uint64(K_DESC) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
                    keys.ptr_to([0, 0, 0, 0, 0])) >> T.uint32(4))
                v_desc = T.uint64(V_DESC) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
                    values.ptr_to([0, 0, 0, 0, 0])) >> T.uint32(4))
                if PING_PONG:
                    if wg == CONSUMERS - 1:
                        next_turn()                       # the first consumer begins
                enter()
                while rows > 0:
                    start = info[q_stage, START]
                    position = info[q_stage, POSITION]
                    key = info[q_stage, FIRST_KEY]
                    head = info[q_stage, HEAD]
                    end = position + rows
                    for r in T.unroll(2):
                        top[r] = T.float32(NEG_BIG)
                        total[r] = T.float32(0)
                    for i in T.unroll(OUT):
                        acc[i] = T.float32(0)
                    T.cuda.mbarrier_wait(full_k.ptr_to([k_stage]), k_phase)
                    if PING_PONG:
                        my_turn()
                    issue_scores(k_stage)
                    if PING_PONG:
                        next_turn()
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    pin(score, SCORES)
                    release(empty_k, k_stage)
                    advance(k_stage, k_phase, STAGES)
                    softmax()
                    to_prob()
                    key = key + KEYS
                    while key < end:
                        T.cuda.mbarrier_wait(full_k.ptr_to([k_stage]), k_phase)
                        if PING_PONG:
                            my_turn()
                        issue_scores(k_stage)
                        T.cuda.mbarrier_wait(full_v.ptr_to([v_stage]), v_phase)
                        issue_output(v_stage)
                        if PING_PONG:
                            next_turn()
                        T.ptx.wgmma.wait_group.sync.aligned(1)
                        pin(score, SCORES)
                        release(empty_k, k_stage)
                        advance(k_stage, k_phase, STAGES)
                        softmax()
                        T.cuda.func_call("weights_done", total[0], total[1], source_code=_WEIGHTS_DONE)
                        T.ptx.wgmma.wait_group.sync.aligned(0)
                        pin(acc, OUT)
                        release(empty_v, v_stage)
                        advance(v_stage, v_phase, STAGES)
                        for i in T.unroll(OUT):
                            acc[i] = acc[i] * factor[i % 4 // 2]
                        to_prob()
                        key = key + KEYS
                    T.cuda.mbarrier_wait(full_v.ptr_to([v_stage]), v_phase)
                    issue_output(v_stage)
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    pin(acc, OUT)
                    release(empty_v, v_stage)
                    advance(v_stage, v_phase, STAGES)
                    store()
                    advance(q_stage, q_phase, QUERY_STAGES)
                    enter()
                if PING_PONG:
                    if wg == 0:
                        my_turn()                         # take the turn that is left over

    return body


def function(spec: AttentionSpec, tuning: HopperTuning, few: tuple[int, HopperTuning] | None = None) -> Any:
    """`few`: another tuning for at most so many tokens; the host decides."""
    H, KV, PS, MP, L, D = (spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages, spec.num_layers, spec.head_dim)
    act, kv = spec.activation_dtype, spec.kv_dtype
    body = _body(spec, tuning)
    LIMIT, few_body = (few[0], _body(spec, few[1])) if few else (0, body)

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
        if LIMIT > 0:
            if t <= LIMIT:
                few_body(q, layer, pages, page_table, query_start, lengths, y, t, b, p)
            else:
                body(q, layer, pages, page_table, query_start, lengths, y, t, b, p)
        else:
            body(q, layer, pages, page_table, query_start, lengths, y, t, b, p)

    return prefill_attention
