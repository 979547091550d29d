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
    EXP2,
    MAPA,
    NEG_BIG,
    RELEASE,
    REMOTE_STORE,
    WAIT,
    early_launch,
    finish,
    high,
    low,
    pack,
    page_name,
    shuffle_xor,
)
from relaxpack.schedules.kernels.cuda.pages_fp8 import pack_e4m3
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import FusedTuning, fused_tuning, inbox_shape, units
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
    act, kv, FP8, MAX_POSITION = spec.activation_dtype, spec.page_dtype, spec.fp8, spec.max_position
    NORM, EPS = spec.qk_norm_epsilon is not None, float(spec.qk_norm_epsilon or 0.0)
    tile = DecodeTile(spec, tuning.key_tiles)
    KEYS, TILE_KEYS, THREADS, WINDOW = tile.keys, tuning.keys, WARPS * 32, spec.window or 0
    WINDOWED = spec.window is not None
    PAGES, NT, KS, ROW_CHUNKS = tile.pages, tile.columns // 8, tile.steps, tile.row_chunks
    first_tile, last_tile = tile_range(spec, TILE_KEYS)
    copy_rows, reset, attend, arrange, settle = tile.copy(), tile.reset(), tile.attend(), tile.arrange(), tile.settle()
    HALF, UNITS, TURN = R // 2, D // 8, R // 16                      # units of 8 of head_dim; i and i + TURN rotate together
    PAIRS, PLAIN, WORDS = R // 4, (D - R) // 2, D // 2               # words of the new key: rotated pairs, others, all
    EP, EL, EV = -(-PAIRS // 32), -(-PLAIN // 32), -(-WORDS // 32)   # of each, a lane's share
    SOURCES, PER_BLOCK, GP = C * WARPS, units(spec, tuning), G + G % 2
    ITEMS = PER_BLOCK * GP * 4                                       # pairs of results that a block merges
    PARTS = 1                                                        # threads that share one
    while PARTS * 2 <= min(32, SOURCES) and ITEMS * PARTS * 2 <= THREADS and SOURCES % (PARTS * 2) == 0:
        PARTS *= 2
    PACK = pack(act)
    # A word of `fresh` and of the ring is two elements of the new key or value: 32 bits, or 16 of e4m3 numbers.
    WORD, CHUNK = ("uint16", 8) if FP8 else ("uint32", 4)
    STORE = "st.global.b16" if FP8 else "st.global.b32"
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
    def rotate(x, cos, sin, at):
        """Two elements x[0], x[1] of the first half with x[2], x[3] of the second, by angles at, at + 1."""
        turned: T.float32
        for i in T.unroll(2):
            turned = x[i] * cos[at + i] - x[2 + i] * sin[at + i]
            x[2 + i] = x[2 + i] * cos[at + i] + x[i] * sin[at + i]
            x[i] = turned

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
    def load_new(words, qkv, row, kv_head, lane):
        """This lane's words of the new key (rotated pairs, others) and of the new value."""
        key = T.meta_var((H + kv_head) * D)
        for e in T.unroll(2 * EP + EL + EV):
            words[e] = T.uint32(0)
        for e in T.unroll(EP):
            if lane + 32 * e < PAIRS:
                T.ptx["ld.global.b32"](words[2 * e], qkv.ptr_to([row, key + (lane + 32 * e) * 2]))
                T.ptx["ld.global.b32"](words[2 * e + 1], qkv.ptr_to([row, key + HALF + (lane + 32 * e) * 2]))
        for e in T.unroll(EL):
            if lane + 32 * e < PLAIN:
                T.ptx["ld.global.b32"](words[2 * EP + e], qkv.ptr_to([row, key + R + (lane + 32 * e) * 2]))
        for e in T.unroll(EV):
            if lane + 32 * e < WORDS:
                T.ptx["ld.global.b32"](words[2 * EP + EL + e],
                                       qkv.ptr_to([row, (H + KV + kv_head) * D + (lane + 32 * e) * 2]))

    @T.inline
    def keep(fresh, which, at, words, w, x, first):
        """Two new numbers, f32 → `fresh`."""
        if FP8:
            fresh[which, at] = T.Cast(WORD, pack_e4m3(x[first + 1], x[first]))
        else:
            T.ptx[PACK](words[w], x[first + 1], x[first])
            fresh[which, at] = words[w]

    @T.inline
    def keep_plain(fresh, which, at, words, w):
        """Two new numbers as they came → `fresh`."""
        if FP8:
            fresh[which, at] = T.Cast(WORD, pack_e4m3(high(act, words[w]), low(act, words[w])))
        else:
            fresh[which, at] = words[w]

    @T.inline
    def rotate_new(words, x, cos, sin, fresh, k_norm, lane):
        """Rotates the new key; key and value go to `fresh`."""
        total: T.float32
        if NORM:
            total = T.float32(0)
            for e in T.unroll(2 * EP + EL):
                x[0] = low(act, words[e])
                x[1] = high(act, words[e])
                total = total + x[0] * x[0] + x[1] * x[1]
            for i in T.unroll(5):
                total = total + shuffle_xor(total, 1 << i)
            total = T.rsqrt(total * T.float32(1.0 / D) + T.float32(EPS))
        for e in T.unroll(EP):
            if lane + 32 * e < PAIRS:
                for j in T.unroll(2):
                    x[2 * j] = low(act, words[2 * e + j])
                    x[2 * j + 1] = high(act, words[2 * e + j])
                    if NORM:
                        for i in T.unroll(2):
                            x[2 * j + i] = x[2 * j + i] * total * k_norm[j * HALF + (lane + 32 * e) * 2 + i]
                rotate(x, cos, sin, 2 * e)
                for j in T.unroll(2):
                    keep(fresh, 0, lane + 32 * e + j * PAIRS, words, 2 * e + j, x, 2 * j)
        for e in T.unroll(EL):
            if lane + 32 * e < PLAIN:
                if NORM:
                    x[0] = low(act, words[2 * EP + e])
                    x[1] = high(act, words[2 * EP + e])
                    for i in T.unroll(2):
                        x[i] = x[i] * total * k_norm[R + (lane + 32 * e) * 2 + i]
                    keep(fresh, 0, 2 * PAIRS + lane + 32 * e, words, 2 * EP + e, x, 0)
                else:
                    keep_plain(fresh, 0, 2 * PAIRS + lane + 32 * e, words, 2 * EP + e)
        for e in T.unroll(EV):
            if lane + 32 * e < WORDS:
                keep_plain(fresh, 1, lane + 32 * e, words, 2 * EP + EL + e)
        T.cuda.warp_sync()

    @T.inline
    def append(fresh, pages, layer, slot, kv_head, lane):
        for j in T.unroll(2):
            for e in T.unroll(EV):
                if lane + 32 * e < WORDS:
                    T.ptx[STORE](pages.ptr_to([
                        layer, T.Cast("int64", slot // PS), j, T.Cast("int64", kv_head), T.Cast("int64", slot % PS),
                        (lane + 32 * e) * 2]), fresh[j, lane + 32 * e])

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

    @T.inline
    def body(qkv, rope_table, positions, slots, q_norm, k_norm, layer, pages, page_table, lengths, y, group, member, tx):
        pool = T.SMEMPool()
        ring = pool.alloc((WARPS, STAGES, 2, KEYS * ROW_CHUNKS, tile.unit), kv, align=128)
        inbox = pool.alloc(inbox_shape(spec, tuning), "float32", align=16)
        stats = pool.alloc((SOURCES, GP // 2, 4), "float32", align=16)
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
            rotate_new(words, x, new_cos, new_sin, fresh, k_norm, lane)
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
