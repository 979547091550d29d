"""Attention of a whole batch to the keys that its sequences have in common: stage one of a decode attention with `shared`.

The leading pages that rows share are read once. All query heads of a KV head of all rows stand side by side as columns
of the tensor-core tiles (S' = K Q', as in `attention_decode_tile.py`); the blocks of a cluster take tiles of keys in turn
and merge in distributed shared memory. The result, a maximum, a sum and an output not yet divided by it, is where the
attention to a row's own keys begins. Nothing shared: every block leaves at once. sm_90 and newer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import SHARED_KEYS, AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_decode_tile import DecodeTile
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, row_chunks
from relaxpack.schedules.kernels.cuda.fragments import (
    AWAIT,
    COMMIT,
    EXP2,
    FULL_MASK,
    MAPA,
    NEG_BIG,
    RELEASE,
    REMOTE_STORE,
    SHORT,
    WAIT,
    early_launch,
    shuffle_xor,
)
from tvm.script import tirx as T


@dataclass(frozen=True)
class PrefixTuning:
    """`cluster` blocks share the keys; each of `warps` fetches 16 keys of a tile and attends to one of `shares` equal shares
    of the tile, `at_once` x 16 keys at a time, for `columns` queries; `stages` tiles are a block's ring."""

    cluster: int
    warps: int
    stages: int
    shares: int
    columns: int
    at_once: int = 4

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def keys(self) -> int:
        return self.warps * 16

    @property
    def queries(self) -> int:
        return self.warps // self.shares * self.columns

    @property
    def sources(self) -> int:
        """Results of each query that a cluster merges."""
        return self.cluster * self.shares

    @property
    def stride(self) -> int:
        """Of an element in the inbox: elements of 4 columns that a warp reads are in 32 banks."""
        return self.queries + 4

    def shared_bytes(self, spec: AttentionSpec) -> int:
        inbox = self.sources * (8 * units(spec, self) * self.stride + 2 * self.queries) * 4
        return max(self.stages * 2 * self.keys * row_chunks(spec.head_dim, spec.kv_item_bytes) * 16, inbox)

    def clusters(self, spec: AttentionSpec, rows: Any) -> Any:
        """The grid, in clusters."""
        group = spec.num_heads // spec.num_kv_heads
        return (rows * group + self.queries - 1) // self.queries * spec.num_kv_heads


def units(spec: AttentionSpec, tuning: PrefixTuning) -> int:
    """Parts of 8 elements of head_dim that one block of a cluster merges."""
    return -(-spec.head_dim // 8 // tuning.cluster)


def prefix_tuning(spec: AttentionSpec, rows: int, arch: str) -> PrefixTuning:
    """Measured best on an H200 (docs/kernels_cuda_attention.md): of up to 64 queries two warps share a tile, up to 128 are
    those of one block, more go to blocks of which two fit on a multiprocessor."""
    queries, columns = rows * (spec.num_heads // spec.num_kv_heads), 16 if spec.head_dim <= 128 else 8
    wide = [(8, 3 if spec.head_dim == 64 else 2, 2 if queries <= 64 else 1)]
    for warps, stages, shares in (*(wide if queries <= 128 and spec.head_dim in (64, 128) else ()),
                                  (4, 3, 1), (4, 2, 1), (2, 2, 1)):
        tuning = PrefixTuning(8, warps, stages, shares, columns, min(4, warps // shares))
        if tuning.shared_bytes(spec) <= LIMITS[arch][0] * 1024:
            return tuning
    raise CompileError(f"shared prefixes: head_dim {spec.head_dim} does not fit the shared memory of {arch}")


def shares_prefix(spec: AttentionSpec, arch: str) -> bool:
    """Whether there is such a kernel: clusters, pages of 16-bit numbers that suit the copies."""
    return (early_launch(arch) and spec.window is None and spec.activation_dtype in SHORT
            and spec.kv_dtype == spec.activation_dtype and spec.head_dim % 16 == 0
            and spec.num_heads % spec.num_kv_heads == 0 and DecodeTile(spec, 1).ahead)


@T.inline
def find_leader(shared, rows, lane, leader, limit, base, at, found):
    """The first row that shares leading keys, and how many; `limit` 0 where none does. The other scalars are clobbered."""
    limit = 0
    leader = 0
    base = 0
    while T.And(base < rows, limit == 0):
        at = 0
        if base + lane < rows:
            at = shared[base + lane]
        found = T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", at > 0))
        if found != T.uint32(0):
            leader = base + T.Cast("int32", T.popcount((found & (~found + T.uint32(1))) - T.uint32(1)))
            limit = shared[leader]
        base = base + 32


def prefix_function(spec: AttentionSpec, tuning: PrefixTuning, early: bool) -> Any:
    D, H, KV, PS, MP, L = (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages,
                           spec.num_layers)
    G, C, WARPS, STAGES, COLUMNS, QUERIES = (H // KV, tuning.cluster, tuning.warps, tuning.stages, tuning.columns,
                                             tuning.queries)
    GROUPS, SOURCES, AT_ONCE = WARPS // tuning.shares, tuning.sources, tuning.at_once
    act, kv, THREADS = spec.activation_dtype, spec.page_dtype, WARPS * 32
    tile, several = DecodeTile(spec, 1, COLUMNS), DecodeTile(spec, AT_ONCE, COLUMNS, 1)
    KEYS, TILE_KEYS, PAGES, NT, KS, ROW_CHUNKS = (tile.keys, tuning.keys, tile.pages, COLUMNS // 8, tile.steps,
                                                  tile.row_chunks)
    UNITS, PER_BLOCK, STRIDE = D // 8, units(spec, tuning), tuning.stride
    copy_rows, reset, attend = tile.copy(), tile.reset(), several.attend()
    assert tile.ahead and spec.window is None and not spec.fp8 and WARPS % tuning.shares == GROUPS % AT_ONCE == 0
    assert SHARED_KEYS % TILE_KEYS == 0

    @T.inline
    def find_pages(page, page_table, leader, base, limit):
        for j in T.unroll(PAGES):
            page[j] = 0
            if base + j * PS < limit:
                page[j] = page_table[leader, (base + j * PS) // PS]

    @T.inline
    def load_queries(query, q, rows, kv_head, first, lane):
        """The B operand: lane 4g + i has column g, elements 2i and 2i + 1 of every unit of 8."""
        for n in T.unroll(NT):
            column = T.meta_var(first + n * 8 + lane // 4)
            for k in T.unroll(KS):
                for j in T.unroll(2):
                    query[k, n, j] = T.uint32(0)
            if column < rows * G:
                for k in T.unroll(KS):
                    for j in T.unroll(2):
                        T.ptx["ld.global.b32"](query[k, n, j], q.ptr_to(
                            [column // G, (kv_head * G + column % G) * D + tile.query_at(2 * k + j, lane)]))

    @T.inline
    def send(inbox, stats, acc, top, total, source, first, lane):
        """A warp's columns to the blocks that merge them."""
        to = T.alloc_buffer((C,), "uint32", scope="local")
        remote: T.uint32
        for i in T.unroll(C):
            T.ptx[MAPA](to[i], T.cuda.cvta_generic_to_shared(
                inbox.ptr_to([source, 0, lane // 4, first + lane % 4 * 2])), T.uint32(i))
        for n in T.unroll(NT):
            for j in T.unroll(2):
                for i in T.unroll(3):
                    total[n, j] = total[n, j] + shuffle_xor(total[n, j], 4 << i)
            for u in T.unroll(UNITS):
                T.ptx[REMOTE_STORE + ".v2.f32"](
                    to[u // PER_BLOCK] + T.uint32((u % PER_BLOCK * 8 * STRIDE + n * 8) * 4),
                    acc[u // 2, n, u % 2 * 2], acc[u // 2, n, u % 2 * 2 + 1])
        for n in T.unroll(NT):
            for i in T.unroll((C + 7) // 8):
                if lane // 4 + 8 * i < C:
                    T.ptx[MAPA](remote, T.cuda.cvta_generic_to_shared(
                        stats.ptr_to([source, first + n * 8 + lane % 4 * 2, 0])),
                        T.Cast("uint32", lane // 4 + 8 * i))
                    T.ptx[REMOTE_STORE + ".v4.f32"](remote, top[n, 0], total[n, 0], top[n, 1], total[n, 1])

    @T.inline
    def merge(inbox, stats, prefix, prefix_stats, rows, kv_head, first, member, tx):
        """A thread adds the warps' parts of one element of one column, in their order."""
        peak: T.float32
        sum: T.float32
        value: T.float32
        factor: T.float32
        for i in T.unroll((PER_BLOCK * 8 * QUERIES + THREADS - 1) // THREADS):
            item = T.meta_var(tx + i * THREADS)
            at = T.meta_var(item // 8 % QUERIES)                     # neighbours have neighbouring elements
            unit = T.meta_var(item // (8 * QUERIES))
            row = T.meta_var((first + at) // G)
            head = T.meta_var(kv_head * G + (first + at) % G)
            element = T.meta_var(tile.output_at(member * PER_BLOCK + unit, item % 8))
            if T.And(T.And(item < PER_BLOCK * 8 * QUERIES, member * PER_BLOCK + unit < UNITS), first + at < rows * G):
                peak = T.float32(NEG_BIG)
                for s in T.unroll(SOURCES):
                    peak = T.max(peak, stats[s, at, 0])
                sum = T.float32(0)
                value = T.float32(0)
                for s in T.unroll(SOURCES):
                    T.ptx[EXP2](factor, stats[s, at, 0] - peak)
                    sum = sum + factor * stats[s, at, 1]
                    value = value + factor * inbox[s, unit, item % 8, at]
                prefix[row, head * D + element] = value
                if element == 0:
                    prefix_stats[row, head, 0] = peak
                    prefix_stats[row, head, 1] = sum

    @T.prim_func
    def prefix_attention(q_h: T.handle, layer: T.int64, pages_h: T.handle, page_table_h: T.handle, shared_h: T.handle,
                         prefix_h: T.handle, prefix_stats_h: T.handle):
        t = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, H * D), act, align=16)
        pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
        page_table = T.match_buffer(page_table_h, (t, MP), "int32")
        shared = T.match_buffer(shared_h, (t,), "int32")
        prefix = T.match_buffer(prefix_h, (t, H * D), "float32", align=16)
        prefix_stats = T.match_buffer(prefix_stats_h, (t, H, 2), "float32")
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        group = T.cluster_id([T.Cast("int32", tuning.clusters(spec, t))])
        member = T.cta_id_in_cluster([C])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        ring = pool.alloc((WARPS, STAGES, 2, KEYS * ROW_CHUNKS, tile.unit), kv, align=128)
        pool.move_base_to(0)                                         # the ring is read when results arrive
        inbox = pool.alloc((SOURCES, PER_BLOCK, 8, STRIDE), "float32", align=16)
        stats = pool.alloc((SOURCES, QUERIES, 2), "float32", align=16)
        pool.commit(tuning.shared_bytes(spec))
        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        rows = T.meta_var(T.Cast("int32", t))
        kv_head = T.meta_var(group % KV)
        first = T.meta_var(group // KV * QUERIES)
        mine = T.meta_var(warp % GROUPS * COLUMNS)                   # the warp's columns of the block's, its share of tiles
        share = T.meta_var(warp // GROUPS)
        query = T.alloc_buffer((KS, NT, 2), "uint32", scope="local")
        acc = T.alloc_buffer((KS, NT, 4), "float32", scope="local")
        top = T.alloc_buffer((NT, 2), "float32", scope="local")
        total = T.alloc_buffer((NT, 2), "float32", scope="local")
        page = T.alloc_buffer((PAGES,), "int32", scope="local")
        limit: T.int32           # shared keys
        leader: T.int32          # a row that has them
        found: T.uint32
        base: T.int32
        at: T.int32
        last: T.int32
        stage: T.int32

        if early:
            T.ptx[RELEASE]()
        # Page table and counts are of the host, shared pages of earlier steps: nothing here waits for the kernel ahead.
        find_leader(shared, rows, lane, leader, limit, base, at, found)
        if limit > 0:
            at = member
            last = (limit + (TILE_KEYS - 1)) // TILE_KEYS
            find_pages(page, page_table, leader, at * TILE_KEYS + warp * KEYS, limit)
            for s in T.unroll(STAGES - 1):
                if at + s * C < last:
                    copy_rows(ring, warp, s, lane, pages, layer, page, kv_head, (at + s * C) * TILE_KEYS + warp * KEYS,
                              limit, limit)
                    find_pages(page, page_table, leader, (at + (s + 1) * C) * TILE_KEYS + warp * KEYS, limit)
                T.ptx[COMMIT]()
        if early:
            T.ptx[AWAIT]()                   # even with nothing to do: the kernel behind waits for this one alone
        if limit > 0:
            load_queries(query, q, rows, kv_head, first + mine, lane)
            reset(acc, top, total)
            stage = 0
            while at < last:
                T.ptx[WAIT](STAGES - 2)
                T.cuda.cta_sync()
                if at + (STAGES - 1) * C < last:
                    copy_rows(ring, warp, (stage + (STAGES - 1)) % STAGES, lane, pages, layer, page, kv_head,
                              (at + (STAGES - 1) * C) * TILE_KEYS + warp * KEYS, limit, limit)
                    find_pages(page, page_table, leader, (at + STAGES * C) * TILE_KEYS + warp * KEYS, limit)
                T.ptx[COMMIT]()
                if first + mine < rows * G:
                    for w in T.serial(GROUPS // AT_ONCE):
                        base = share * GROUPS + w * AT_ONCE
                        attend(ring, base, stage, lane, at * TILE_KEYS + base * KEYS, limit, query, acc, top, total)
                at = at + C
                stage = T.if_then_else(stage == STAGES - 1, 0, stage + 1)
            T.ptx[WAIT](0)
            T.ptx["barrier.cluster.arrive.release"]()
            T.ptx["barrier.cluster.wait.acquire"]()
            send(inbox, stats, acc, top, total, member * tuning.shares + share, mine, lane)
            T.ptx["barrier.cluster.arrive.release"]()
            T.ptx["barrier.cluster.wait.acquire"]()
            merge(inbox, stats, prefix, prefix_stats, rows, kv_head, first, member, tx)

    return prefix_attention
