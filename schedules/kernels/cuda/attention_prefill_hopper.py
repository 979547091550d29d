"""Paged prefill attention for Hopper (sm_90a): TMA fetches pages, wgmma multiplies, softmax overlaps with the matmuls.

Each consumer warpgroup owns 64 query rows of a tile (a token's query heads of one KV head are neighbouring rows); one
warp of the last warpgroup finds the tiles, fetches queries, keys and values into 128-byte-swizzled shared memory, one
bulk copy a page, and announces them on mbarriers; pages of e4m3 numbers are converted there by its other warps. Blocks
are persistent: the next tile is fetched while the current one ends. Each role has a file (`_fetch`, `_convert`,
`_attend`), as have what they share (`_memory`) and what may vary (`_tuning`). `attention_prefill.py` is the version for
other cards and page sizes.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_attend import attend_tiles
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_convert import convert_tiles
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_fetch import fetch_tiles
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_memory import PrefillMemory, encode_maps
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import HopperTuning, fits
from relaxpack.schedules.kernels.cuda.common import device
from relaxpack.schedules.kernels.cuda.fragments import AWAIT, RELEASE
from tvm.script import tirx as T


def _body(spec: AttentionSpec, tuning: HopperTuning) -> Any:
    CONSUMERS = tuning.consumers
    PRODUCER, FP8, THREADS = CONSUMERS * 4, spec.fp8, tuning.threads(spec)      # PRODUCER: the warp that fetches
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = tuning.registers(spec)
    encode = encode_maps(spec, tuning)
    fetch, convert, attend = fetch_tiles(spec, tuning), convert_tiles(spec, tuning), attend_tiles(spec, tuning)
    assert fits(spec, tuning) and CONSUMERS in (2, 3)

    @T.inline
    def body(q, layer, pages, page_table, query_start, lengths, y, t, b, p):
        q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        page_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode(q_map, page_map, q, pages, t, p)
        with device():
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            bx = T.cta_id([T.Cast("int32", tuning.grid(spec, t, b, T.min))])
            wid = T.warp_id([THREADS // 32])
            tx = T.thread_id([THREADS])
            pool = T.SMEMPool()
            memory = T.meta_var(PrefillMemory(spec, tuning, pool))
            initialise = T.meta_var(memory.initialise())
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

            if tx == 0:
                T.ptx["prefetch.tensormap"](T.address_of(q_map))
                T.ptx["prefetch.tensormap"](T.address_of(page_map))
                initialise()
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
                    fetch(memory, q_map, page_map, layer, page_table, query_start, lengths, b, p, bx, lane,
                          key, end, rows, position, start, head, q_stage, q_phase, k_stage, k_phase, v_stage, v_phase)
                if FP8:
                    if wid > PRODUCER:
                        convert(memory, wid - (PRODUCER + 1), lane, k_stage, k_phase, v_stage, v_phase)
            else:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](CONSUMER_REGISTERS)
                attend(memory, y, wid, lane,
                       key, end, rows, position, start, head, q_stage, q_phase, k_stage, k_phase, v_stage, v_phase)

    return body


def hopper_function(spec: AttentionSpec, tuning: HopperTuning, few: tuple[int, HopperTuning] | None = None) -> Any:
    """`few`: another tuning for at most so many tokens; the host decides."""
    H, KV, PS, MP, L, D = (spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages, spec.num_layers, spec.head_dim)
    act, kv = spec.activation_dtype, spec.page_dtype
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
