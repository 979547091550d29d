"""Attention of a whole batch to the keys that its sequences have in common, for Hopper (sm_90a): the roles of the prefill
kernel over other work.

A tile of queries is the query heads of a KV head of up to 128 // group rows of the batch. `splits` blocks share the shared
keys of one tile and KV head; each leaves a part, an output not divided by its sum with maximum and sum, and a second kernel
makes the parts one, from which `attention_decode_split.py` goes on. All rows see all of these keys: nothing is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SHARED_KEYS, AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_attend import attend_tiles
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_fetch import copy_tile
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_memory import (
    END,
    FIRST_KEY,
    HEAD,
    START,
    TMA_LOAD,
    TOKENS_LEFT,
    PrefillMemory,
    advance,
    encode_maps,
)
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import GROUP, HopperTuning, fits
from relaxpack.schedules.kernels.cuda.attention_prefix import find_leader, shares_prefix
from relaxpack.schedules.kernels.cuda.common import device
from relaxpack.schedules.kernels.cuda.fragments import AWAIT, EXP2, NEG_BIG, RELEASE
from tvm.script import tirx as T

LEAST_QUERIES = 16          # of a KV head, of the 128 of a tile: fewer have not been measured


@dataclass(frozen=True)
class HopperPrefixTuning:
    """`splits` blocks share the shared keys of a tile of queries and KV head, `keys` a tile, `stages` tiles are a ring."""

    splits: int
    keys: int = 128
    stages: int = 2

    @property
    def roles(self) -> HopperTuning:
        return HopperTuning(keys=self.keys, stages=self.stages, query_stages=1)

    def tiles(self, spec: AttentionSpec, rows: Any) -> Any:
        """Tiles of queries."""
        tokens = self.roles.tokens(spec)
        return (rows + tokens - 1) // tokens


def hopper_prefix_tuning(spec: AttentionSpec, rows: int, arch: str) -> HopperPrefixTuning | None:
    """As many blocks as an H200 has multiprocessors; None where there is no such kernel, or so few queries that most of a
    tile would be empty, or heads of 256, for which it has not run on a GPU: `attention_prefix.py` serves those."""
    blocks = HopperPrefixTuning(1).tiles(spec, rows) * spec.num_kv_heads
    tuning = HopperPrefixTuning(max(1, min(16, 132 // blocks)))
    measured = spec.head_dim <= 128 and rows * (spec.num_heads // spec.num_kv_heads) >= LEAST_QUERIES
    return tuning if arch == "sm_90a" and measured and shares_prefix(spec, arch) and fits(spec, tuning.roles) else None


def prefix_parts_function(spec: AttentionSpec, tuning: HopperPrefixTuning) -> Any:
    """q, layer, pages, page_table, shared → parts f32[t, splits, H*D], part_stats f32[t, splits, H, 2] (maximum, sum)."""
    D, H, KV, PS, MP, L = (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages,
                           spec.num_layers)
    act, roles, SPLITS, KEYS, STAGES = spec.activation_dtype, tuning.roles, tuning.splits, tuning.keys, tuning.stages
    G, HALVES, CONSUMERS, TOKENS, BOX = H // KV, D // 64, roles.consumers, roles.tokens(spec), min(PS, KEYS)
    PRODUCER, QUERY_BYTES = CONSUMERS * 4, TOKENS * G * D * 2
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = roles.registers(spec)
    copy, attend, encode = copy_tile(spec, roles), attend_tiles(spec, roles, shared_keys=True), encode_maps(spec, roles)
    assert fits(spec, roles) and SHARED_KEYS % KEYS == 0

    @T.prim_func
    def prefix_parts(q_h: T.handle, layer: T.int64, pages_h: T.handle, page_table_h: T.handle, shared_h: T.handle,
                     parts_h: T.handle, part_stats_h: T.handle):
        t = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, H * D), act, align=16)
        pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), act, align=16)
        page_table = T.match_buffer(page_table_h, (t, MP), "int32")
        shared = T.match_buffer(shared_h, (t,), "int32")
        parts = T.match_buffer(parts_h, (t, SPLITS, H * D), "float32", align=16)
        part_stats = T.match_buffer(part_stats_h, (t, SPLITS, H, 2), "float32")
        q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        page_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode(q_map, page_map, q, pages, t, p)
        with device():
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            bx = T.cta_id([T.Cast("int32", tuning.tiles(spec, t) * (KV * SPLITS))])
            wid = T.warp_id([(CONSUMERS + 1) * 4])
            tx = T.thread_id([(CONSUMERS + 1) * GROUP])
            pool = T.SMEMPool()
            memory = T.meta_var(PrefillMemory(spec, roles, pool))
            initialise = T.meta_var(memory.initialise(every_lane=True))
            lane = T.meta_var(tx % 32)
            part = T.meta_var(bx % SPLITS)
            left = T.meta_var((parts, part_stats, part))
            batch = T.meta_var(T.Cast("int32", t))
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
            leader: T.int32
            limit: T.int32
            page: T.int32
            next_page: T.int32
            bytes: T.uint32

            @T.inline
            def find_page(first):
                next_page = 0
                if T.And(lane < KEYS // BOX, first < end):
                    next_page = page_table[leader, (first + lane * BOX) // PS]

            @T.inline
            def fetch(which, first, id, buffer, stage, phase, full, empty):
                T.cuda.mbarrier_wait(empty.ptr_to([stage]), phase ^ 1)
                copy(page_map, layer, p, head, which, first, id, lane < KEYS // BOX, lane, bytes, buffer, stage, full, stage)
                advance(stage, phase, STAGES)

            @T.inline
            def fetch_keys(first, id):
                fetch(0, first, id, memory.keys, k_stage, k_phase, memory.full_k, memory.empty_k)

            @T.inline
            def describe(tokens):
                # the one tile of queries, or that there is no other
                T.cuda.mbarrier_wait(memory.empty_q.ptr_to([0]), q_phase ^ 1)
                if lane == 0:
                    memory.info[0, START] = start
                    memory.info[0, TOKENS_LEFT] = tokens
                    memory.info[0, FIRST_KEY] = key
                    memory.info[0, HEAD] = head
                    memory.info[0, END] = end
                q_phase = q_phase ^ 1

            T.ptx[RELEASE]()
            # Counts and page table are of the host, shared pages of earlier steps: only queries wait for the kernel ahead.
            find_leader(shared, batch, lane, leader, limit, page, next_page, bytes)
            head = bx // SPLITS % KV
            start = bx // (SPLITS * KV) * TOKENS
            rows = T.min(batch - start, TOKENS)
            key = limit // KEYS * part // SPLITS * KEYS
            end = limit // KEYS * (part + 1) // SPLITS * KEYS
            if key < end:
                if tx == 0:
                    initialise()
                T.cuda.cta_sync()
                position = 0
                q_stage = 0
                q_phase = 0
                k_stage = 0
                k_phase = 0
                v_stage = 0
                v_phase = 0
                if wid >= PRODUCER:
                    T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS)
                    if wid == PRODUCER:
                        find_page(key)
                        page = next_page
                        fetch_keys(key, page)
                        T.ptx[AWAIT]()
                        describe(rows)
                        if lane == 0:
                            T.ptx.mbarrier.arrive.expect_tx.shared.b64(memory.full_q.ptr_to([0]), T.uint32(QUERY_BYTES))
                            for h in T.unroll(HALVES):
                                T.ptx[TMA_LOAD](memory.queries.ptr_to([0, h, 0, 0]), T.address_of(q_map),
                                                0, head * G, start, h, memory.full_q.ptr_to([0]))
                        while key < end:
                            find_page(key + KEYS)
                            if key + KEYS < end:
                                fetch_keys(key + KEYS, next_page)
                            fetch(1, key, page, memory.values, v_stage, v_phase, memory.full_v, memory.empty_v)
                            page = next_page
                            key = key + KEYS
                        describe(0)
                        if lane == 0:
                            T.ptx.mbarrier.arrive.shared.b64(memory.full_q.ptr_to([0]))
                else:
                    T.ptx["setmaxnreg.inc.sync.aligned.u32"](CONSUMER_REGISTERS)
                    T.ptx[AWAIT]()                       # parts of the layer before may still be read
                    attend(memory, left, wid, lane,
                           key, end, rows, position, start, head, q_stage, q_phase, k_stage, k_phase, v_stage, v_phase)
            else:
                T.ptx[AWAIT]()                           # the kernel behind waits for this one alone

    return prefix_parts


def prefix_merge_function(spec: AttentionSpec, tuning: HopperPrefixTuning, early: bool) -> Any:
    """parts, part_stats, shared → prefix f32[t, H*D], prefix_stats f32[t, H, 2]; rows that share nothing are left out."""
    D, H, KV, SPLITS, KEYS = spec.head_dim, spec.num_heads, spec.num_kv_heads, tuning.splits, tuning.keys
    THREADS = merge_threads(spec)

    @T.prim_func
    def prefix_merge(parts_h: T.handle, part_stats_h: T.handle, shared_h: T.handle, prefix_h: T.handle,
                     prefix_stats_h: T.handle):
        t = T.int64()
        parts = T.match_buffer(parts_h, (t, SPLITS, H * D), "float32", align=16)
        part_stats = T.match_buffer(part_stats_h, (t, SPLITS, H, 2), "float32")
        shared = T.match_buffer(shared_h, (t,), "int32")
        prefix = T.match_buffer(prefix_h, (t, H * D), "float32", align=16)
        prefix_stats = T.match_buffer(prefix_stats_h, (t, H, 2), "float32")
        T.device_entry()
        kv_head, row = T.cta_id([KV, T.Cast("int32", t)])
        tx = T.thread_id([THREADS])
        part = T.alloc_buffer((SPLITS, 4), "float32", scope="local")
        tops = T.alloc_buffer((SPLITS,), "float32", scope="local")
        totals = T.alloc_buffer((SPLITS,), "float32", scope="local")
        sum = T.alloc_buffer((4,), "float32", scope="local")
        peak: T.float32
        total: T.float32
        factor: T.float32
        tiles: T.int32
        if early:
            T.ptx[RELEASE]()
        tiles = shared[row] // KEYS
        if early:
            T.ptx[AWAIT]()
        element = T.meta_var(kv_head * (H // KV * D) + tx * 4)
        if T.And(tiles > 0, tx * 4 < H // KV * D):
            for s in T.unroll(SPLITS):
                tops[s] = T.float32(NEG_BIG)
                totals[s] = T.float32(0)
                for e in T.unroll(4):
                    part[s, e] = T.float32(0)
                if tiles * s // SPLITS < tiles * (s + 1) // SPLITS:          # else it had no keys
                    T.ptx["ld.global.v4.f32"](part[s, 0], part[s, 1], part[s, 2], part[s, 3],
                                              parts.ptr_to([row, s, element]))
                    tops[s] = part_stats[row, s, element // D, 0]
                    totals[s] = part_stats[row, s, element // D, 1]
            peak = tops[0]
            for s in T.unroll(SPLITS - 1):
                peak = T.max(peak, tops[s + 1])
            total = T.float32(0)
            for e in T.unroll(4):
                sum[e] = T.float32(0)
            for s in T.unroll(SPLITS):
                T.ptx[EXP2](factor, tops[s] - peak)
                total = total + factor * totals[s]
                for e in T.unroll(4):
                    sum[e] = sum[e] + factor * part[s, e]
            T.ptx["st.global.v4.f32"](prefix.ptr_to([row, element]), sum[0], sum[1], sum[2], sum[3])
            if element % D == 0:
                prefix_stats[row, element // D, 0] = peak
                prefix_stats[row, element // D, 1] = total

    return prefix_merge


def merge_threads(spec: AttentionSpec) -> int:
    """Of a block, which has the query heads of a KV head of a row: four elements each."""
    return (spec.num_heads // spec.num_kv_heads * spec.head_dim // 4 + 31) // 32 * 32
