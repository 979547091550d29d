"""Loops in float32 for `PlainKernels`: sampling, the count of a head's blocks, and the likeliest tokens."""

from __future__ import annotations

import functools
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import COUNT_BITS, EDIT_BITS, IN_PROMPT, TOP_LOGPROBS, counts_width
from tests.helpers.plain_linear import ATTRS
from tvm.script import tirx as T


@functools.cache
def sample_loops(vocab: int, constrained: bool) -> Any:
    """With a temperature, an arbitrary number made of seed, position and token is added: a draw that depends on these
    and the row alone."""
    width, words, counted = counts_width(vocab), -(-vocab // 32), (1 << COUNT_BITS) - 1

    @T.inline
    def draw(logits, settings, counters, counts, allowed, drawn, t):
        for i in range(t):
            best = T.alloc_buffer((1,), "float32")
            peak = T.alloc_buffer((1,), "float32")
            total = T.alloc_buffer((1,), "float32")
            finite = T.alloc_buffer((1,), "int32")
            stale = T.alloc_buffer((1,), "int32")
            drawn[i, 0] = -2
            finite[0] = 1
            best[0] = T.float32("-inf")
            peak[0] = T.float32("-inf")
            total[0] = T.float32(0)
            stale[0] = -1
            if counters[i, 4] >= 0:
                if counts[counters[i, 4], vocab + 1] == counters[i, 3]:
                    stale[0] = counts[counters[i, 4], vocab]
            for j in range(vocab):
                word = T.alloc_buffer((1,), "uint32")
                seen = T.alloc_buffer((1,), "int32")
                score = T.alloc_buffer((1,), "float32")
                score[0] = logits[i, j]
                peak[0] = T.max(peak[0], score[0])
                if counters[i, 4] >= 0:
                    seen[0] = counts[counters[i, 4], j]
                    if j == stale[0]:
                        seen[0] = seen[0] - 1
                    if (seen[0] & (IN_PROMPT | counted)) != 0:
                        if score[0] > T.float32(0):
                            score[0] = score[0] / settings[i, 3]
                        else:
                            score[0] = score[0] * settings[i, 3]
                    if (seen[0] & counted) > 0:
                        score[0] = score[0] - (settings[i, 5] * T.Cast("float32", seen[0] & counted) + settings[i, 4])
                    if (seen[0] >> COUNT_BITS & ((1 << EDIT_BITS) - 1)) > 0:
                        score[0] = score[0] + T.reinterpret("float32", counts[
                            counters[i, 4], vocab + (seen[0] >> COUNT_BITS & ((1 << EDIT_BITS) - 1))])
                if constrained:
                    if counters[i, 5] >= 0:
                        if (allowed[counters[i, 5], j // 32] >> (j % 32)) & 1 == 0:
                            score[0] = T.float32("-inf")
                word[0] = (T.Cast("uint32", counters[i, 1]) * T.uint32(747796405)
                           + T.Cast("uint32", counters[i, 3]) * T.uint32(2891336453)
                           + T.Cast("uint32", j + 1) * T.uint32(277803737))
                word[0] = (word[0] ^ (word[0] >> T.uint32(15))) * T.uint32(2654435769)
                score[0] = score[0] + settings[i, 0] * T.float32(4e-9) * T.Cast("float32", word[0] >> T.uint32(4))
                if score[0] > best[0]:
                    best[0] = score[0]
                    drawn[i, 0] = j
                # NaN or +inf, by its bits: TVM rewrites the negation of a comparison, which NaN would pass.
                bits = T.alloc_buffer((1,), "int32")
                bits[0] = T.reinterpret("int32", logits[i, j])
                if (bits[0] & 0x7FFFFFFF) > 0x7F800000 or bits[0] == 0x7F800000:
                    finite[0] = 0
            for j in range(vocab):
                total[0] = total[0] + T.exp(logits[i, j] - peak[0])
            drawn[i, 1] = 0
            if finite[0] == 0:
                drawn[i, 0] = -1
            elif drawn[i, 0] >= 0:
                drawn[i, 1] = T.reinterpret("int32", logits[i, drawn[i, 0]] - peak[0] - T.log(total[0]))
                if counters[i, 4] >= 0:
                    if stale[0] >= 0:
                        counts[counters[i, 4], stale[0]] = counts[counters[i, 4], stale[0]] - 1
                    counts[counters[i, 4], drawn[i, 0]] = counts[counters[i, 4], drawn[i, 0]] + 1
                    counts[counters[i, 4], vocab] = drawn[i, 0]
                    counts[counters[i, 4], vocab + 1] = counters[i, 3]

    if constrained:
        @T.prim_func(private=True, s_tir=True)
        def g(logits_h: T.handle, settings_h: T.handle, counters_h: T.handle, counts_h: T.handle, allowed_h: T.handle,
              drawn_h: T.handle):
            T.func_attr(ATTRS)
            t = T.int64()
            c = T.int64()
            m = T.int64()
            logits = T.match_buffer(logits_h, (t, T.int64(vocab)), "float32")
            settings = T.match_buffer(settings_h, (t, T.int64(8)), "float32")
            counters = T.match_buffer(counters_h, (t, T.int64(8)), "int32")
            counts = T.match_buffer(counts_h, (c, T.int64(width)), "int32")
            allowed = T.match_buffer(allowed_h, (m, T.int64(words)), "int32")
            d = T.int64()
            drawn = T.match_buffer(drawn_h, (d, T.int64(2)), "int32")
            draw(logits, settings, counters, counts, allowed, drawn, t)
        return g

    @T.prim_func(private=True, s_tir=True)
    def f(logits_h: T.handle, settings_h: T.handle, counters_h: T.handle, counts_h: T.handle, drawn_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        c = T.int64()
        logits = T.match_buffer(logits_h, (t, T.int64(vocab)), "float32")
        settings = T.match_buffer(settings_h, (t, T.int64(8)), "float32")
        counters = T.match_buffer(counters_h, (t, T.int64(8)), "int32")
        counts = T.match_buffer(counts_h, (c, T.int64(width)), "int32")
        d = T.int64()
        drawn = T.match_buffer(drawn_h, (d, T.int64(2)), "int32")
        draw(logits, settings, counters, counts, None, drawn, t)
    return f


@functools.cache
def arrive_loops(n: int) -> Any:
    """Counts its rows in `arrived` and adds the count that it found, which must be zero."""
    @T.prim_func(private=True, s_tir=True)
    def f(product_h: T.handle, arrived: T.Buffer((T.int64(1),), "int32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        product = T.match_buffer(product_h, (t, T.int64(n)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(n)), "float32")
        found = T.alloc_buffer((1,), "int32")
        found[0] = arrived[0]
        for i in range(t):
            for j in range(n):
                y[i, j] = product[i, j] + T.Cast("float32", found[0])
            arrived[0] = arrived[0] + 1
        for _ in range(t):
            arrived[0] = arrived[0] - 1
    return f


@functools.cache
def top_logprobs_loops(vocab: int) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(logits_h: T.handle, counters_h: T.handle, ids_h: T.handle, logprobs_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        counters = T.match_buffer(counters_h, (t, T.int64(8)), "int32")
        logits = T.match_buffer(logits_h, (t, T.int64(vocab)), "float32")
        ids = T.match_buffer(ids_h, (t, T.int64(TOP_LOGPROBS)), "int32")
        logprobs = T.match_buffer(logprobs_h, (t, T.int64(TOP_LOGPROBS)), "float32")
        for i in range(t):
            total = T.alloc_buffer((1,), "float32")
            total[0] = T.float32(0)
            for k in range(T.min(T.max(counters[i, 6], 1), TOP_LOGPROBS)):
                ids[i, k] = vocab
                for j in range(vocab):
                    taken = T.alloc_buffer((1,), "int32")
                    taken[0] = 0
                    for m in range(k):
                        if ids[i, m] == j:
                            taken[0] = 1
                    if taken[0] == 0:
                        if ids[i, k] == vocab:
                            ids[i, k] = j
                        elif logits[i, j] > logits[i, ids[i, k]]:
                            ids[i, k] = j
            for j in range(vocab):
                total[0] = total[0] + T.exp(logits[i, j] - logits[i, ids[i, 0]])
            for k in range(T.min(counters[i, 6], TOP_LOGPROBS)):
                if ids[i, k] < vocab:
                    logprobs[i, k] = logits[i, ids[i, k]] - logits[i, ids[i, 0]] - T.log(total[0])
    return f
