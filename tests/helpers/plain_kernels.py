"""A kernel provider of plain loops for float32: the slowest correct one. Pass tests use it, so that they depend on no
schedule; weights stay `[N, K]`, gate rows before up rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import (
    COUNT_BITS,
    EDIT_BITS,
    IN_PROMPT,
    NORM_GROUP,
    TOP_LOGPROBS,
    AttentionSpec,
    EmbeddingSpec,
    Kernel,
    LinearSpec,
    NormSpec,
    SamplingSpec,
    Stage,
    WeightLayout,
    counts_width,
)
from relaxpack.weight_format import QuantizedTensor, WeightFormat
from tvm.script import tirx as T

ATTRS = {"op_pattern": 8, "tirx.is_scheduled": True, "tirx.noalias": True}


def _kernel(func: Any, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...],
            inplace: tuple[str, ...] = ()) -> Kernel:
    return Kernel((Stage(func, name, inputs, outputs, inplace),), "rule:plain")


def _silu(x: Any) -> Any:
    return x / (T.float32(1) + T.exp(-x))


def _gelu(x: Any) -> Any:
    y = T.float32(np.sqrt(2 / np.pi)) * (x + T.float32(0.044715) * x * x * x)
    return T.float32(0.5) * x * (T.float32(1) + T.tanh(y))


_SCALAR = {"swiglu": _silu, "geglu": _gelu}


@functools.cache
def _linear(n: int, k: int, bias: bool, glu: str | None) -> Any:
    gated, act = glu is not None, _SCALAR[glu or "swiglu"]
    width = n // 2 if gated else n
    bias_n = n if bias else 1

    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, w: T.Buffer((T.int64(n), T.int64(k)), "float32"),
          bias_b: T.Buffer((T.int64(bias_n),), "float32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(k)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(width)), "float32")
        for i in range(t):
            for j in range(width):
                a = T.alloc_buffer((2,), "float32")
                a[0] = T.float32(0)
                a[1] = T.float32(0)
                for c in range(k):
                    a[0] = a[0] + x[i, c] * w[j, c]
                    if gated:
                        a[1] = a[1] + x[i, c] * w[width + j, c]
                if bias:
                    a[0] = a[0] + bias_b[j]
                    if gated:
                        a[1] = a[1] + bias_b[width + j]
                if gated:
                    y[i, j] = act(a[0]) * a[1]
                else:
                    y[i, j] = a[0]

    @T.prim_func(private=True, s_tir=True)
    def g(x_h: T.handle, w: T.Buffer((T.int64(n), T.int64(k)), "float32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(k)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(width)), "float32")
        for i in range(t):
            for j in range(width):
                a = T.alloc_buffer((2,), "float32")
                a[0] = T.float32(0)
                a[1] = T.float32(0)
                for c in range(k):
                    a[0] = a[0] + x[i, c] * w[j, c]
                    if gated:
                        a[1] = a[1] + x[i, c] * w[width + j, c]
                if gated:
                    y[i, j] = act(a[0]) * a[1]
                else:
                    y[i, j] = a[0]
    return f if bias else g


@functools.cache
def _add(h: int) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, r_h: T.handle, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        r = T.match_buffer(r_h, (t, T.int64(h)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            for j in range(h):
                y[i, j] = x[i, j] + r[i, j]
    return f


@functools.cache
def _prepare(h: int) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, w: T.Buffer((T.int64(h),), "float32"), scaled_h: T.handle, squares_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        scaled = T.match_buffer(scaled_h, (t, T.int64(h)), "float32")
        squares = T.match_buffer(squares_h, (t, T.int64(h // NORM_GROUP)), "float32")
        for i in range(t):
            for g in range(h // NORM_GROUP):
                squares[i, g] = T.float32(0)
                for j in range(NORM_GROUP):
                    scaled[i, g * NORM_GROUP + j] = x[i, g * NORM_GROUP + j] * w[g * NORM_GROUP + j]
                    squares[i, g] = squares[i, g] + x[i, g * NORM_GROUP + j] * x[i, g * NORM_GROUP + j]
    return f


@functools.cache
def _normed(h: int, eps: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(scaled_h: T.handle, squares_h: T.handle, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        scaled = T.match_buffer(scaled_h, (t, T.int64(h)), "float32")
        squares = T.match_buffer(squares_h, (t, T.int64(h // NORM_GROUP)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            a = T.alloc_buffer((1,), "float32")
            a[0] = T.float32(0)
            for g in range(h // NORM_GROUP):
                a[0] = a[0] + squares[i, g]
            for j in range(h):
                y[i, j] = scaled[i, j] / T.sqrt(a[0] / T.float32(h) + T.float32(eps))
    return f


@functools.cache
def _embedding(v: int, h: int, factor: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(ids_h: T.handle, w: T.Buffer((T.int64(v), T.int64(h)), "float32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        ids = T.match_buffer(ids_h, (t,), "int32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            for j in range(h):
                y[i, j] = w[T.max(T.min(ids[i], v - 1), 0), j] * T.float32(factor)      # clamped, as on a GPU
    return f


@functools.cache
def _norm(h: int, eps: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, w: T.Buffer((T.int64(h),), "float32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            a = T.alloc_buffer((1,), "float32")
            a[0] = T.float32(0)
            for j in range(h):
                a[0] = a[0] + x[i, j] * x[i, j]
            for j in range(h):
                y[i, j] = x[i, j] / T.sqrt(a[0] / T.float32(h) + T.float32(eps)) * w[j]
    return f


@functools.cache
def _add_norm(h: int, eps: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, r_h: T.handle, w: T.Buffer((T.int64(h),), "float32"), s_h: T.handle, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        r = T.match_buffer(r_h, (t, T.int64(h)), "float32")
        s = T.match_buffer(s_h, (t, T.int64(h)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            a = T.alloc_buffer((1,), "float32")
            a[0] = T.float32(0)
            for j in range(h):
                s[i, j] = x[i, j] + r[i, j]
                a[0] = a[0] + s[i, j] * s[i, j]
            for j in range(h):
                y[i, j] = s[i, j] / T.sqrt(a[0] / T.float32(h) + T.float32(eps)) * w[j]
    return f


@functools.cache
def _rope_append(s: AttentionSpec) -> Any:
    L, H, KV, D, R, P = s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim, s.rotary_dim, s.page_size
    half, positions_n = R // 2, s.max_position
    assert s.qk_norm_epsilon is None, "PlainKernels has no head norm"

    @T.prim_func(private=True, s_tir=True)
    def f(qkv_h: T.handle, table: T.Buffer((T.int64(positions_n), T.int64(R)), "float32"), pos_h: T.handle,
          slot_h: T.handle, pages_h: T.handle, layer: T.int64, q_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        p = T.int64()
        qkv = T.match_buffer(qkv_h, (t, T.int64((H + 2 * KV) * D)), "float32")
        pos = T.match_buffer(pos_h, (t,), "int32")
        slot = T.match_buffer(slot_h, (t,), "int32")
        pages = T.match_buffer(pages_h, (T.int64(L), p, T.int64(2), T.int64(KV), T.int64(P), T.int64(D)), "float32")
        q = T.match_buffer(q_h, (t, T.int64(H * D)), "float32")
        for i in range(t):
            for h in range(H + 2 * KV):
                for d in range(D):
                    v = T.alloc_buffer((1,), "float32")
                    v[0] = qkv[i, h * D + d]
                    if h < H + KV:
                        if d < half:
                            v[0] = v[0] * table[pos[i], d] - qkv[i, h * D + d + half] * table[pos[i], half + d]
                        elif d < R:
                            v[0] = v[0] * table[pos[i], d - half] + qkv[i, h * D + d - half] * table[pos[i], d]
                    if h < H:
                        q[i, h * D + d] = v[0]
                    elif h < H + KV:
                        pages[layer, slot[i] // P, 0, h - H, slot[i] % P, d] = v[0]
                    else:
                        pages[layer, slot[i] // P, 1, h - H - KV, slot[i] % P, d] = v[0]
    return f


@functools.cache
def _attention(s: AttentionSpec, which: str) -> Any:
    L, H, KV, D, P, M = s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim, s.page_size, s.max_pages
    window, scale, G = s.window or 1 << 30, s.scale, s.num_heads // s.num_kv_heads

    @T.inline
    def one_row(q, pages, table, y, layer, row, seq, last, leader, common):
        for h in range(H):
            acc = T.alloc_buffer((D + 3,), "float32")
            for d in range(D + 3):
                acc[d] = T.float32(0)
            acc[D + 1] = T.float32(-1e30)
            for pass_ in range(2):
                for k in range(last + 1):
                    if k > last - window:
                        acc[D + 2] = T.float32(0)
                        for d in range(D):
                            acc[D + 2] = (acc[D + 2] + q[row, h * D + d]
                                          * pages[layer, table[T.if_then_else(k < common, leader, seq), k // P], 0,
                                                  h // G, k % P, d])
                        acc[D + 2] = acc[D + 2] * T.float32(scale)
                        if pass_ == 0:
                            acc[D + 1] = T.max(acc[D + 1], acc[D + 2])
                        else:
                            acc[D + 2] = T.exp(acc[D + 2] - acc[D + 1])
                            acc[D] = acc[D] + acc[D + 2]
                            for d in range(D):
                                acc[d] = acc[d] + acc[D + 2] * pages[
                                    layer, table[T.if_then_else(k < common, leader, seq), k // P], 1, h // G, k % P, d]
            for d in range(D):
                y[row, h * D + d] = acc[d] / acc[D]

    @T.prim_func(private=True, s_tir=True)
    def decode(q_h: T.handle, pages_h: T.handle, table_h: T.handle, len_h: T.handle, layer: T.int64, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, T.int64(H * D)), "float32")
        pages = T.match_buffer(pages_h, (T.int64(L), p, T.int64(2), T.int64(KV), T.int64(P), T.int64(D)), "float32")
        table = T.match_buffer(table_h, (t, T.int64(M)), "int32")
        lengths = T.match_buffer(len_h, (t,), "int32")
        y = T.match_buffer(y_h, (t, T.int64(H * D)), "float32")
        for i in range(t):
            one_row(q, pages, table, y, layer, i, i, lengths[i] - 1, i, 0)

    @T.prim_func(private=True, s_tir=True)
    def spread(q_h: T.handle, pages_h: T.handle, table_h: T.handle, len_h: T.handle, shared_h: T.handle, layer: T.int64,
               y_h: T.handle):
        """The pages of shared keys are those of the last row that has any."""
        T.func_attr(ATTRS)
        t = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, T.int64(H * D)), "float32")
        pages = T.match_buffer(pages_h, (T.int64(L), p, T.int64(2), T.int64(KV), T.int64(P), T.int64(D)), "float32")
        table = T.match_buffer(table_h, (t, T.int64(M)), "int32")
        lengths = T.match_buffer(len_h, (t,), "int32")
        shared = T.match_buffer(shared_h, (t,), "int32")
        y = T.match_buffer(y_h, (t, T.int64(H * D)), "float32")
        leader = T.alloc_buffer((1,), "int64")
        leader[0] = T.int64(0)
        for i in range(t):
            if shared[i] > 0:
                leader[0] = i
        for i in range(t):
            one_row(q, pages, table, y, layer, i, i, lengths[i] - 1, leader[0], shared[i])

    @T.prim_func(private=True, s_tir=True)
    def prefill_(q_h: T.handle, pages_h: T.handle, table_h: T.handle, start_h: T.handle, len_h: T.handle,
                 layer: T.int64, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        b = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, T.int64(H * D)), "float32")
        pages = T.match_buffer(pages_h, (T.int64(L), p, T.int64(2), T.int64(KV), T.int64(P), T.int64(D)), "float32")
        table = T.match_buffer(table_h, (b, T.int64(M)), "int32")
        start = T.match_buffer(start_h, (b + T.int64(1),), "int32")
        lengths = T.match_buffer(len_h, (b,), "int32")
        y = T.match_buffer(y_h, (t, T.int64(H * D)), "float32")
        for j in range(b):
            for i in range(start[j + 1] - start[j]):
                one_row(q, pages, table, y, layer, start[j] + i, j, lengths[j] - start[j + 1] + start[j] + i,
                        j, 0)
    return {"prefill": prefill_, "spread": spread, "decode": decode}[which]


@functools.cache
def _sample(vocab: int, constrained: bool) -> Any:
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
def _arrive(n: int) -> Any:
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
def _top_logprobs(vocab: int) -> Any:
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


class PlainKernels:
    """`relaxpack.kernel_spec.KernelProvider` for float32 weights, activations and pages."""

    def weight_layout(self, weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
        assert weight.name == "f32"
        return WeightLayout("plain", (("", (out_features, in_features), "float32"),))

    def pack(self, layout: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
        assert isinstance(weight, np.ndarray)
        return {"": weight}

    def linear(self, spec: LinearSpec) -> Kernel:
        n, k = spec.out_features, spec.in_features
        name = f"linear_{n}x{k}{'_bias' * spec.bias}{'_' + spec.glu if spec.glu else ''}"
        first, x = [], "x"
        temporaries: dict[str, Any] = {}
        if spec.norm_epsilon is not None:
            first, x = [Stage(_normed(k, spec.norm_epsilon), f"normed_{k}", ("x", "squares"), ("normed",))], "normed"
            temporaries["normed"] = (("t", k), "float32")
        inputs = (x, "weight", "bias") if spec.bias else (x, "weight")
        linear = _linear(n, k, spec.bias, spec.glu)
        if not spec.residual:
            return Kernel((*first, Stage(linear, name, inputs, ("y",))), "rule:plain", temporaries)
        temporaries["product"] = (("t", n), "float32")
        stages = [*first, Stage(linear, name, inputs, ("product",)),
                  Stage(_add(n), f"add_{n}", ("product", "residual"), ("y",))]
        if spec.prepares_norm:
            stages.append(Stage(_prepare(n), f"prepare_{n}", ("y", "norm_weight"), ("scaled", "squares")))
        return Kernel(tuple(stages), "rule:plain", temporaries)

    def folds_norm(self, spec: LinearSpec) -> bool:
        return (spec.out_features if spec.prepares_norm else spec.in_features) % NORM_GROUP == 0

    def embedding(self, spec: EmbeddingSpec) -> Kernel:
        gather = _embedding(spec.vocab_size, spec.hidden_size, spec.factor)
        return _kernel(gather, "embedding", ("token_ids", "weight"), ("y",))

    def norm(self, spec: NormSpec) -> Kernel:
        h, eps = spec.hidden_size, spec.epsilon
        if spec.residual:
            return _kernel(_add_norm(h, eps), "add_rms_norm", ("x", "residual", "weight"), ("total", "y"))
        return _kernel(_norm(h, eps), "rms_norm", ("x", "weight"), ("y",))

    def rope_append(self, spec: AttentionSpec) -> Kernel:
        return _kernel(_rope_append(spec), "rope_append", ("qkv", "rope_table", "positions", "slots", "pages", "layer"),
                       ("q",), ("pages",))

    def spread_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        """For more than one row."""
        if rows < 2:
            return None
        return _kernel(_attention(spec, "spread"), "spread_attention",
                       ("q", "pages", "page_table", "lengths", "shared", "layer"), ("y",))

    def decode_attention(self, spec: AttentionSpec) -> Kernel:
        return _kernel(_attention(spec, "decode"), f"decode_attention_{spec.window}",
                       ("q", "pages", "page_table", "lengths", "layer"), ("y",))

    def prefill_attention(self, spec: AttentionSpec) -> Kernel:
        return _kernel(_attention(spec, "prefill"), f"prefill_attention_{spec.window}",
                       ("q", "pages", "page_table", "query_start", "lengths", "layer"), ("y",))

    def head_sample(self, spec: LinearSpec, sampling: SamplingSpec) -> Kernel | None:
        if spec.max_rows is None or spec.max_rows > 2:
            return None
        linear, n = self.linear(spec), spec.out_features
        *before, head = linear.stages
        (draw,) = self.sample(sampling).stages
        return Kernel((*before, replace(head, outputs=("product",)),
                       Stage(_arrive(n), f"arrive_{n}", ("product", "arrived"), ("y",), ("arrived",)),
                       replace(draw, inputs=("y", *draw.inputs[1:]))), "rule:plain",
                      {**linear.temporaries, "product": (("t", n), "float32")}, {"arrived": ((1,), "int32")})

    def rope_append_attention(self, spec: AttentionSpec, rows: int) -> Kernel | None:
        """Two stages with the queries between them, for up to two rows."""
        if rows > 2:
            return None
        append, attend = self.rope_append(spec).stages[0], self.decode_attention(spec).stages[0]
        return Kernel((replace(append, name="fused_append"), replace(attend, name=f"fused_attention_{spec.window}")),
                      "rule:plain", {"q": (("t", spec.num_heads * spec.head_dim), "float32")})

    def sample(self, spec: SamplingSpec) -> Kernel:
        """No filters. The noise of a draw is another one than a GPU's."""
        masked = ("allowed",) if spec.constrained else ()
        return _kernel(_sample(spec.vocab_size, spec.constrained), "sample_constrained" if masked else "sample",
                       ("logits", "settings", "counters", "counts", *masked, "drawn"), (), ("counts", "drawn"))

    def top_logprobs(self, vocab_size: int) -> Kernel:
        return _kernel(_top_logprobs(vocab_size), "top_logprobs", ("logits", "counters"), ("top_ids", "top_logprobs"))
