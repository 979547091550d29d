"""The likeliest tokens of each row and their log-probabilities, in two kernels: many blocks a row find the best token and
the softmax sum of every 256 logits, then a warp a row takes the best of these again and again, and looks for its successor
in the 256 logits it came from. Ties and infinite logits are nothing special to that. It stands outside the captured step
and runs only where a request asks.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import TOP_LOGPROBS, Kernel, SamplingSpec, Stage
from relaxpack.schedules.kernels.cuda.fragments import AWAIT, EXP2, LOG2_E, RELEASE, early_launch, finish, shuffle_xor
from relaxpack.schedules.kernels.cuda.sampling_parts import TOPS, sampling_parts
from tvm.script import tirx as T

GROUP, GROUP_THREADS = 256, 512         # a warp a group


def top_logprobs(vocab_size: int, arch: str = "sm_90a") -> Kernel:
    """logits f32[b, V], counters i32[b, 8] → top_ids i32[b, TOP_LOGPROBS], top_logprobs f32[b, TOP_LOGPROBS]. A row has as
    many as its counter says; what is behind them is not written, and ids beyond a small vocabulary mean nothing."""
    early = early_launch(arch)
    groups = -(-vocab_size // GROUP)
    name = f"top_logprobs_v{vocab_size}"
    find = finish(group_function(vocab_size, early), early, "xy", shared=False)
    take = finish(take_function(vocab_size, early), early)
    return Kernel((Stage(find, name + "_groups", ("logits", "counters"), ("heads", "tokens")),
                   Stage(take, name + "_take", ("logits", "counters", "heads", "tokens"), ("top_ids", "top_logprobs"))),
                  "rule:cuda.top_logprobs",
                  temporaries={"heads": (("b", groups, 2), "float32"), "tokens": (("b", groups), "int32")})


def group_blocks(vocab_size: int) -> int:
    return -(-vocab_size // (GROUP * (GROUP_THREADS // 32)))


def group_function(vocab_size: int, early: bool) -> Any:
    """Stage one: a warp finds the likeliest token of its GROUP, and the sum of exp relative to it."""
    V, GROUPS, BLOCKS, WARPS = vocab_size, -(-vocab_size // GROUP), group_blocks(vocab_size), GROUP_THREADS // 32
    parts = sampling_parts(SamplingSpec(V))
    load4, better = parts.load4, parts.better

    @T.prim_func
    def find_groups(logits_h: T.handle, counters_h: T.handle, heads_h: T.handle, tokens_h: T.handle):
        b = T.int64()
        logits = T.match_buffer(logits_h, (b, V), "float32", align=16)
        counters = T.match_buffer(counters_h, (b, 8), "int32")
        heads = T.match_buffer(heads_h, (b, GROUPS, 2), "float32")      # largest logit, sum of exp relative to it
        tokens = T.match_buffer(tokens_h, (b, GROUPS), "int32")
        T.device_entry()
        part, row = T.cta_id([BLOCKS, T.Cast("int32", b)])
        tx = T.thread_id([GROUP_THREADS])
        lane = T.meta_var(tx % 32)
        group = T.meta_var(part * WARPS + tx // 32)
        x = T.alloc_buffer((8,), "float32", scope="local")
        best: T.float32
        token: T.int32
        total: T.float32
        value: T.float32
        other: T.int32
        if early:
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
        if T.And(counters[row, TOPS] > 0, group < GROUPS):
            for j in T.unroll(2):
                load4(x, logits, row, group * GROUP + (j * 32 + lane) * 4, j * 4)
            best = T.float32("-inf")
            token = V
            for j in T.unroll(2):
                for i in T.unroll(4):
                    other = group * GROUP + (j * 32 + lane) * 4 + i
                    if other < V:
                        better(best, token, x[j * 4 + i], other)
            for i in T.unroll(5):
                value = shuffle_xor(best, 1 << i)
                other = shuffle_xor(token, 1 << i)
                better(best, token, value, other)
            total = T.float32(0)
            if best > T.float32("-inf"):
                for i in T.unroll(8):
                    T.ptx[EXP2](value, (x[i] - best) * T.float32(LOG2_E))
                    total = total + value
            for i in T.unroll(5):
                total = total + shuffle_xor(total, 1 << i)
            if lane == 0:
                heads[row, group, 0] = best
                heads[row, group, 1] = total
                tokens[row, group] = token

    return find_groups


def take_function(vocab_size: int, early: bool) -> Any:
    """Stage two: a warp a row takes the likeliest tokens from the groups in turn."""
    V, GROUPS, COUNT = vocab_size, -(-vocab_size // GROUP), TOP_LOGPROBS
    parts = sampling_parts(SamplingSpec(V))
    load4, better, combine_sums = parts.load4, parts.better, parts.combine_sums

    @T.prim_func
    def take(logits_h: T.handle, counters_h: T.handle, heads_h: T.handle, tokens_h: T.handle, top_ids_h: T.handle,
             top_logprobs_h: T.handle):
        b = T.int64()
        logits = T.match_buffer(logits_h, (b, V), "float32", align=16)
        counters = T.match_buffer(counters_h, (b, 8), "int32")
        heads = T.match_buffer(heads_h, (b, GROUPS, 2), "float32")
        tokens = T.match_buffer(tokens_h, (b, GROUPS), "int32")
        top_ids = T.match_buffer(top_ids_h, (b, COUNT), "int32")
        top_logprobs = T.match_buffer(top_logprobs_h, (b, COUNT), "float32")
        T.device_entry()
        row = T.cta_id([T.Cast("int32", b)])
        lane = T.thread_id([32])
        pool = T.SMEMPool()
        head = pool.alloc((GROUPS,), "float32", align=16)
        head_token = pool.alloc((GROUPS,), "int32", align=16)
        pool.commit()
        x = T.alloc_buffer((8,), "float32", scope="local")
        best: T.float32
        token: T.int32
        next_best: T.float32
        next_token: T.int32
        peak: T.float32
        total: T.float32
        value: T.float32
        noise: T.float32
        other: T.int32
        index: T.int32
        step: T.int32
        if early:
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
        if counters[row, TOPS] > 0:
            peak = T.float32("-inf")
            total = T.float32(0)
            index = lane
            while index < GROUPS:
                head[index] = heads[row, index, 0]
                head_token[index] = tokens[row, index]
                combine_sums(peak, total, heads[row, index, 0], heads[row, index, 1])
                index = index + 32
            for i in T.unroll(5):
                value = shuffle_xor(peak, 1 << i)
                noise = shuffle_xor(total, 1 << i)
                combine_sums(peak, total, value, noise)
            T.cuda.cta_sync()
            step = 0
            while step < T.min(counters[row, TOPS], COUNT):
                best = T.float32("-inf")
                token = V
                index = lane
                while index < GROUPS:
                    better(best, token, head[index], head_token[index])
                    index = index + 32
                for i in T.unroll(5):
                    value = shuffle_xor(best, 1 << i)
                    other = shuffle_xor(token, 1 << i)
                    better(best, token, value, other)
                if lane == 0:
                    top_ids[row, step] = token
                    top_logprobs[row, step] = best - peak - T.log(total)
                if token < V:       # what comes after it in its group
                    for j in T.unroll(2):
                        load4(x, logits, row, token // GROUP * GROUP + (j * 32 + lane) * 4, j * 4)
                    next_best = T.float32("-inf")
                    next_token = V
                    for j in T.unroll(2):
                        for i in T.unroll(4):
                            value = x[j * 4 + i]
                            other = token // GROUP * GROUP + (j * 32 + lane) * 4 + i
                            if T.And(other < V, T.Or(value < best, T.And(value == best, other > token))):
                                better(next_best, next_token, value, other)
                    for i in T.unroll(5):
                        value = shuffle_xor(next_best, 1 << i)
                        other = shuffle_xor(next_token, 1 << i)
                        better(next_best, next_token, value, other)
                    T.cuda.cta_sync()
                    if lane == 0:
                        head[token // GROUP] = next_best
                        head_token[token // GROUP] = next_token
                    T.cuda.cta_sync()
                step = step + 1

    return take
