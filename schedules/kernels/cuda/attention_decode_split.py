"""Stage one of the paged decode attention: every block takes its share of all (sequence, KV head, tile of keys).

Each warp runs its own cp.async ring over its part of a tile (`attention_decode_tile.py`: each key and value is read once
for all query heads of its KV head) and meets the others only where a (sequence, head) ends.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_decode_tile import DecodeTile, tile_range
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import DecodeTuning, shared_bytes
from relaxpack.schedules.kernels.cuda.fragments import (
    AWAIT,
    COMMIT,
    EXP2,
    FULL_MASK,
    RELEASE,
    WAIT,
    pack,
    shuffle,
    shuffle_up,
    shuffle_xor,
    without_parameters,
)
from tvm.script import tirx as T

ROW, HEAD, TILE, FIRST, LAST, LENGTH = range(6)     # a place in the order of work


def decode_split_function(spec: AttentionSpec, tuning: DecodeTuning, early: bool, shared_keys: bool, least: int) -> Any:
    """`shared_keys`: those of `shared` are left out, for `prefix` has what attention to them gives. `least`: bytes of shared
    memory that a block takes at least."""
    D, H, KV, PS, MP, L = (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages,
                           spec.num_layers)
    G, WARPS, STAGES, BLOCKS = H // KV, tuning.warps, tuning.stages, tuning.blocks
    act, kv, SHARED = spec.activation_dtype, spec.page_dtype, shared_keys
    THREADS, KEYS, TILE_KEYS = WARPS * 32, tuning.warp_keys, tuning.keys
    tile = DecodeTile(spec, tuning.key_tiles)
    COLS, NT, KS, ROW_CHUNKS = tile.columns, tile.columns // 8, tile.steps, tile.row_chunks
    AHEAD, PAGES, PASSES, CHUNKS = tile.ahead, tile.pages, tile.passes, tile.chunks
    PACK_Y = pack(act)
    SLOT = 2 * KEYS * ROW_CHUNKS * 4                                 # f32 words of a warp's part of a stage
    MS = D + 4 if COLS * (D + 4) <= SLOT else D                      # row stride there when outputs are merged
    first_tile, last_tile = tile_range(spec, TILE_KEYS)
    copy_rows, reset, attend, arrange, settle = tile.copy(), tile.reset(), tile.attend(), tile.arrange(), tile.settle()
    assert COLS * MS <= SLOT

    @T.prim_func
    def decode_split(q_h: T.handle, layer: T.int64, pages_h: T.handle, page_table_h: T.handle, lengths_h: T.handle,
                     shared_h: T.handle, prefix_h: T.handle, prefix_stats_h: T.handle, y_h: T.handle,
                     partial_h: T.handle, stats_h: T.handle, cuts_h: T.handle):
        t = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, H * D), act, align=16)
        pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
        page_table = T.match_buffer(page_table_h, (t, MP), "int32")
        lengths = T.match_buffer(lengths_h, (t,), "int32")
        shared = T.match_buffer(shared_h, (t,), "int32")
        prefix = T.match_buffer(prefix_h, (t, H * D), "float32", align=16)
        prefix_stats = T.match_buffer(prefix_stats_h, (t, H, 2), "float32")
        y = T.match_buffer(y_h, (t, H * D), act, align=16)
        partial = T.match_buffer(partial_h, (2 * BLOCKS, G * D), "float32", align=16)
        stats = T.match_buffer(stats_h, (2 * BLOCKS, 2, G), "float32")
        cuts = T.match_buffer(cuts_h, (BLOCKS, 4), "int32", align=16)
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})         # else ptxas spills a little for more blocks
        bx = T.cta_id([BLOCKS])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        ring = pool.alloc((WARPS, STAGES, 2, KEYS * ROW_CHUNKS, tile.unit), kv, align=128)
        warp_stats = pool.alloc((2, WARPS, COLS), "float32", align=16)
        pool.move_base_to(0)
        merge = pool.alloc((WARPS, STAGES, SLOT), "float32", align=128)      # the same bytes as the ring
        pool.commit(max(least, shared_bytes(spec, tuning)))

        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        rows = T.meta_var(T.Cast("int32", t))
        load_at = T.alloc_buffer((6,), "int32", scope="local")       # where the copies are
        at = T.alloc_buffer((6,), "int32", scope="local")            # where the arithmetic is
        acc = T.alloc_buffer((KS, NT, 4), "float32", scope="local")
        query = T.alloc_buffer((KS, NT, 2), "uint32", scope="local")
        words = T.alloc_buffer((1,), "uint32", scope="local")
        top = T.alloc_buffer((NT, 2), "float32", scope="local")      # running maximum, log2 units
        total = T.alloc_buffer((NT, 2), "float32", scope="local")    # this lane's share of the running sum
        page = T.alloc_buffer((PAGES,), "int32", scope="local")
        factor: T.float32
        weight: T.float32
        value: T.float32
        other: T.float32
        peak: T.float32
        count: T.int32
        sum: T.int32
        base: T.int32
        work: T.int32
        end: T.int32
        share: T.int32
        more: T.int32
        load_work: T.int32
        stage: T.int32
        whole: T.int32
        segment: T.int32
        slot: T.int32
        begin_tile: T.int32
        cut_row: T.int32
        cut_head: T.int32
        cut_slot: T.int32
        cut_count: T.int32

        @T.inline
        def find_row(place):
            place[LENGTH] = lengths[place[ROW]]
            place[LAST] = last_tile(place[LENGTH])
            if SHARED:
                place[FIRST] = shared[place[ROW]] // TILE_KEYS
            else:
                place[FIRST] = first_tile(place[LENGTH])

        @T.inline
        def scan():
            # `count` becomes the tiles of row base + lane, `sum` their inclusive prefix within these 32 rows
            count = 0
            if base + lane < rows:
                slot = lengths[base + lane]
                count = last_tile(slot) - first_tile(slot)
                if SHARED:
                    count = count - shared[base + lane] // TILE_KEYS
                count = count * KV
            sum = count
            for i in T.unroll(5):
                slot = shuffle_up(sum, 1 << i)
                if lane >= (1 << i):
                    sum = sum + slot

        @T.inline
        def enter_row(place):
            # skip rows without keys
            place[LENGTH] = 0
            while T.And(place[ROW] < rows, place[LENGTH] == 0):
                find_row(place)
                if place[LENGTH] == 0:
                    place[ROW] = place[ROW] + 1
            place[TILE] = place[FIRST]

        @T.inline
        def advance(place):
            place[TILE] = place[TILE] + 1
            if place[TILE] == place[LAST]:
                place[TILE] = place[FIRST]
                place[HEAD] = place[HEAD] + 1
                if place[HEAD] == KV:
                    place[HEAD] = 0
                    place[ROW] = place[ROW] + 1
                    enter_row(place)

        @T.inline
        def find_pages():
            if AHEAD:
                for j in T.unroll(PAGES):
                    base = load_at[TILE] * TILE_KEYS + warp * KEYS + j * PS
                    page[j] = 0
                    if T.And(load_work < end, base < load_at[LENGTH]):
                        page[j] = page_table[load_at[ROW], base // PS]

        @T.inline
        def copy(into):
            # this warp's keys and values of tile `load_at` → stage `into`; rows outside the range become zeros
            base = load_at[TILE] * TILE_KEYS + warp * KEYS
            if not AHEAD:
                for i in T.unroll(PASSES):
                    r = T.meta_var((lane + 32 * i) // CHUNKS)
                    page[i] = 0
                    if T.And(base + r < load_at[LENGTH], tile.visible(base + r, load_at[LENGTH])):
                        page[i] = page_table[load_at[ROW], (base + r) // PS]
            copy_rows(ring, warp, into, lane, pages, layer, page, load_at[HEAD], base, load_at[LENGTH], load_at[LENGTH])

        @T.inline
        def begin_segment():
            for n in T.unroll(NT):
                head = T.meta_var(n * 8 + lane // 4)
                for k in T.unroll(KS):
                    for j in T.unroll(2):
                        query[k, n, j] = T.uint32(0)
                if head < G:
                    for k in T.unroll(KS):
                        for j in T.unroll(2):
                            T.ptx["ld.global.nc.b32"](query[k, n, j], q.ptr_to(
                                [at[ROW], (at[HEAD] * G + head) * D + tile.query_at(2 * k + j, lane)]))
            arrange(query)
            reset(acc, top, total)
            begin_tile = at[TILE]
            if SHARED:
                # the first warp of a row's first part goes on where the attention to the shared keys ended
                if T.And(warp == 0, T.And(begin_tile == at[FIRST], begin_tile > 0)):
                    for n in T.unroll(NT):
                        for j in T.unroll(2):
                            head = T.meta_var(n * 8 + lane % 4 * 2 + j)
                            if head < G:
                                top[n, j] = prefix_stats[at[ROW], at[HEAD] * G + head, 0]
                                if lane < 4:
                                    total[n, j] = prefix_stats[at[ROW], at[HEAD] * G + head, 1]
                                for k in T.unroll(KS):
                                    for i in T.unroll(2):
                                        acc[k, n, 2 * i + j] = prefix[at[ROW], (
                                            at[HEAD] * G + head) * D + tile.output_at(2 * k + i, lane // 4)]

        @T.inline
        def block_of(result, place):
            # which block has this piece of work
            if place < more * (share + 1):
                result = place // (share + 1)
            else:
                result = more + (place - more * (share + 1)) // T.max(share, 1)

        @T.inline
        def end_segment(index):
            # every warp leaves its output, maximum and sum; stage `index`, just consumed, has room for the output
            settle(acc, total)
            for n in T.unroll(NT):
                for j in T.unroll(2):
                    for i in T.unroll(3):
                        total[n, j] = total[n, j] + shuffle_xor(total[n, j], 4 << i)
                    if lane < 4:
                        warp_stats[0, warp, n * 8 + lane * 2 + j] = top[n, j]
                        warp_stats[1, warp, n * 8 + lane * 2 + j] = total[n, j]
                for k in T.unroll(KS):
                    for j in T.unroll(4):
                        element = T.meta_var(tile.output_at(2 * k + j // 2, lane // 4))
                        merge[warp, index, (n * 8 + lane % 4 * 2 + j % 2) * MS + element] = acc[k, n, j]
            T.cuda.cta_sync()
            whole = T.if_then_else(T.And(begin_tile == at[FIRST], at[TILE] + 1 == at[LAST]), 1, 0)
            slot = 2 * bx + segment
            if T.And(whole == 0, begin_tile == at[FIRST]):
                block_of(cut_count, work + at[LAST] - (at[TILE] + 1) - 1)
                cut_count = cut_count - bx + 1
                cut_row = at[ROW]
                cut_head = at[HEAD]
                cut_slot = slot
            for i in T.unroll((G * D // 2 + THREADS - 1) // THREADS):
                e = T.meta_var((tx + i * THREADS) * 2)
                h = T.meta_var(e // D)
                if e < G * D:
                    peak = warp_stats[0, 0, h]
                    for w in T.unroll(WARPS - 1):
                        peak = T.max(peak, warp_stats[0, w + 1, h])
                    factor = T.float32(0)
                    value = T.float32(0)
                    other = T.float32(0)
                    for w in T.unroll(WARPS):
                        T.ptx[EXP2](weight, warp_stats[0, w, h] - peak)
                        factor = factor + weight * warp_stats[1, w, h]
                        value = value + weight * merge[w, index, h * MS + e % D]
                        other = other + weight * merge[w, index, h * MS + e % D + 1]
                    if whole == 1:
                        T.ptx[PACK_Y](words[0], other / factor, value / factor)
                        T.ptx["st.global.b32"](y.ptr_to([at[ROW], at[HEAD] * (G * D) + e]), words[0])
                    else:
                        partial[slot, e] = value
                        partial[slot, e + 1] = other
                        if e % D == 0:
                            stats[slot, 0, h] = peak
                            stats[slot, 1, h] = factor
            T.cuda.cta_sync()
            segment = 1

        if early:
            T.ptx[RELEASE]()
        # Before the wait only what no kernel of this step writes: lengths, page table, and keys of earlier steps.
        # find this block's share of the work
        work = 0
        base = 0
        while base < rows:
            scan()
            work = work + shuffle(sum, 31)
            base = base + 32
        share = work // BLOCKS
        more = work % BLOCKS
        end = (bx + 1) * share + T.min(bx + 1, more)
        work = bx * share + T.min(bx, more)
        cut_count = 0
        cut_row = 0
        cut_head = 0
        cut_slot = 0
        if work < end:
            at[ROW] = 0
            at[TILE] = work
            base = 0
            segment = 0
            while segment == 0:
                if rows > 32:
                    scan()
                slot = shuffle(sum, 31)
                if at[TILE] < slot:
                    # the row is here: as many lanes lie before it as have an inclusive prefix not beyond the place
                    at[ROW] = base + T.Cast("int32", T.popcount(
                        T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", sum <= at[TILE]))))
                    at[TILE] = at[TILE] - shuffle(sum - count, at[ROW] - base)
                    segment = 1
                else:
                    at[TILE] = at[TILE] - slot
                    base = base + 32
            find_row(at)
            at[HEAD] = at[TILE] // (at[LAST] - at[FIRST])
            at[TILE] = at[FIRST] + at[TILE] % (at[LAST] - at[FIRST])
            segment = 0
            for i in T.unroll(6):
                load_at[i] = at[i]
            load_work = work
            find_pages()
            for s in T.unroll(STAGES - 1):
                if load_work < end:
                    if early:
                        if load_at[TILE] + 1 == load_at[LAST]:
                            T.ptx[AWAIT]()                           # the tile has the new key
                    copy(s)
                    load_work = load_work + 1
                    advance(load_at)
                    find_pages()
                T.ptx[COMMIT]()
            if early:
                T.ptx[AWAIT]()
            begin_segment()
            stage = 0
            while work < end:
                T.ptx[WAIT](STAGES - 2)
                T.cuda.warp_sync()
                if load_work < end:
                    copy((stage + (STAGES - 1)) % STAGES)
                    load_work = load_work + 1
                    advance(load_at)
                    find_pages()
                T.ptx[COMMIT]()
                attend(ring, warp, stage, lane, at[TILE] * TILE_KEYS + warp * KEYS, at[LENGTH], query, acc, top, total)
                work = work + 1
                if T.Or(at[TILE] + 1 == at[LAST], work == end):
                    T.cuda.warp_sync()
                    end_segment(stage)
                    advance(at)
                    if work < end:
                        begin_segment()
                else:
                    at[TILE] = at[TILE] + 1
                stage = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
            T.ptx[WAIT](0)
        if early:
            T.ptx[AWAIT]()                                           # blocks without work too
        # what stage two needs to know, and rows without keys
        if tx == 0:
            cuts[bx, 0] = cut_row
            cuts[bx, 1] = cut_head
            cuts[bx, 2] = cut_slot
            cuts[bx, 3] = cut_count
        base = bx
        while base < rows:
            if lengths[base] == 0:
                for i in T.unroll((H * D + THREADS - 1) // THREADS):
                    if tx + i * THREADS < H * D:
                        y[base, tx + i * THREADS] = T.Cast(act, T.float32(0))
            base = base + BLOCKS

    return decode_split if SHARED else without_parameters(decode_split, "shared", "prefix", "prefix_stats")
