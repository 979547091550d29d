"""Decode attention over pages: one query a sequence, online softmax, each key and value row read once per KV head.

A task is (sequence, KV head, part of the context); parts exist only while sequences x KV heads are too few to fill the
threads. A second step merges the parts (running maximum, sum, weighted values) into y.
"""

from __future__ import annotations

from typing import Any

from relaxpack.kernel_spec import AttentionSpec

from .builder import (
    Expr,
    Registers,
    T,
    build,
    const,
    hold,
    i64,
    load,
    loop,
    minimum,
    parallel,
    rows_loop,
    splat,
    store,
    symbol,
    vectors_of,
)
from .isa import Isa, exp, fma, reduce_max, reduce_sum, to_float, vmax
from .rope_append import pages_shape

KEYS = 64           # keys of one softmax step
MAX_PARTS = 8
FEW_TASKS = 16      # sequences x KV heads below which the context is cut into parts
LOWEST = -1e30      # stands for minus infinity; differences stay finite


def decode_attention(isa: Isa, spec: AttentionSpec) -> Any:
    """PrimFunc: q f32[t, H*D], pages, page_table i32[t, max_pages], lengths i32[t], layer → y f32[t, H*D]."""
    t, p = symbol("t"), symbol("p")
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    group, lanes = heads // kv_heads, isa.lanes
    pieces = vectors_of(dim, lanes)
    params = [("q", (t, heads * dim), "float32"), ("pages", pages_shape(spec, p), spec.kv_dtype),
              ("page_table", (t, spec.max_pages), "int32"), ("lengths", (t,), "int32"), ("layer", None, "int64"),
              ("y", (t, heads * dim), "float32")]

    def body(q: Any, pages: Any, page_table: Any, lengths: Any, layer: Expr, y: Any) -> None:
        parts = T.bind(T.Select(t * i64(kv_heads) < i64(FEW_TASKS), i64(MAX_PARTS), i64(1)))
        values = T.alloc_buffer((t * i64(heads), parts, i64(dim)), "float32")
        state = T.alloc_buffer((t * i64(heads), parts, i64(2)), "float32")

        def key_row(seq: Expr, position: Expr, kind: int, kv_head: Expr) -> list[Expr]:
            page = T.bind(T.Cast("int64", page_table[seq, T.truncdiv(position, i64(spec.page_size))]))
            offset = T.bind(T.truncmod(position, i64(spec.page_size)))
            return [T.bind(to_float(load(pages, layer, page, i64(kind), kv_head, offset, i64(at), lanes=n),
                                    spec.kv_dtype, n)) for at, n in pieces]

        with parallel(t * i64(kv_heads) * parts) as task:
            part = T.bind(T.truncmod(task, parts))
            pair = T.bind(T.truncdiv(task, parts))
            seq = T.bind(T.truncdiv(pair, i64(kv_heads)))
            kv_head = T.bind(T.truncmod(pair, i64(kv_heads)))
            length = T.bind(T.Cast("int64", lengths[seq]))
            first = T.bind(T.max(length - i64(spec.window), i64(0))) if spec.window is not None else i64(0)
            steps = T.truncdiv(length - first + i64(KEYS - 1), i64(KEYS))
            chunk = T.bind(T.truncdiv(steps + parts - i64(1), parts) * i64(KEYS))
            begin = T.bind(first + part * chunk)
            end = T.bind(minimum(begin + chunk, length))

            query = T.alloc_buffer((i64(group), i64(dim)), "float32")
            acc = T.alloc_buffer((i64(group), i64(dim)), "float32")
            scores = T.alloc_buffer((i64(group), i64(KEYS)), "float32")
            top, mass = (T.alloc_buffer((i64(group),), "float32") for _ in range(2))
            for g in range(group):
                store(top, T.float32(LOWEST), i64(g))
                store(mass, T.float32(0), i64(g))
                for at, n in pieces:
                    source = load(q, seq, (kv_head * i64(group) + i64(g)) * i64(dim) + i64(at), lanes=n)
                    store(query, source * const(spec.scale, n), i64(g), i64(at), lanes=n)
                    store(acc, const(0.0, n), i64(g), i64(at), lanes=n)

            with loop(T.max(T.truncdiv(end - begin + i64(KEYS - 1), i64(KEYS)), i64(0))) as step:
                start = T.bind(begin + step * i64(KEYS))
                count = T.bind(minimum(end - start, i64(KEYS)))
                with loop(count) as j:
                    keys = key_row(seq, start + j, 0, kv_head)
                    for g in range(group):
                        sums: dict[int, Expr] = {}
                        for (at, n), key in zip(pieces, keys, strict=True):
                            value = load(query, i64(g), i64(at), lanes=n)
                            sums[n] = fma(value, key, sums[n]) if n in sums else value * key
                        total = None
                        for n, vector in sums.items():
                            one = reduce_sum(vector, n)
                            total = one if total is None else total + one
                        store(scores, total, i64(g), j)
                with loop(i64(KEYS) - count) as j:
                    for g in range(group):
                        store(scores, T.float32(LOWEST), i64(g), count + j)
                with loop(group) as g:
                    softmax_step(isa, scores, g, top, mass, acc, pieces)
                with loop(count) as j:
                    row = key_row(seq, start + j, 1, kv_head)
                    for g in range(group):
                        weight = T.bind(scores[i64(g), j])
                        for (at, n), value in zip(pieces, row, strict=True):
                            store(acc, fma(splat(weight, n), value, load(acc, i64(g), i64(at), lanes=n)),
                                  i64(g), i64(at), lanes=n)

            for g in range(group):
                row = T.bind(seq * i64(heads) + kv_head * i64(group) + i64(g))
                store(state, top[i64(g)], row, part, i64(0))
                store(state, mass[i64(g)], row, part, i64(1))
                for at, n in pieces:
                    store(values, load(acc, i64(g), i64(at), lanes=n), row, part, i64(at), lanes=n)

        def merge(row: Expr) -> None:
            _merge(row, parts, values, state, y, heads, dim, pieces)

        rows_loop(t * i64(heads), merge, serial_below=65)

    return build(params, body)


def softmax_step(isa: Isa, scores: Any, row: Expr, top: Any, mass: Any, acc: Any, pieces: list[tuple[int, int]]) -> None:
    """Turn one row of KEYS scores into weights exp(score - maximum) and rescale what was summed before."""
    lanes = isa.lanes
    vectors = [T.bind(load(scores, row, i64(v * lanes), lanes=lanes)) for v in range(KEYS // lanes)]
    biggest = vectors[0]
    for vector in vectors[1:]:
        biggest = vmax(biggest, vector, lanes)
    before = T.bind(top[row])
    now = hold(T.max(before, reduce_max(biggest, lanes)), 1)
    shrink = hold(exp(before - now, 1), 1)
    total = None
    for v, vector in enumerate(vectors):
        weight = hold(exp(vector - splat(now, lanes), lanes), lanes)
        store(scores, weight, row, i64(v * lanes), lanes=lanes)
        total = weight if total is None else total + weight
    store(mass, mass[row] * shrink + reduce_sum(total, lanes), row)
    store(top, now, row)
    for at, n in pieces:
        store(acc, load(acc, row, i64(at), lanes=n) * splat(shrink, n), row, i64(at), lanes=n)


def _merge(row: Expr, parts: Expr, values: Any, state: Any, y: Any, heads: int, dim: int,
           pieces: list[tuple[int, int]]) -> None:
    """y[row] = sum over parts of exp(top - largest top) * values, divided by the same sum of masses."""
    top, mass = Registers(1, 1), Registers(1, 1)
    total = T.alloc_buffer((i64(dim),), "float32")
    top[0] = T.float32(LOWEST)
    mass[0] = T.float32(0)
    for at, n in pieces:
        store(total, const(0.0, n), i64(at), lanes=n)
    with loop(parts) as part:
        top[0] = T.max(top[0], state[row, part, i64(0)])
    with loop(parts) as part:
        share = hold(exp(state[row, part, i64(0)] - top[0], 1), 1)
        mass[0] = mass[0] + share * state[row, part, i64(1)]
        for at, n in pieces:
            store(total, fma(splat(share, n), load(values, row, part, i64(at), lanes=n), load(total, i64(at), lanes=n)),
                  i64(at), lanes=n)
    inverse = hold(T.float32(1) / T.max(mass[0], T.float32(1e-30)), 1)
    seq = T.bind(T.truncdiv(row, i64(heads)))
    column = T.bind(T.truncmod(row, i64(heads)) * i64(dim))
    for at, n in pieces:
        store(y, load(total, i64(at), lanes=n) * splat(inverse, n), seq, column + i64(at), lanes=n)
