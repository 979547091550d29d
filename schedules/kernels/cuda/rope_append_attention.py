"""RoPE, KV append and decode attention in one launch.

A thread block cluster has the query heads of one KV head of one sequence. Its blocks take tiles of keys in turn, every
warp rotates the queries it needs, the warp whose keys include the new one rotates that and writes it to the pages, and the
warps' results meet in distributed shared memory: every block merges its part of head_dim, in a fixed order. Keys and
values of earlier steps are requested before the kernel waits for the one that computes the new ones. sm_90 and newer.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec, Kernel, Stage
from relaxpack.schedules.kernels.cuda.attention_decode_tile import DecodeTile, tile_range
from relaxpack.schedules.kernels.cuda.fragments import (
    AWAIT,
    COMMIT,
    RELEASE,
    WAIT,
    early_launch,
    finish,
    high,
    low,
    pack,
    page_name,
    shuffle_xor,
)
from relaxpack.schedules.kernels.cuda.rope_append_attention_merge import ClusterMerge
from relaxpack.schedules.kernels.cuda.rope_append_attention_new import NewToken, rotate
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import FusedTuning, fused_tuning, inbox_shape
from tvm.script import tirx as T


def rope_append_attention(spec: AttentionSpec, rows: int, arch: str = "sm_90a",
                          tuning: FusedTuning | None = None) -> Kernel | None:
    """qkv I[t, (H+2KV)*D], rope_table, positions, slots, [q_norm, k_norm], layer, page_table, lengths → pages (in place),
    y I[t, H*D]; None where the kernels one by one serve `rows` rows better or this one cannot. Right for any t."""
    tuning = tuning or fused_tuning(spec, rows, arch)
    if tuning is None:
        return None
    norms = ("q_norm", "k_norm") if spec.qk_norm_epsilon is not None else ()
    name = (f"rope_append_attention_{page_name(spec)}_h{spec.num_heads}x{spec.num_kv_heads}_d{spec.head_dim}"
            f"r{spec.rotary_dim}_p{spec.page_size}x{spec.max_pages}" + (f"_w{spec.window}" if spec.window else "")
            + f"{'_norm' if norms else ''}_c{tuning.cluster}w{tuning.warps}s{tuning.stages}k{tuning.key_tiles}"
            + (f"r{tuning.reserve}" if tuning.reserve else ""))
    early = early_launch(arch)
    func = finish(_function(spec, tuning, early), early, cluster=tuning.cluster)
    stage = Stage(func, name, inputs=("qkv", "rope_table", "positions", "slots", *norms, "layer", "pages", "page_table",
                                      "lengths"), outputs=("y",), inplace=("pages",))
    return Kernel((stage,), source="rule:cuda.rope_append_attention")


def _function(spec: AttentionSpec, tuning: FusedTuning, early: bool) -> Any:
    D, R, H, KV, PS, MP, L = (spec.head_dim, spec.rotary_dim, spec.num_heads, spec.num_kv_heads, spec.page_size,
                              spec.max_pages, spec.num_layers)
    G, C, WARPS, STAGES, HEADS = H // KV, tuning.cluster, tuning.warps, tuning.stages, H + 2 * KV
    act, kv, MAX_POSITION = spec.activation_dtype, spec.page_dtype, spec.max_position
    NORM, EPS = spec.qk_norm_epsilon is not None, float(spec.qk_norm_epsilon or 0.0)
    tile = DecodeTile(spec, tuning.key_tiles)
    KEYS, TILE_KEYS, THREADS, WINDOW = tile.keys, tuning.keys, WARPS * 32, spec.window or 0
    WINDOWED = spec.window is not None
    PAGES, NT, KS, ROW_CHUNKS = tile.pages, tile.columns // 8, tile.steps, tile.row_chunks
    first_tile, last_tile = tile_range(spec, TILE_KEYS)
    copy_rows, reset, attend, arrange = tile.copy(), tile.reset(), tile.attend(), tile.arrange()
    HALF, UNITS, TURN = R // 2, D // 8, R // 16                      # units of 8 of head_dim; i and i + TURN rotate together
    new, cluster = NewToken(spec), ClusterMerge(spec, tuning, tile)
    load_new, turn_new, append, send, merge = new.load, new.turn, new.append, cluster.send, cluster.merge
    PAIRS, WORDS, (EP, EL, EV), WORD, CHUNK = new.pairs, new.words, new.per_lane, new.word, new.chunk
    PACK = pack(act)
    assert tile.ahead

    def block_ids(t: Any) -> Any:
        clusters = T.Cast("int32", t * KV)
        if C > 1:
            return T.cluster_id([clusters]), T.cta_id_in_cluster([C])
        return T.cta_id([clusters]), 0

    @T.inline
    def find_pages(page, at, page_table, row, base, limit):
        for j in T.unroll(PAGES):
            page[at + j] = 0
            if base + j * PS < limit:
                page[at + j] = page_table[row, (base + j * PS) // PS]

    @T.inline
    def load_queries(query, x, cos, sin, qkv, q_norm, row, kv_head, lane):
        """The rotated queries as the B operand: lane 4g + i has head g, columns 2i and 2i + 1 of every unit."""
        total: T.float32
        for n in T.unroll(NT):
            head = T.meta_var(n * 8 + lane // 4)
            for u in T.unroll(UNITS):
                query[u // 2, n, u % 2] = T.uint32(0)
            if head < G:
                for u in T.unroll(UNITS):
                    T.ptx["ld.global.b32"](query[u // 2, n, u % 2],
                                           qkv.ptr_to([row, (kv_head * G + head) * D + tile.query_at(u, lane)]))
        for n in T.unroll(NT):
            total = T.float32(0)
            if NORM:
                for u in T.unroll(UNITS):
                    x[0] = low(act, query[u // 2, n, u % 2])
                    x[1] = high(act, query[u // 2, n, u % 2])
                    total = total + x[0] * x[0] + x[1] * x[1]
                for i in T.unroll(2):
                    total = total + shuffle_xor(total, 1 << i)
                total = T.rsqrt(total * T.float32(1.0 / D) + T.float32(EPS))
            for u in T.unroll(UNITS):
                if u < TURN or (NORM and u >= 2 * TURN):
                    pair = T.meta_var(u + TURN if u < TURN else u)   # a unit beyond the rotated part has no partner
                    x[0] = low(act, query[u // 2, n, u % 2])
                    x[1] = high(act, query[u // 2, n, u % 2])
                    x[2] = low(act, query[pair // 2, n, pair % 2])
                    x[3] = high(act, query[pair // 2, n, pair % 2])
                    if NORM:
                        for i in T.unroll(2):
                            x[i] = x[i] * total * q_norm[tile.query_at(u, lane) + i]
                            x[2 + i] = x[2 + i] * total * q_norm[tile.query_at(pair, lane) + i]
                    if u < TURN:
                        rotate(x, cos, sin, u * 2)
                        T.ptx[PACK](query[pair // 2, n, pair % 2], x[3], x[2])
                    T.ptx[PACK](query[u // 2, n, u % 2], x[1], x[0])
        arrange(query)

    @T.inline
    def body(qkv, rope_table, positions, slots, q_norm, k_norm, layer, pages, page_table, lengths, y, group, member, tx):
        pool = T.SMEMPool()
        ring = pool.alloc((WARPS, STAGES, 2, KEYS * ROW_CHUNKS, tile.unit), kv, align=128)
        inbox = pool.alloc(inbox_shape(spec, tuning), "float32", align=16)
        stats = pool.alloc((cluster.sources, cluster.heads // 2, 4), "float32", align=16)
        fresh = pool.alloc((2, WORDS), WORD, align=16)               # the new key and value
        pool.move_base_to(0)
        ring_words = pool.alloc((WARPS, STAGES, 2, KEYS * ROW_CHUNKS * CHUNK), WORD, align=128)      # the ring's bytes
        pool.commit(tuning.shared_bytes(spec))
        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        row = T.meta_var(group // KV)
        kv_head = T.meta_var(group % KV)
        query = T.alloc_buffer((KS, NT, 2), "uint32", scope="local")
        acc = T.alloc_buffer((KS, NT, 4), "float32", scope="local")
        top = T.alloc_buffer((NT, 2), "float32", scope="local")
        total = T.alloc_buffer((NT, 2), "float32", scope="local")
        page = T.alloc_buffer((STAGES * PAGES,), "int32", scope="local")
        cos = T.alloc_buffer((2 * TURN,), "float32", scope="local")
        sin = T.alloc_buffer((2 * TURN,), "float32", scope="local")
        new_cos = T.alloc_buffer((2 * EP,), "float32", scope="local")
        new_sin = T.alloc_buffer((2 * EP,), "float32", scope="local")
        words = T.alloc_buffer((2 * EP + EL + EV,), "uint32", scope="local")
        x = T.alloc_buffer((4,), "float32", scope="local")
        length: T.int32
        newest: T.int32          # tile with the new key
        owner: T.int32           # whether this warp has it
        at: T.int32
        base: T.int32
        last: T.int32
        stage: T.int32
        attended: T.int32
        place: T.int64
        slot: T.int32

        T.ptx["barrier.cluster.arrive.relaxed"]()        # waited for where first another block's memory is written
        if early:
            T.ptx[RELEASE]()
        # Only what no running kernel writes: page table and lengths (of the host), the table, keys of earlier steps.
        length = lengths[row]
        newest = T.max(length - 1, 0) // TILE_KEYS
        at = first_tile(length) + member
        last = last_tile(length)
        owner = T.if_then_else(T.And((newest - first_tile(length)) % C == member,
                                     T.max(length - 1, 0) % TILE_KEYS // KEYS == warp), 1, 0)
        for s in T.unroll(STAGES):
            find_pages(page, s * PAGES, page_table, row, (at + s * C) * TILE_KEYS + warp * KEYS, length)
        for s in T.unroll(STAGES - 1):
            if at + s * C < last:
                copy_rows(ring, warp, s, lane, pages, layer, _Part(page, s * PAGES), kv_head,
                          (at + s * C) * TILE_KEYS + warp * KEYS, length - 1, length)
            T.ptx[COMMIT]()
        place = T.Cast("int64", positions[row])
        slot = slots[row]
        for u in T.unroll(TURN):
            for i in T.unroll(2):
                cos[2 * u + i] = rope_table[place, tile.query_at(u, lane) + i]
                sin[2 * u + i] = rope_table[place, HALF + tile.query_at(u, lane) + i]
        if owner == 1:
            for e in T.unroll(EP):
                for i in T.unroll(2):
                    if lane + 32 * e < PAIRS:
                        new_cos[2 * e + i] = rope_table[place, (lane + 32 * e) * 2 + i]
                        new_sin[2 * e + i] = rope_table[place, HALF + (lane + 32 * e) * 2 + i]
        if early:
            T.ptx[AWAIT]()
        if owner == 1:
            load_new(words, qkv, row, kv_head, lane)
        load_queries(query, x, cos, sin, qkv, q_norm, row, kv_head, lane)
        if owner == 1:
            turn_new(words, x, new_cos, new_sin, fresh, k_norm, lane)
        reset(acc, top, total)
        stage = 0
        attended = 0
        while at < last:
            T.ptx[WAIT](STAGES - 2)
            T.cuda.warp_sync()
            if at + (STAGES - 1) * C < last:
                copy_rows(ring, warp, (stage + (STAGES - 1)) % STAGES, lane, pages, layer,
                          _Part(page, (STAGES - 1) * PAGES), kv_head,
                          (at + (STAGES - 1) * C) * TILE_KEYS + warp * KEYS, length - 1, length)
                find_pages(page, (STAGES - 1) * PAGES, page_table, row, (at + STAGES * C) * TILE_KEYS + warp * KEYS, length)
            T.ptx[COMMIT]()
            base = at * TILE_KEYS + warp * KEYS
            if T.And(base < length, base + KEYS > length - WINDOW if WINDOWED else T.bool(True)):
                if T.And(owner == 1, at == newest):
                    for j in T.unroll(2):
                        for e in T.unroll(EV):
                            w = T.meta_var(lane + 32 * e)
                            chunk = T.meta_var(tile.chunk(length - 1 - base, w // CHUNK))
                            if w < WORDS:
                                ring_words[warp, stage, j, chunk * CHUNK + w % CHUNK] = fresh[j, w]
                    T.cuda.warp_sync()
                attend(ring, warp, stage, lane, base, length, query, acc, top, total)
                attended = 1
            at = at + C
            stage = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
        T.ptx[WAIT](0)
        T.ptx["barrier.cluster.wait"]()
        send(inbox, stats, acc, top, total, member * WARPS + warp, attended, lane)
        T.ptx["barrier.cluster.arrive.release"]()
        if owner == 1:
            append(fresh, pages, layer, slot, kv_head, lane)             # nobody waits for that
        T.ptx["barrier.cluster.wait.acquire"]()
        merge(inbox, stats, y, row, kv_head, member, tx)

    if NORM:
        @T.prim_func
        def fused(qkv_h: T.handle, rope_table_h: T.handle, positions_h: T.handle, slots_h: T.handle, q_norm_h: T.handle,
                  k_norm_h: T.handle, layer: T.int64, pages_h: T.handle, page_table_h: T.handle, lengths_h: T.handle,
                  y_h: T.handle):
            t = T.int64()
            p = T.int64()
            qkv = T.match_buffer(qkv_h, (t, HEADS * D), act, align=16)
            rope_table = T.match_buffer(rope_table_h, (MAX_POSITION, R), "float32", align=16)
            positions = T.match_buffer(positions_h, (t,), "int32")
            slots = T.match_buffer(slots_h, (t,), "int32")
            q_norm = T.match_buffer(q_norm_h, (D,), "float32")
            k_norm = T.match_buffer(k_norm_h, (D,), "float32")
            pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
            page_table = T.match_buffer(page_table_h, (t, MP), "int32")
            lengths = T.match_buffer(lengths_h, (t,), "int32")
            y = T.match_buffer(y_h, (t, H * D), act, align=16)
            T.device_entry()
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            group, member = T.meta_var(block_ids(t))
            tx = T.thread_id([THREADS])
            body(qkv, rope_table, positions, slots, q_norm, k_norm, layer, pages, page_table, lengths, y, group, member, tx)
    else:
        @T.prim_func
        def fused(qkv_h: T.handle, rope_table_h: T.handle, positions_h: T.handle, slots_h: T.handle, layer: T.int64,
                  pages_h: T.handle, page_table_h: T.handle, lengths_h: T.handle, y_h: T.handle):
            t = T.int64()
            p = T.int64()
            qkv = T.match_buffer(qkv_h, (t, HEADS * D), act, align=16)
            rope_table = T.match_buffer(rope_table_h, (MAX_POSITION, R), "float32", align=16)
            positions = T.match_buffer(positions_h, (t,), "int32")
            slots = T.match_buffer(slots_h, (t,), "int32")
            pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
            page_table = T.match_buffer(page_table_h, (t, MP), "int32")
            lengths = T.match_buffer(lengths_h, (t,), "int32")
            y = T.match_buffer(y_h, (t, H * D), act, align=16)
            T.device_entry()
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            group, member = T.meta_var(block_ids(t))
            tx = T.thread_id([THREADS])
            body(qkv, rope_table, positions, slots, None, None, layer, pages, page_table, lengths, y, group, member, tx)
    return fused


class _Part:
    """A buffer from an offset on."""

    def __init__(self, buffer: Any, offset: int) -> None:
        self._buffer, self._offset = buffer, offset

    def __getitem__(self, index: int) -> Any:
        return self._buffer[self._offset + index]
