"""The warp that fetches in Hopper's prefill attention: it finds the tiles of queries of its block, longest first, describes
them to the consumers, and brings queries, keys and values into shared memory, one bulk copy a page.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_memory import (
    FIRST_KEY,
    HEAD,
    POSITION,
    RAW_END,
    RAW_KEYS,
    RAW_VALUES,
    START,
    TMA_LOAD,
    TOKENS_LEFT,
    PrefillMemory,
    advance,
)
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import HopperTuning
from relaxpack.schedules.kernels.cuda.fragments import FULL_MASK, shuffle, shuffle_up
from tvm.script import tirx as T

_GRID = """
__device__ __forceinline__ int grid_size() { return gridDim.x; }
"""
_WARP_SUM = """
__device__ __forceinline__ int warp_sum(int x) { return __reduce_add_sync(0xffffffffu, x); }
"""
_WARP_MAX = """
__device__ __forceinline__ int warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
"""


def warp_sum(value: Any) -> Any:
    return T.cuda.func_call("warp_sum", value, source_code=_WARP_SUM, return_type="int32")


def warp_max(value: Any) -> Any:
    return T.cuda.func_call("warp_max", value, source_code=_WARP_MAX, return_type="int32")


def copy_tile(spec: AttentionSpec, tuning: HopperTuning) -> Any:
    """Inline: the keys (`which` 0) or values (1) from `first` on → stage of a buffer. `live`: whether a lane has a box of
    them, `id`: in which page; `barrier` gets the bytes."""
    KV, PS = spec.num_kv_heads, spec.page_size
    BOX = min(PS, tuning.keys)                             # keys of one copy
    BOX_BYTES = BOX * spec.head_dim * spec.kv_item_bytes

    @T.inline
    def copy(page_map, layer, p, kv_head, which, first, id, live, lane, bytes, buffer, stage, barrier, index):
        bytes = T.Cast("uint32", T.popcount(T.cuda.ballot_sync(
            T.uint32(FULL_MASK), T.Cast("int32", live)))) * T.uint32(BOX_BYTES)
        if lane == 0:
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier.ptr_to([index]), bytes)
        T.cuda.warp_sync()
        if live:
            of_page = T.meta_var(((layer * p + T.Cast("int64", id)) * 2 + which) * KV + T.Cast("int64", kv_head))
            T.ptx[TMA_LOAD](buffer.ptr_to([stage, lane * (BOX // 8), 0, 0, 0]), T.address_of(page_map),
                            0, 0, 0,
                            T.Cast("int32", of_page * (PS // 8) + T.Cast("int64", first % PS // 8)),
                            barrier.ptr_to([index]))

    return copy


def fetch_tiles(spec: AttentionSpec, tuning: HopperTuning) -> Any:
    """Inline: the whole work of the warp. Scalars from `key` on are the kernel's, which the consumers have too."""
    D, KV, PS = spec.head_dim, spec.num_kv_heads, spec.page_size
    KEYS, HALVES, STAGES, QUERY_STAGES = tuning.keys, D // 64, tuning.stages, tuning.query_stages
    TOKENS, GROUPED = tuning.tokens(spec), spec.num_heads // KV
    G, HEADS = (GROUPED, KV) if tuning.packed else (1, spec.num_heads)   # query heads of a tile, tiles of the same tokens
    BOX = min(PS, KEYS)                                    # keys of one copy
    BOXES = KEYS // BOX
    QUERY_BYTES = TOKENS * G * D * 2
    WINDOWED, WINDOW = spec.window is not None, spec.window or 0
    CHUNKS = D // 8                                        # 16-byte chunks of a row
    FP8, RAW_STAGES, copy = spec.fp8, tuning.raw_stages, copy_tile(spec, tuning)

    def live(lane: Any, first: Any, length: Any, low: Any) -> Any:
        """Whether a lane fetches a box of the keys from `first` on."""
        at = first + lane * BOX
        inside = T.And(lane < BOXES, at < length)
        return T.And(inside, at + BOX > low) if WINDOWED else inside

    @T.inline
    def fetch_tiles(memory: PrefillMemory, q_map, page_map, layer, page_table, query_start, lengths, b, p, bx, lane,
                    key, end, rows, position, start, head, q_stage, q_phase, k_stage, k_phase, v_stage, v_phase):
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
            copy(page_map, layer, p, head * G // GROUPED, which, first, id, live(lane, first, length, low), lane, bytes,
                 buffer, stage, barrier, index)

        @T.inline
        def fetch_raw(which, first, id):
            # the place in this ring is that of the keys, which e4m3 numbers do not reach from here
            T.cuda.mbarrier_wait(memory.empty_raw.ptr_to([k_stage]), k_phase ^ 1)
            if lane == 0:
                memory.raw_kind[k_stage] = which
            fetch(which, first, id, memory.raw, k_stage, memory.full_raw, k_stage)
            advance(k_stage, k_phase, RAW_STAGES)

        @T.inline
        def fetch_keys(first, id):
            T.cuda.mbarrier_wait(memory.empty_k.ptr_to([k_stage]), k_phase ^ 1)
            fetch(0, first, id, memory.keys, k_stage, memory.full_k, k_stage)
            advance(k_stage, k_phase, STAGES)

        @T.inline
        def fetch_values(first, id):
            T.cuda.mbarrier_wait(memory.empty_v.ptr_to([v_stage]), v_phase ^ 1)
            if T.Or(first + KEYS > length, first < low if WINDOWED else T.bool(False)):
                # Nobody sees some rows; their weight is 0, but 0 * NaN would be NaN.
                fetch(1, first, id, memory.values, v_stage, memory.full_v, STAGES)
                T.cuda.mbarrier_wait(memory.full_v.ptr_to([STAGES]), edge_phase)
                edge_phase = edge_phase ^ 1
                for i in T.serial(KEYS * CHUNKS // 32):
                    r = T.meta_var((lane + 32 * i) // CHUNKS)
                    c = T.meta_var((lane + 32 * i) % CHUNKS)
                    if T.Or(first + r >= length, first + r < low if WINDOWED else T.bool(False)):
                        T.ptx["st.shared.v4.b32"](memory.values.ptr_to([v_stage, r // 8, c // 8, r % 8, c % 8 * 8]),
                                                  T.uint32(0), T.uint32(0), T.uint32(0), T.uint32(0))
                T.ptx.fence.proxy.async_.shared__cta()
                T.cuda.warp_sync()
                if lane == 0:
                    T.ptx.mbarrier.arrive.shared.b64(memory.full_v.ptr_to([v_stage]))
            else:
                fetch(1, first, id, memory.values, v_stage, memory.full_v, v_stage)
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
            T.cuda.mbarrier_wait(memory.empty_q.ptr_to([q_stage]), q_phase ^ 1)
            if lane == 0:
                memory.info[q_stage, START] = start
                memory.info[q_stage, TOKENS_LEFT] = rows
                memory.info[q_stage, POSITION] = position
                memory.info[q_stage, FIRST_KEY] = key
                memory.info[q_stage, HEAD] = head
                T.ptx.mbarrier.arrive.expect_tx.shared.b64(memory.full_q.ptr_to([q_stage]), T.uint32(QUERY_BYTES))
                for h in T.unroll(HALVES):
                    T.ptx[TMA_LOAD](memory.queries.ptr_to([q_stage, h, 0, 0]), T.address_of(q_map),
                                    0, head * G, start, h, memory.full_q.ptr_to([q_stage]))
            advance(q_stage, q_phase, QUERY_STAGES)
            if FP8:
                fetch_raw(RAW_KEYS, key, page)
            else:
                fetch_keys(key, page)
            while key < end:
                find_page(key + KEYS)
                if key + KEYS < end:
                    if FP8:
                        fetch_raw(RAW_KEYS, key + KEYS, next_page)
                    else:
                        fetch_keys(key + KEYS, next_page)
                if FP8:
                    fetch_raw(RAW_VALUES, key, page)
                else:
                    fetch_values(key, page)
                page = next_page
                key = key + KEYS
            tour = tour + 1
            order = tour * grid + T.if_then_else(tour % 2 == 0, bx, grid - 1 - bx)     # evens out the lengths
        T.cuda.mbarrier_wait(memory.empty_q.ptr_to([q_stage]), q_phase ^ 1)
        if lane == 0:
            memory.info[q_stage, TOKENS_LEFT] = 0
            T.ptx.mbarrier.arrive.shared.b64(memory.full_q.ptr_to([q_stage]))
        if FP8:
            T.cuda.mbarrier_wait(memory.empty_raw.ptr_to([k_stage]), k_phase ^ 1)
            if lane == 0:
                memory.raw_kind[k_stage] = RAW_END
                T.ptx.mbarrier.arrive.shared.b64(memory.full_raw.ptr_to([k_stage]))

    return fetch_tiles
