"""Paged decode attention for CUDA: one query token per sequence, split over keys with a fixed grid, then merged.

The work of a step is all (sequence, KV head, tile of keys) in order; every block takes an equal share of it whatever
the lengths are, so the grid is a constant, ragged batches balance, and the temporaries do not grow with the batch.
A block that ends up with a whole (sequence, head) writes the result; shares that were cut are merged by stage two.

All query heads of a KV head are computed together on tensor cores with the operands swapped (keys are the rows:
S' = K Q', O' = V' P'), so each key and value is read once. Each warp runs its own cp.async ring over a quarter of the
tile. The floor is the bytes of the keys and values over the read bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, Kernel, Stage
from relaxpack.schedules.kernels.cuda.fragments import (
    COMMIT,
    COPY16,
    EXP2,
    FULL_MASK,
    LDMATRIX,
    LDMATRIX_T,
    LOG2_E,
    NEG_BIG,
    SHORT,
    WAIT,
    check_dtypes,
    finish,
    mma,
    pack,
    shuffle,
    shuffle_up,
    shuffle_xor,
)
from tvm.script import tirx as T

KEYS = 16                    # keys of one warp in a tile
ROW, HEAD, TILE, LAST, LENGTH = range(5)        # a place in the order of work
MERGE_WARPS, MERGE_DEPTH = 8, 4


@dataclass(frozen=True)
class DecodeTuning:
    """The search space: `warps` x 16 keys are one tile, `stages` tiles are in flight, `blocks` is the grid."""

    warps: int
    stages: int
    blocks: int


def shared_bytes(spec: AttentionSpec, warps: int, stages: int) -> int:
    chunks = row_chunks(spec.head_dim)
    columns = head_columns(spec)
    return (warps * stages * 2 * KEYS * chunks * 16 + max(warps // 2, 1) * columns * (spec.head_dim + 4) * 4
            + 2 * warps * columns * 4)


def row_chunks(head_dim: int) -> int:
    """16-byte chunks a row of keys takes in shared memory: exact where XOR can spread them over the banks, else odd."""
    chunks = head_dim // 8
    return chunks if chunks % 8 == 0 else chunks | 1


def head_columns(spec: AttentionSpec) -> int:
    return -(-(spec.num_heads // spec.num_kv_heads) // 8) * 8


# shared memory per block and per multiprocessor, and multiprocessors of the card we expect
LIMITS = {"sm_80": (163, 164, 108), "sm_86": (99, 100, 84), "sm_89": (99, 100, 142), "sm_90": (227, 228, 132),
          "sm_90a": (227, 228, 132), "sm_100a": (227, 228, 148), "sm_120": (99, 100, 170)}


def default_tuning(spec: AttentionSpec, arch: str) -> DecodeTuning:
    block_kb, multiprocessor_kb, count = LIMITS[arch]
    warps = 4
    for stages in (4, 3, 2):
        size = shared_bytes(spec, warps, stages) / 1024
        if size <= block_kb and (size <= 106 or stages == 2):
            per_multiprocessor = max(1, min(4, int(multiprocessor_kb / (size + 1))))
            return DecodeTuning(warps, stages, count * per_multiprocessor)
    raise CompileError(f"decode attention: head_dim {spec.head_dim} does not fit the shared memory of {arch}")


def _place(spec: AttentionSpec, tile_keys: int) -> tuple[Any, Any, Any]:
    """first_tile(length), last_tile(length), tiles(length) as expressions over int32."""
    window = spec.window

    def first(length: Any) -> Any:
        return T.max(length - window, 0) // tile_keys if window is not None else T.int32(0)

    def last(length: Any) -> Any:
        return (length + (tile_keys - 1)) // tile_keys

    return first, last, lambda length: last(length) - first(length)


def _split(spec: AttentionSpec, tuning: DecodeTuning) -> Any:
    D, H, KV, PS, MP, L = (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages,
                           spec.num_layers)
    G, WARPS, STAGES, BLOCKS = H // KV, tuning.warps, tuning.stages, tuning.blocks
    act, kv = spec.activation_dtype, spec.kv_dtype
    THREADS, TILE_KEYS = WARPS * 32, WARPS * KEYS
    NT, COLS = head_columns(spec) // 8, head_columns(spec)          # tiles of 8 query heads
    CHUNKS, ROW_CHUNKS = D // 8, row_chunks(D)
    PASSES, KS = KEYS * CHUNKS // 32, D // 16
    COPIES_LEFT = KEYS * CHUNKS % 32
    SWIZZLE = CHUNKS % 8 == 0
    ONE_PAGE = PS % KEYS == 0                                        # the keys of a warp share a page
    WINDOWED, WINDOW = spec.window is not None, spec.window or 0
    SCALE = spec.scale * LOG2_E
    MMA, PACK_P, PACK_Y = mma(kv), pack(kv), pack(act)
    HALF, LOG_WARPS = max(WARPS // 2, 1), WARPS.bit_length() - 1
    MS = D + 4                                                       # row stride of the merge buffer, in f32
    first_tile, last_tile, tiles = _place(spec, TILE_KEYS)
    assert D % 16 == 0 and COPIES_LEFT == 0 and act == kv

    def chunk(row: Any, column: Any) -> Any:
        return row * ROW_CHUNKS + (column ^ (row % 8) if SWIZZLE else column)

    @T.prim_func
    def decode_split(q_h: T.handle, layer: T.int64, pages_h: T.handle, page_table_h: T.handle, lengths_h: T.handle,
                     done_h: T.handle, partial_h: T.handle, stats_h: T.handle, starts_h: T.handle):
        t = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, H * D), act, align=16)
        pages = T.match_buffer(pages_h, (L, p, 2, KV, PS, D), kv, align=16)
        page_table = T.match_buffer(page_table_h, (t, MP), "int32")
        lengths = T.match_buffer(lengths_h, (t,), "int32")
        done = T.match_buffer(done_h, (t, H * D), act, align=16)
        partial = T.match_buffer(partial_h, (2 * BLOCKS, G * D), "float32", align=16)
        stats = T.match_buffer(stats_h, (2 * BLOCKS, 2, G), "float32")
        starts = T.match_buffer(starts_h, (t,), "int32")
        T.device_entry()
        bx = T.cta_id([BLOCKS])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        ring = pool.alloc((WARPS, STAGES, 2, KEYS * ROW_CHUNKS, 8), kv, align=128)
        merge = pool.alloc((HALF, COLS, MS), "float32", align=16)
        warp_stats = pool.alloc((2, WARPS, COLS), "float32", align=16)
        pool.commit()

        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        rows = T.meta_var(T.Cast("int32", t))
        load_at = T.alloc_buffer((5,), "int32", scope="local")       # where the copies are
        at = T.alloc_buffer((5,), "int32", scope="local")            # where the arithmetic is
        score = T.alloc_buffer((NT, 4), "float32", scope="local")
        acc = T.alloc_buffer((KS, NT, 4), "float32", scope="local")
        query = T.alloc_buffer((KS, NT, 2), "uint32", scope="local")
        prob = T.alloc_buffer((NT, 2), "uint32", scope="local")
        frag = T.alloc_buffer((4,), "uint32", scope="local")
        top = T.alloc_buffer((NT, 2), "float32", scope="local")      # running maximum, log2 units
        total = T.alloc_buffer((NT, 2), "float32", scope="local")    # this lane's share of the running sum
        factor = T.alloc_buffer((NT, 2), "float32", scope="local")
        value: T.float32
        peak: T.float32
        count: T.int32
        sum: T.int32
        base: T.int32
        work: T.int32
        end: T.int32
        load_work: T.int32
        stage: T.int32
        page: T.int32
        whole: T.int32
        segment: T.int32
        slot: T.int32
        begin_tile: T.int32

        @T.inline
        def scan():
            # `count` becomes the tiles of row base + lane, `sum` their inclusive prefix within these 32 rows
            count = 0
            if base + lane < rows:
                count = tiles(lengths[base + lane]) * KV
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
                place[LENGTH] = lengths[place[ROW]]
                if place[LENGTH] == 0:
                    place[ROW] = place[ROW] + 1
            place[TILE] = first_tile(place[LENGTH])
            place[LAST] = last_tile(place[LENGTH])

        @T.inline
        def advance(place):
            place[TILE] = place[TILE] + 1
            if place[TILE] == place[LAST]:
                place[TILE] = first_tile(place[LENGTH])
                place[HEAD] = place[HEAD] + 1
                if place[HEAD] == KV:
                    place[HEAD] = 0
                    place[ROW] = place[ROW] + 1
                    enter_row(place)

        @T.inline
        def find_page():
            if ONE_PAGE:
                page = 0
                base = load_at[TILE] * TILE_KEYS + warp * KEYS
                if T.And(load_work < end, base < load_at[LENGTH]):
                    page = page_table[load_at[ROW], base // PS]

        @T.inline
        def copy(into):
            # this warp's keys and values of tile `load_at` → stage `into`; rows outside the range become zeros
            base = load_at[TILE] * TILE_KEYS + warp * KEYS
            for i in T.unroll(PASSES):
                r = T.meta_var((lane + 32 * i) // CHUNKS)
                c = T.meta_var((lane + 32 * i) % CHUNKS)
                live = T.meta_var(T.And(base + r < load_at[LENGTH],
                                        base + r >= load_at[LENGTH] - WINDOW if WINDOWED else T.bool(True)))
                if not ONE_PAGE:
                    page = 0
                    if live:
                        page = page_table[load_at[ROW], (base + r) // PS]
                bytes = T.meta_var(T.if_then_else(live, T.uint32(16), T.uint32(0)))
                for j in T.unroll(2):
                    T.ptx[COPY16](ring.ptr_to([warp, into, j, chunk(r, c), 0]),
                                  pages.ptr_to([layer, T.Cast("int64", page), j, T.Cast("int64", load_at[HEAD]),
                                                T.Cast("int64", (base + r) % PS), c * 8]), 16, bytes)

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
                                [at[ROW], (at[HEAD] * G + head) * D + k * 16 + j * 8 + lane % 4 * 2]))
                for j in T.unroll(2):
                    top[n, j] = T.float32(NEG_BIG)
                    total[n, j] = T.float32(0)
                for k in T.unroll(KS):
                    for j in T.unroll(4):
                        acc[k, n, j] = T.float32(0)
            begin_tile = at[TILE]

        @T.inline
        def compute(index):
            base = at[TILE] * TILE_KEYS + warp * KEYS
            for n in T.unroll(NT):
                for j in T.unroll(4):
                    score[n, j] = T.float32(0)
            for k in T.unroll(KS):
                T.ptx[LDMATRIX](frag[0], frag[1], frag[2], frag[3],
                                ring.ptr_to([warp, index, 0, chunk(lane % 16, 2 * k + lane // 16), 0]))
                for n in T.unroll(NT):
                    T.ptx[MMA](score[n, 0], score[n, 1], score[n, 2], score[n, 3], frag[0], frag[1], frag[2], frag[3],
                               query[k, n, 0], query[k, n, 1], score[n, 0], score[n, 1], score[n, 2], score[n, 3])
            for n in T.unroll(NT):
                for j in T.unroll(4):
                    key = T.meta_var(base + lane // 4 + j // 2 * 8)
                    live = T.meta_var(T.And(key < at[LENGTH],
                                            key >= at[LENGTH] - WINDOW if WINDOWED else T.bool(True)))
                    score[n, j] = T.if_then_else(live, score[n, j] * T.float32(SCALE), T.float32("-inf"))
                for j in T.unroll(2):
                    peak = T.max(score[n, j], score[n, j + 2])
                    for i in T.unroll(3):
                        peak = T.max(peak, shuffle_xor(peak, 4 << i))
                    peak = T.max(peak, top[n, j])
                    T.ptx[EXP2](factor[n, j], top[n, j] - peak)
                    top[n, j] = peak
                    T.ptx[EXP2](score[n, j], score[n, j] - peak)
                    T.ptx[EXP2](score[n, j + 2], score[n, j + 2] - peak)
                    total[n, j] = total[n, j] * factor[n, j] + score[n, j] + score[n, j + 2]
                for k in T.unroll(KS):
                    for j in T.unroll(4):
                        acc[k, n, j] = acc[k, n, j] * factor[n, j % 2]
                for j in T.unroll(2):
                    T.ptx[PACK_P](prob[n, j], score[n, 2 * j + 1], score[n, 2 * j])
                    T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](prob[n, j], prob[n, j])
            for k in T.unroll(KS):
                T.ptx[LDMATRIX_T](frag[0], frag[1], frag[2], frag[3], ring.ptr_to(
                    [warp, index, 1, chunk(lane % 8 + lane // 16 * 8, 2 * k + lane // 8 % 2), 0]))
                for n in T.unroll(NT):
                    T.ptx[MMA](acc[k, n, 0], acc[k, n, 1], acc[k, n, 2], acc[k, n, 3], frag[0], frag[1], frag[2],
                               frag[3], prob[n, 0], prob[n, 1], acc[k, n, 0], acc[k, n, 1], acc[k, n, 2], acc[k, n, 3])

        @T.inline
        def to_merge(part, adding):
            for n in T.unroll(NT):
                for k in T.unroll(KS):
                    for j in T.unroll(4):
                        d = T.meta_var(k * 16 + lane // 4 + j // 2 * 8)
                        h = T.meta_var(n * 8 + lane % 4 * 2 + j % 2)
                        if adding:
                            acc[k, n, j] = acc[k, n, j] + merge[part, h, d]
                        else:
                            merge[part, h, d] = acc[k, n, j]

        @T.inline
        def end_segment():
            # (a) the warps agree on maximum and sum
            for n in T.unroll(NT):
                for j in T.unroll(2):
                    for i in T.unroll(3):
                        total[n, j] = total[n, j] + shuffle_xor(total[n, j], 4 << i)
                    if lane < 4:
                        warp_stats[0, warp, n * 8 + lane * 2 + j] = top[n, j]
                        warp_stats[1, warp, n * 8 + lane * 2 + j] = total[n, j]
            T.cuda.cta_sync()
            whole = T.if_then_else(T.And(begin_tile == first_tile(at[LENGTH]), at[TILE] + 1 == at[LAST]), 1, 0)
            for n in T.unroll(NT):
                for j in T.unroll(2):
                    h = T.meta_var(n * 8 + lane % 4 * 2 + j)
                    peak = T.float32(NEG_BIG)
                    for w in T.unroll(WARPS):
                        peak = T.max(peak, warp_stats[0, w, h])
                    total[n, j] = T.float32(0)
                    for w in T.unroll(WARPS):
                        T.ptx[EXP2](value, warp_stats[0, w, h] - peak)
                        total[n, j] = total[n, j] + value * warp_stats[1, w, h]
                    T.ptx[EXP2](factor[n, j], top[n, j] - peak)
                    top[n, j] = peak
                    if whole == 1:
                        factor[n, j] = factor[n, j] / total[n, j]
                for k in T.unroll(KS):
                    for j in T.unroll(4):
                        acc[k, n, j] = acc[k, n, j] * factor[n, j % 2]
            # (b) their outputs are added pairwise, always in the same order
            for r in T.unroll(LOG_WARPS):
                width = T.meta_var(WARPS >> (r + 1))
                shift = T.meta_var(width if r == 0 else 0)           # later a warp reuses the part that only it read
                if T.And(warp >= width, warp < 2 * width):
                    to_merge(warp - shift, False)
                T.cuda.cta_sync()
                if warp < width:
                    to_merge(warp + width - shift, True)
            slot = 2 * bx + segment
            if warp == 0:
                to_merge(0, False)
                if T.And(whole == 0, lane < 4):
                    for n in T.unroll(NT):
                        for j in T.unroll(2):
                            h = T.meta_var(n * 8 + lane * 2 + j)
                            if h < G:
                                stats[slot, 0, h] = top[n, j]
                                stats[slot, 1, h] = total[n, j]
            T.cuda.cta_sync()
            # (c) all threads write
            for i in T.unroll((G * D // 2 + THREADS - 1) // THREADS):
                e = T.meta_var((tx + i * THREADS) * 2)
                if e < G * D:
                    if whole == 1:
                        T.ptx[PACK_Y](frag[0], merge[0, e // D, e % D + 1], merge[0, e // D, e % D])
                        T.ptx["st.global.b32"](done.ptr_to([at[ROW], at[HEAD] * (G * D) + e]), frag[0])
                    else:
                        partial[slot, e] = merge[0, e // D, e % D]
                        partial[slot, e + 1] = merge[0, e // D, e % D + 1]
            segment = 1

        # find this block's share of the work
        work = 0
        base = 0
        while base < rows:
            scan()
            if T.And(T.And(bx == 0, warp == 0), base + lane < rows):
                starts[base + lane] = work + sum - count
            work = work + shuffle(sum, 31)
            base = base + 32
        end = (bx + 1) * (work // BLOCKS) + T.min(bx + 1, work % BLOCKS)
        work = bx * (work // BLOCKS) + T.min(bx, work % BLOCKS)
        if work < end:
            at[ROW] = 0
            at[TILE] = work
            base = 0
            segment = 0
            while segment == 0:
                scan()
                slot = shuffle(sum, 31)
                if at[TILE] < slot:
                    # the row is here: count lanes whose inclusive prefix is not beyond the place
                    page = T.Cast("int32", T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", sum <= at[TILE])))
                    at[ROW] = base + T.Cast("int32", T.popcount(T.Cast("uint32", page)))
                    at[TILE] = at[TILE] - shuffle(sum - count, at[ROW] - base)
                    segment = 1
                else:
                    at[TILE] = at[TILE] - slot
                    base = base + 32
            at[LENGTH] = lengths[at[ROW]]
            at[HEAD] = at[TILE] // tiles(at[LENGTH])
            at[TILE] = first_tile(at[LENGTH]) + at[TILE] % tiles(at[LENGTH])
            at[LAST] = last_tile(at[LENGTH])
            segment = 0
            for i in T.unroll(5):
                load_at[i] = at[i]
            load_work = work
            find_page()
            for s in T.unroll(STAGES - 1):
                if load_work < end:
                    copy(s)
                    load_work = load_work + 1
                    advance(load_at)
                    find_page()
                T.ptx[COMMIT]()
            begin_segment()
            stage = 0
            while work < end:
                T.ptx[WAIT](STAGES - 2)
                T.cuda.warp_sync()
                if load_work < end:
                    copy((stage + (STAGES - 1)) % STAGES)
                    load_work = load_work + 1
                    advance(load_at)
                    find_page()
                T.ptx[COMMIT]()
                compute(stage)
                stage = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
                work = work + 1
                if T.Or(at[TILE] + 1 == at[LAST], work == end):
                    end_segment()
                    advance(at)
                    if work < end:
                        begin_segment()
                else:
                    at[TILE] = at[TILE] + 1
            T.ptx[WAIT](0)

    return decode_split


def _merge(spec: AttentionSpec, tuning: DecodeTuning) -> Any:
    D, H, KV, BLOCKS = spec.head_dim, spec.num_heads, spec.num_kv_heads, tuning.blocks
    G, WARPS, DEPTH = H // KV, MERGE_WARPS, MERGE_DEPTH
    THREADS, PER_LANE = WARPS * 32, -(-D // 32)
    act = spec.activation_dtype
    _, _, tiles = _place(spec, tuning.warps * KEYS)

    @T.prim_func
    def decode_merge(done_h: T.handle, partial_h: T.handle, stats_h: T.handle, starts_h: T.handle,
                     lengths_h: T.handle, y_h: T.handle):
        t = T.int64()
        done = T.match_buffer(done_h, (t, H * D), act, align=16)
        partial = T.match_buffer(partial_h, (2 * BLOCKS, G * D), "float32", align=16)
        stats = T.match_buffer(stats_h, (2 * BLOCKS, 2, G), "float32")
        starts = T.match_buffer(starts_h, (t,), "int32")
        lengths = T.match_buffer(lengths_h, (t,), "int32")
        y = T.match_buffer(y_h, (t, H * D), act, align=16)
        T.device_entry()
        head, row = T.cta_id([H, T.Cast("int32", t)])
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
        top: T.float32
        total: T.float32
        peak: T.float32
        value: T.float32
        share: T.int32
        more: T.int32
        begin: T.int32
        first: T.int32
        last: T.int32
        j: T.int32
        slot: T.int32

        @T.inline
        def block_of(result, work):
            # which block of stage one had this work
            if work < more * (share + 1):
                result = work // (share + 1)
            else:
                result = more + (work - more * (share + 1)) // T.max(share, 1)

        count = T.meta_var(tiles(lengths[row]))
        share = starts[T.Cast("int32", t) - 1] + tiles(lengths[T.Cast("int32", t) - 1]) * KV
        more = share % BLOCKS
        share = share // BLOCKS
        begin = starts[row] + head // G * count
        block_of(first, begin)
        block_of(last, begin + count - 1)
        if count == 0:
            for i in T.unroll((D + THREADS - 1) // THREADS):
                if tx + i * THREADS < D:
                    y[row, head * D + tx + i * THREADS] = T.Cast(act, T.float32(0))
        elif first == last:
            for i in T.unroll((D + THREADS - 1) // THREADS):
                if tx + i * THREADS < D:
                    y[row, head * D + tx + i * THREADS] = done[row, head * D + tx + i * THREADS]
        else:
            top = T.float32(NEG_BIG)
            total = T.float32(0)
            for e in T.unroll(PER_LANE):
                o[e] = T.float32(0)
            j = warp
            while first + j <= last:
                for i in T.unroll(DEPTH):
                    tops[i] = T.float32(NEG_BIG)
                    parts[i] = T.float32(0)
                    for e in T.unroll(PER_LANE):
                        part[i, e] = T.float32(0)
                    if first + j + i * WARPS <= last:
                        slot = 2 * (first + j + i * WARPS)
                        if T.And(j + i * WARPS == 0, first * share + T.min(first, more) < begin):
                            slot = slot + 1
                        tops[i] = stats[slot, 0, head % G]
                        parts[i] = stats[slot, 1, head % G]
                        for e in T.unroll(PER_LANE):
                            if lane + e * 32 < D:
                                part[i, e] = partial[slot, head % G * D + lane + e * 32]
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
                    y[row, head * D + tx + i * THREADS] = T.Cast(act, top / total)

    return decode_merge


def decode_attention(spec: AttentionSpec, arch: str = "sm_90a", tuning: DecodeTuning | None = None) -> Kernel:
    """q I[t, H*D], layer, pages, page_table i32[t, max_pages], lengths i32[t] → y I[t, H*D]; rows of length 0 give 0."""
    check_dtypes(spec.activation_dtype, spec.kv_dtype)
    if spec.activation_dtype != spec.kv_dtype:
        raise CompileError(f"decode attention: activations {spec.activation_dtype} and pages {spec.kv_dtype} differ; "
                           "build with one dtype for both")
    if spec.head_dim % 16 or spec.num_heads % spec.num_kv_heads:
        raise CompileError(f"decode attention: head_dim {spec.head_dim} must be a multiple of 16 and {spec.num_heads} "
                           f"heads a multiple of {spec.num_kv_heads} KV heads")
    tuning = tuning or default_tuning(spec, arch)
    group = spec.num_heads // spec.num_kv_heads
    name = (f"decode_attention_{SHORT[spec.kv_dtype]}_h{spec.num_heads}x{spec.num_kv_heads}_d{spec.head_dim}"
            f"_p{spec.page_size}x{spec.max_pages}" + (f"_w{spec.window}" if spec.window else ""))
    scratch = ("done", "partial", "stats", "starts")
    split = Stage(finish(_split(spec, tuning)), name + "_split",
                  inputs=("q", "layer", "pages", "page_table", "lengths"), outputs=scratch)
    merge = Stage(finish(_merge(spec, tuning)), name + "_merge", inputs=(*scratch, "lengths"), outputs=("y",))
    temporaries: dict[str, Any] = {
        "done": (("t", spec.num_heads * spec.head_dim), spec.activation_dtype),
        "partial": ((2 * tuning.blocks, group * spec.head_dim), "float32"),
        "stats": ((2 * tuning.blocks, 2, group), "float32"),
        "starts": (("t",), "int32"),
    }
    return Kernel((split, merge), source="rule:cuda.decode_attention", temporaries=temporaries)
