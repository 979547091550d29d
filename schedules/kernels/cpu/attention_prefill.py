"""Prefill attention over pages: ragged queries, causal, with a cached prefix; blocks of queries share packed keys.

A task is (KV head, block of queries of one sequence). Its rows are (query, head of the group); per block of keys it packs
K transposed and V, both float32, and runs two small register-tiled products around an online softmax. Blocks are dealt
to threads from both ends of the sequence, because a later block sees more keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import AttentionSpec

from .attention_decode import LOWEST, softmax_step
from .builder import (
    Expr,
    Registers,
    T,
    build,
    const,
    either,
    i64,
    load,
    loop,
    minimum,
    parallel,
    splat,
    store,
    symbol,
    vectors_of,
    when,
)
from .isa import Isa, fma, to_float
from .rope_append import pages_shape


@dataclass(frozen=True)
class PrefillTuning:
    keys: int = 64      # of one softmax step
    rows: int = 48      # (queries x heads of a group) of one task
    tile: int = 3       # rows of one register tile
    columns: int = 4    # its vectors


def default_tuning(isa: Isa) -> PrefillTuning:
    return PrefillTuning(tile=4 if isa.lanes == 16 else 3)


def prefill_attention(isa: Isa, spec: AttentionSpec, tuning: PrefillTuning | None = None) -> Any:
    """PrimFunc: q f32[t, H*D], pages, page_table i32[b, max_pages], query_start i32[b+1], lengths i32[b], layer
    → y f32[t, H*D]."""
    t, p, b = symbol("t"), symbol("p"), symbol("b")
    tuning = tuning or default_tuning(isa)
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    group, lanes = heads // kv_heads, isa.lanes
    queries = max(1, tuning.rows // group)
    tile, step_keys = tuning.tile, tuning.keys
    rows = -(-queries * group // tile) * tile
    pieces = vectors_of(dim, lanes)
    params = [("q", (t, heads * dim), "float32"), ("pages", pages_shape(spec, p), spec.page_dtype),
              ("page_table", (b, spec.max_pages), "int32"), ("query_start", (b + i64(1),), "int32"),
              ("lengths", (b,), "int32"), ("layer", None, "int64"), ("y", (t, heads * dim), "float32")]

    def body(q: Any, pages: Any, page_table: Any, query_start: Any, lengths: Any, layer: Expr, y: Any) -> None:
        blocks = T.bind(b + T.truncdiv(t, i64(queries)))  # at least as many as there are
        with parallel(blocks * i64(kv_heads)) as task:
            kv_head = T.bind(T.truncdiv(task, blocks))
            order = T.bind(T.truncmod(task, blocks))
            half = T.bind(T.truncdiv(order, i64(2)))
            block = T.bind(T.Select(T.truncmod(order, i64(2)) == i64(0), half, blocks - i64(1) - half))
            found = Registers(2, 1, "int64")  # sequence, block inside it
            found[0] = i64(-1)
            found[1] = block
            with loop(b) as s:
                count = T.bind(T.Cast("int64", query_start[s + i64(1)]) - T.Cast("int64", query_start[s]))
                full = T.bind(T.truncdiv(count + i64(queries - 1), i64(queries)))
                with when(found[0] < i64(0)):
                    either(found[1] < full, lambda: found.set(0, s),
                           lambda: found.set(1, found[1] - full))
            with when(found[0] >= i64(0)):
                one_block(q, pages, page_table, query_start, lengths, layer, y, kv_head, found)

    def one_block(q: Any, pages: Any, page_table: Any, query_start: Any, lengths: Any, layer: Expr, y: Any, kv_head: Expr,
                  found: Any) -> None:
        seq = T.bind(found[0])
        inside = T.bind(found[1] * i64(queries))
        base = T.bind(T.Cast("int64", query_start[seq]))
        count = T.bind(T.Cast("int64", query_start[seq + i64(1)]) - base)
        here = T.bind(minimum(count - inside, i64(queries)))             # queries of this block
        used = T.bind(here * i64(group))                                 # rows
        tiles = T.bind(T.truncdiv(used + i64(tile - 1), i64(tile)))
        position = T.bind(T.Cast("int64", lengths[seq]) - count + inside)  # of the block's first query
        end = T.bind(position + here)
        begin = T.bind(T.max(position - i64(spec.window - 1), i64(0))) if spec.window is not None else i64(0)

        query = T.alloc_buffer((i64(rows), i64(dim)), "float32")
        acc = T.alloc_buffer((i64(rows), i64(dim)), "float32")
        scores = T.alloc_buffer((i64(rows), i64(step_keys)), "float32")
        keys = T.alloc_buffer((i64(dim), i64(step_keys)), "float32")
        values = T.alloc_buffer((i64(step_keys), i64(dim)), "float32")
        top = T.alloc_buffer((i64(rows),), "float32")
        mass = T.alloc_buffer((i64(rows),), "float32")
        with loop(tiles * i64(tile)) as r:
            store(top, T.float32(LOWEST), r)
            store(mass, T.float32(0), r)
            source = T.bind(minimum(r, used - i64(1)))  # rows beyond the last repeat it, unseen
            token = T.bind(base + inside + T.truncdiv(source, i64(group)))
            column = T.bind((kv_head * i64(group) + T.truncmod(source, i64(group))) * i64(dim))
            for at, n in pieces:
                store(query, load(q, token, column + i64(at), lanes=n) * const(spec.scale, n), r, i64(at), lanes=n)
                store(acc, const(0.0, n), r, i64(at), lanes=n)

        with loop(T.truncdiv(end - begin + i64(step_keys - 1), i64(step_keys))) as step:
            start = T.bind(begin + step * i64(step_keys))
            visible = T.bind(minimum(end - start, i64(step_keys)))
            with loop(visible) as j:
                _pack_row(spec, pages, page_table, seq, start + j, layer, kv_head, j, keys, values, pieces)
            with loop(tiles) as i:
                _product(tuning, i, query, dim, keys, [(v * lanes, lanes) for v in range(step_keys // lanes)], scores, False)
            with loop(used) as r:
                own = T.bind(position + T.truncdiv(r, i64(group)) - start)  # the query's own key, in this block's count
                for v in range(step_keys // lanes):
                    lane = T.Ramp(T.int32(v * lanes), T.int32(1), lanes)
                    seen = lane <= splat(T.Cast("int32", own), lanes)
                    value = T.Select(seen, load(scores, r, i64(v * lanes), lanes=lanes), const(LOWEST, lanes))
                    if spec.window is not None:
                        near = lane > splat(T.Cast("int32", own - i64(spec.window)), lanes)
                        value = T.Select(near, value, const(LOWEST, lanes))
                    store(scores, value, r, i64(v * lanes), lanes=lanes)
                softmax_step(isa, step_keys, scores, r, top, mass, acc, pieces)
            with loop(tiles) as i:
                _product(tuning, i, scores, visible, values, pieces, acc, True)

        with loop(used) as r:
            token = T.bind(base + inside + T.truncdiv(r, i64(group)))
            column = T.bind((kv_head * i64(group) + T.truncmod(r, i64(group))) * i64(dim))
            inverse = T.bind(T.float32(1) / T.max(mass[r], T.float32(1e-30)))
            for at, n in pieces:
                store(y, load(acc, r, i64(at), lanes=n) * splat(inverse, n), token, column + i64(at), lanes=n)

    return build(params, body)


def _pack_row(spec: AttentionSpec, pages: Any, page_table: Any, seq: Expr, position: Expr, layer: Expr, kv_head: Expr,
              j: Expr, keys: Any, values: Any, pieces: list[tuple[int, int]]) -> None:
    """Key j becomes column j of `keys`, value j row j of `values`."""
    page = T.bind(T.Cast("int64", page_table[seq, T.truncdiv(position, i64(spec.page_size))]))
    offset = T.bind(T.truncmod(position, i64(spec.page_size)))
    for at, n in pieces:
        value = load(pages, layer, page, i64(1), kv_head, offset, i64(at), lanes=n)
        store(values, to_float(value, spec.kv_dtype, n), j, i64(at), lanes=n)
    with loop(spec.head_dim) as d:
        store(keys, to_float(pages[layer, page, i64(0), kv_head, offset, d], spec.kv_dtype, 1), d, j)


def _product(tuning: PrefillTuning, index: Expr, left: Any, depth: int | Expr, right: Any,
             columns: list[tuple[int, int]], out: Any, accumulate: bool) -> None:
    """out[tile rows, columns] (+)= left[tile rows, :depth] @ right[:depth, columns], in register tiles."""
    tile = tuning.tile
    for first in range(0, len(columns), tuning.columns):
        part = columns[first:first + tuning.columns]
        sums = [[Registers(1, n) for _, n in part] for _ in range(tile)]
        rows = [T.bind(index * i64(tile) + i64(m)) for m in range(tile)]
        for m in range(tile):
            for c, (at, n) in enumerate(part):
                sums[m][c][0] = load(out, rows[m], i64(at), lanes=n) if accumulate else const(0.0, n)
        with loop(depth) as k:
            vectors = [T.bind(load(right, k, i64(at), lanes=n)) for at, n in part]
            for m in range(tile):
                value = T.bind(load(left, rows[m], k))
                for c, (_, n) in enumerate(part):
                    sums[m][c][0] = fma(splat(value, n), vectors[c], sums[m][c][0])
        for m in range(tile):
            for c, (at, n) in enumerate(part):
                store(out, sums[m][c][0], rows[m], i64(at), lanes=n)
