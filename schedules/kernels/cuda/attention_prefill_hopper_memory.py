"""The shared memory of Hopper's prefill attention: tiles, the mbarriers that announce and free them, and the words that
describe a tile of queries. Every barrier of an array belongs to the stage of the same index.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import INFO, HopperTuning
from tvm.script import tirx as T

START, TOKENS_LEFT, POSITION, FIRST_KEY, HEAD, END = range(6)     # words of `info`; the last one of shared keys only
SWIZZLE_64, SWIZZLE_128, PROMOTE_128 = 2, 3, 2                # of a tensor map
TMA_LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
RAW_KEYS, RAW_VALUES, RAW_END = range(3)                      # what a tile of e4m3 numbers is


class PrefillMemory:
    """`queries` (stage, half of a row, row, 64); `keys` and `values` (stage, group of 8 rows, half, row, 64), all swizzled
    by 128 bytes. Pages of e4m3 numbers: `raw` (stage, group, part of a row, row, bytes of a part), swizzled by the bytes of
    a part; keys and values alike, in the order in which they are consumed, `raw_kind` says which."""

    def __init__(self, spec: AttentionSpec, tuning: HopperTuning, pool: Any) -> None:
        act, D, halves, stages = spec.activation_dtype, spec.head_dim, spec.head_dim // 64, tuning.stages
        self.spec, self.tuning = spec, tuning
        self.queries = pool.alloc((tuning.query_stages, halves, tuning.rows, 64), act, align=1024)
        self.keys = pool.alloc((stages, tuning.keys // 8, halves, 8, 64), act, align=1024)
        self.values = pool.alloc((stages, tuning.keys // 8, halves, 8, 64), act, align=1024)
        if spec.fp8:
            part = raw_part(D)
            self.raw = pool.alloc((tuning.raw_stages, tuning.keys // 8, D // part, 8, part), "uint8", align=1024)
            self.full_raw = pool.alloc((tuning.raw_stages,), "uint64", align=8)
            self.empty_raw = pool.alloc((tuning.raw_stages,), "uint64", align=8)
            self.raw_kind = pool.alloc((tuning.raw_stages,), "int32", align=4)
        self.full_q = pool.alloc((tuning.query_stages,), "uint64", align=8)
        self.empty_q = pool.alloc((tuning.query_stages,), "uint64", align=8)
        self.full_k = pool.alloc((stages,), "uint64", align=8)
        self.empty_k = pool.alloc((stages,), "uint64", align=8)
        self.full_v = pool.alloc((stages + 1,), "uint64", align=8)     # the last one: a tile whose unseen rows become zeros
        self.empty_v = pool.alloc((stages,), "uint64", align=8)
        self.info = pool.alloc((tuning.query_stages, INFO), "int32", align=16)
        pool.commit()

    def initialise(self, every_lane: bool = False) -> Any:
        """Inline, of one thread: all barriers, by how many arrivals fill or free a stage. `every_lane`: each thread of a
        consumer, not one for its warp, says that it is done with the queries and what was told of them."""
        fp8, tuning = self.spec.fp8, self.tuning
        consumers, fetchers = tuning.consumers * 4, tuning.producers(self.spec) - 1 if fp8 else 1
        readers = consumers * 32 if every_lane else consumers

        @T.inline
        def initialise():
            for s in T.unroll(tuning.query_stages):
                T.ptx.mbarrier.init.shared.b64(self.full_q.ptr_to([s]), T.uint32(1))
                T.ptx.mbarrier.init.shared.b64(self.empty_q.ptr_to([s]), T.uint32(readers))
            for s in T.unroll(tuning.stages):
                T.ptx.mbarrier.init.shared.b64(self.full_k.ptr_to([s]), T.uint32(fetchers))
                T.ptx.mbarrier.init.shared.b64(self.empty_k.ptr_to([s]), T.uint32(consumers))
                T.ptx.mbarrier.init.shared.b64(self.empty_v.ptr_to([s]), T.uint32(consumers))
            for s in T.unroll(tuning.stages + 1):
                T.ptx.mbarrier.init.shared.b64(self.full_v.ptr_to([s]), T.uint32(fetchers))
            if fp8:
                for s in T.unroll(tuning.raw_stages):
                    T.ptx.mbarrier.init.shared.b64(self.full_raw.ptr_to([s]), T.uint32(1))
                    T.ptx.mbarrier.init.shared.b64(self.empty_raw.ptr_to([s]), T.uint32(fetchers))
            T.ptx.fence.proxy.async_.shared__cta()

        return initialise


def raw_part(head_dim: int) -> int:
    """Bytes of a part of a row of e4m3 numbers: what a swizzle spreads over the banks."""
    return min(head_dim, 128)


def encode_maps(spec: AttentionSpec, tuning: HopperTuning) -> Any:
    """Inline, of the host: the tensor maps of the queries, a box of which is a tile, and of the pages, seen as [groups of 8
    rows][half of a row][row][64] (e4m3 numbers: [part][row][bytes]): a box of any number of groups arrives as it is read."""
    D, H, KV, PS, L = spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.num_layers
    HALVES, TOKENS, BOX, PART = D // 64, tuning.tokens(spec), min(PS, tuning.keys), raw_part(D)
    G = H // KV if tuning.packed else 1                    # query heads of a tile
    act, kv, FP8, SWIZZLE_RAW = spec.activation_dtype, spec.page_dtype, spec.fp8, SWIZZLE_128 if PART == 128 else SWIZZLE_64

    @T.inline
    def encode_maps(q_map, page_map, q, pages, t, p):
        T.call_packed("runtime.cuTensorMapEncodeTiled", q_map, act, 4, q.data, 64, H, t, HALVES, D * 2, H * D * 2, 128,
                      64, G, TOKENS, 1, 1, 1, 1, 1, 0, SWIZZLE_128, PROMOTE_128, 0)
        if FP8:
            T.call_packed("runtime.cuTensorMapEncodeTiled", page_map, kv, 4, pages.data,
                          PART, 8, D // PART, L * p * (2 * KV * PS // 8), D, PART, D * 8,
                          PART, 8, D // PART, BOX // 8, 1, 1, 1, 1, 0, SWIZZLE_RAW, PROMOTE_128, 0)
        else:
            T.call_packed("runtime.cuTensorMapEncodeTiled", page_map, kv, 4, pages.data,
                          64, 8, HALVES, L * p * (2 * KV * PS // 8), D * 2, 128, D * 16,
                          64, 8, HALVES, BOX // 8, 1, 1, 1, 1, 0, SWIZZLE_128, PROMOTE_128, 0)

    return encode_maps


@T.inline
def advance(stage, phase, stages):
    """The next stage of a ring; `phase` changes with every turn."""
    stage = stage + 1
    if stage == stages:
        stage = 0
        phase = phase ^ 1
