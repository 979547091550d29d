"""The likeliest tokens of each row and their log-probabilities: one block a row, one pass over its logits for each of them,
so that equal logits, infinite ones and any distribution are the same to it. It stands outside the captured step and runs
only where a request asks.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import TOP_LOGPROBS, Kernel, SamplingSpec, Stage
from relaxpack.schedules.kernels.cuda.fragments import AWAIT, RELEASE, early_launch, finish, shuffle_xor
from relaxpack.schedules.kernels.cuda.sampling_parts import TOPS, sampling_parts
from tvm.script import tirx as T

THREADS, VECTORS = 1024, 2       # 8192 logits a round


def top_logprobs(vocab_size: int, arch: str = "sm_90a") -> Kernel:
    """logits f32[b, V], counters i32[b, 8] → top_ids i32[b, TOP_LOGPROBS], top_logprobs f32[b, TOP_LOGPROBS]. A row has as
    many as its counter says; what is behind them is not written, and ids beyond a small vocabulary mean nothing."""
    early = early_launch(arch)
    func = finish(top_logprobs_function(vocab_size, early), early)
    return Kernel((Stage(func, f"top_logprobs_v{vocab_size}", ("logits", "counters"), ("top_ids", "top_logprobs")),),
                  "rule:cuda.top_logprobs")


def top_logprobs_function(vocab_size: int, early: bool) -> Any:
    V, COUNT, WARPS = vocab_size, TOP_LOGPROBS, THREADS // 32
    parts = sampling_parts(SamplingSpec(V))
    load4, better = parts.load4, parts.better

    @T.prim_func
    def top(logits_h: T.handle, counters_h: T.handle, top_ids_h: T.handle, top_logprobs_h: T.handle):
        b = T.int64()
        logits = T.match_buffer(logits_h, (b, V), "float32", align=16)
        counters = T.match_buffer(counters_h, (b, 8), "int32")
        top_ids = T.match_buffer(top_ids_h, (b, COUNT), "int32")
        top_logprobs = T.match_buffer(top_logprobs_h, (b, COUNT), "float32")
        T.device_entry()
        row = T.cta_id([T.Cast("int32", b)])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        warp_best = pool.alloc((WARPS,), "float32", align=16)
        warp_token = pool.alloc((WARPS,), "int32", align=16)
        warp_total = pool.alloc((WARPS,), "float32", align=16)
        found = pool.alloc((COUNT,), "float32", align=16)
        pool.commit()
        x = T.alloc_buffer((4 * VECTORS,), "float32", scope="local")
        best: T.float32
        token: T.int32
        last: T.float32                       # what the round before found
        last_token: T.int32
        peak: T.float32
        total: T.float32
        value: T.float32
        other: T.int32
        base: T.int32
        index: T.int32
        step: T.int32
        wanted: T.int32
        if early:
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
        last = T.float32("inf")
        last_token = -1
        peak = T.float32(0)
        total = T.float32(0)
        wanted = T.min(counters[row, TOPS], COUNT)
        step = 0
        while step < T.if_then_else(wanted > 0, T.max(wanted, 2), 0):      # the second round sums
            best = T.float32("-inf")
            token = V
            base = 0
            while base < V:
                for j in T.unroll(VECTORS):
                    load4(x, logits, row, base + (j * THREADS + tx) * 4, j * 4)
                for j in T.unroll(VECTORS):
                    for i in T.unroll(4):
                        index = base + (j * THREADS + tx) * 4 + i
                        value = x[j * 4 + i]
                        if T.And(index < V, T.Or(value < last, T.And(value == last, index > last_token))):
                            better(best, token, value, index)
                        if step == 1:
                            if value > T.float32("-inf"):
                                total = total + T.exp(value - peak)
                base = base + THREADS * VECTORS * 4
            for i in T.unroll(5):
                value = shuffle_xor(best, 1 << i)
                other = shuffle_xor(token, 1 << i)
                better(best, token, value, other)
            if tx % 32 == 0:
                warp_best[tx // 32] = best
                warp_token[tx // 32] = token
            T.cuda.cta_sync()
            for w in T.unroll(WARPS):
                better(best, token, warp_best[w], warp_token[w])
            T.cuda.cta_sync()
            if step == 0:
                peak = best
            last = best
            last_token = token
            if T.And(tx == 0, step < wanted):
                found[step] = best
                top_ids[row, step] = token
            step = step + 1
        for i in T.unroll(5):
            total = total + shuffle_xor(total, 1 << i)
        if tx % 32 == 0:
            warp_total[tx // 32] = total
        T.cuda.cta_sync()
        if tx < wanted:
            total = T.float32(0)
            for w in T.unroll(WARPS):
                total = total + warp_total[w]
            top_logprobs[row, tx] = found[tx] - peak - T.log(total)

    return top
