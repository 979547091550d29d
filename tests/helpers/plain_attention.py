"""Loops in float32 for `PlainKernels`: rotation, append and attention."""

from __future__ import annotations

import functools
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from tests.helpers.plain_linear import ATTRS
from tvm.script import tirx as T


@functools.cache
def rope_append_loops(s: AttentionSpec) -> Any:
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
def attention_loops(s: AttentionSpec, which: str) -> Any:
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
