"""The warps that convert in Hopper's prefill attention over e4m3 pages: `wgmma` reads keys and values of 16 bits from shared
memory, so tiles of e4m3 numbers are taken back there, exactly, into the places where the consumers expect them.

What is 0x7F in a page (nobody's) becomes a finite number, so rows that nobody sees need no zeros: their weight is 0.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda import pages_fp8
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_memory import (
    RAW_END,
    RAW_KEYS,
    PrefillMemory,
    advance,
    raw_part,
)
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import HopperTuning
from tvm.script import tirx as T

AHEAD = 4                                                  # pieces that a lane reads before it converts them


def convert_tiles(spec: AttentionSpec, tuning: HopperTuning) -> Any:
    """Inline: the whole work of converting warp `part`. A piece is 16 numbers of each of 8 rows and 4 places in them: lanes
    with consecutive numbers have consecutive rows, which both swizzles spread over all banks."""
    D, STAGES, RAW_STAGES, CONVERTERS = spec.head_dim, tuning.stages, tuning.raw_stages, tuning.producers(spec) - 1
    WIDTH, PIECES = raw_part(D), tuning.keys * D // 512
    PER_GROUP = D // 64                                    # pieces of a group of 8 rows
    ROUNDS = -(-PIECES // (CONVERTERS * AHEAD))
    widen = pages_fp8.widen(spec.activation_dtype)

    def raw_place(chunk: Any, row: Any) -> tuple[Any, Any]:
        """(part of a row, byte in it) of 16 bytes as the bulk copy swizzled them."""
        inner = chunk % (WIDTH // 16)
        return chunk * 16 // WIDTH, (inner ^ (row if WIDTH == 128 else row // 2)) * 16

    @T.inline
    def convert_tiles(memory: PrefillMemory, part, lane, k_stage, k_phase, v_stage, v_phase):
        raw_stage: T.int32
        raw_phase: T.int32
        kind: T.int32
        codes = T.alloc_buffer((AHEAD * 4,), "uint32", scope="local")
        wide = T.alloc_buffer((8,), "uint32", scope="local")

        @T.inline
        def convert(into, stage, full):
            row = T.meta_var(lane % 8)
            for n in T.unroll(ROUNDS):
                for i in T.unroll(AHEAD):
                    piece = T.meta_var((n * AHEAD + i) * CONVERTERS + part)
                    chunk = T.meta_var(piece % PER_GROUP * 4 + lane // 8)
                    at, byte = T.meta_var(raw_place(chunk, row))
                    if piece < PIECES:
                        T.ptx["ld.shared.v4.b32"](codes[4 * i], codes[4 * i + 1], codes[4 * i + 2], codes[4 * i + 3],
                                                  memory.raw.ptr_to([raw_stage, piece // PER_GROUP, at, row, byte]))
                for i in T.unroll(AHEAD):
                    piece = T.meta_var((n * AHEAD + i) * CONVERTERS + part)
                    chunk = T.meta_var(piece % PER_GROUP * 4 + lane // 8)
                    if piece < PIECES:
                        for j in T.unroll(4):
                            widen(wide, 2 * j, codes[4 * i + j])
                        for e in T.unroll(2):
                            T.ptx["st.shared.v4.b32"](
                                into.ptr_to([stage, piece // PER_GROUP, chunk // 4, row,
                                             ((chunk % 4 * 2 + e) ^ row) * 8]),
                                wide[4 * e], wide[4 * e + 1], wide[4 * e + 2], wide[4 * e + 3])
            T.ptx.fence.proxy.async_.shared__cta()                   # for wgmma
            T.cuda.warp_sync()
            T.ptx.mbarrier.arrive.shared.b64(full.ptr_to([stage]), pred=lane == 0)

        @T.inline
        def enter():
            T.cuda.mbarrier_wait(memory.full_raw.ptr_to([raw_stage]), raw_phase)
            kind = memory.raw_kind[raw_stage]

        raw_stage = 0
        raw_phase = 0
        enter()
        while kind != RAW_END:
            if kind == RAW_KEYS:
                T.cuda.mbarrier_wait(memory.empty_k.ptr_to([k_stage]), k_phase ^ 1)
                convert(memory.keys, k_stage, memory.full_k)
                advance(k_stage, k_phase, STAGES)
            else:
                T.cuda.mbarrier_wait(memory.empty_v.ptr_to([v_stage]), v_phase ^ 1)
                convert(memory.values, v_stage, memory.full_v)
                advance(v_stage, v_phase, STAGES)
            T.ptx.mbarrier.arrive.shared.b64(memory.empty_raw.ptr_to([raw_stage]), pred=lane == 0)
            advance(raw_stage, raw_phase, RAW_STAGES)
            enter()

    return convert_tiles
