"""Decode attention over pages: one query a sequence, online softmax, each key and value row read once per KV head.

Long contexts are cut into parts, which are then merged (running maximum, sum, weighted values) into y. A task is one part
of (sequence, KV head) where these are few, to fill the threads, else all of them. How a context is cut depends on its
length alone: a row's result is bit for bit the same, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import AttentionSpec

from .builder import (
    Expr,
    Registers,
    T,
    build,
    const,
    either,
    hold,
    hold_index,
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
from .isa import Isa, exp, fma, reduce_max, reduce_sum, to_float, vmax
from .rope_append import pages_shape

LOWEST = -1e30      # stands for minus infinity; differences stay finite


@dataclass(frozen=True)
class DecodeTuning:
    keys: int = 64           # of one softmax step
    max_parts: int = 8
    keys_of_part: int = 128  # fewer are not worth a task
    few_tasks: int = 16      # sequences x KV heads below which every part is a task
    serial_keys: int = 96    # with so few of them, up to these no threads are started


def decode_attention(isa: Isa, spec: AttentionSpec, tuning: DecodeTuning = DecodeTuning()) -> Any:
    """PrimFunc: q f32[t, H*D], pages, page_table i32[t, max_pages], lengths i32[t], layer → y f32[t, H*D]."""
    t, p, step_keys = symbol("t"), symbol("p"), tuning.keys
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    group, lanes = heads // kv_heads, isa.lanes
    pieces = vectors_of(dim, lanes)
    params = [("q", (t, heads * dim), "float32"), ("pages", pages_shape(spec, p), spec.page_dtype),
              ("page_table", (t, spec.max_pages), "int32"), ("lengths", (t,), "int32"), ("layer", None, "int64"),
              ("y", (t, heads * dim), "float32")]

    def body(q: Any, pages: Any, page_table: Any, lengths: Any, layer: Expr, y: Any) -> None:
        longest = Registers(1, 1, "int32", T.int32(0))
        with loop(t) as s:
            longest[0] = T.max(longest[0], lengths[s])

        def parts_of(length: Expr) -> Expr:
            wanted = T.truncdiv(length + i64(tuning.keys_of_part - 1), i64(tuning.keys_of_part))
            return T.max(minimum(wanted, i64(tuning.max_parts)), i64(1))

        parts = hold_index(parts_of(T.Cast("int64", longest[0])))
        few = t * i64(kv_heads) < i64(tuning.few_tasks)
        split = hold_index(T.Select(few, parts, i64(1)))        # tasks of a sequence and KV head
        # TVM moves allocations to the top: their shapes can only use parameters.
        values = T.alloc_buffer((t * i64(heads), i64(tuning.max_parts), i64(dim)), "float32")
        state = T.alloc_buffer((t * i64(heads), i64(tuning.max_parts), i64(2)), "float32")

        def one_task(task: Expr) -> None:
            pair = hold_index(T.truncdiv(task, split))
            with loop(T.truncdiv(parts, split)) as one:
                one_part(pair, hold_index(T.truncmod(task, split) + one))
            with when(T.And(split == i64(1), parts > i64(1))), loop(group) as g:
                merge(T.truncdiv(pair, i64(kv_heads)), T.truncmod(pair, i64(kv_heads)) * i64(group) + g)

        def merge(seq: Expr, head: Expr) -> None:
            own = hold_index(parts_of(T.Cast("int64", lengths[seq])))
            with when(own > i64(1)):
                _merge(seq, head, own, values, state, y, heads, dim, pieces)

        def one_part(pair: Expr, part: Expr) -> None:
            seq = hold_index(T.truncdiv(pair, i64(kv_heads)))
            kv_head = hold_index(T.truncmod(pair, i64(kv_heads)))
            length = hold_index(T.Cast("int64", lengths[seq]))
            own = hold_index(parts_of(length))
            first = hold_index(T.max(length - i64(spec.window), i64(0))) if spec.window is not None else i64(0)
            steps = T.truncdiv(length - first + i64(step_keys - 1), i64(step_keys))
            chunk = hold_index(T.truncdiv(steps + own - i64(1), own) * i64(step_keys))
            begin = hold_index(first + part * chunk)
            end = hold_index(minimum(begin + chunk, length))

            query = T.alloc_buffer((i64(group), i64(dim)), "float32")
            acc = T.alloc_buffer((i64(group), i64(dim)), "float32")
            scores = T.alloc_buffer((i64(group), i64(step_keys)), "float32")
            rows = T.alloc_buffer((i64(step_keys), i64(dim)), "float32")  # this step's values
            top, mass = (T.alloc_buffer((i64(group),), "float32") for _ in range(2))
            with loop(group) as g:
                store(top, T.float32(LOWEST), g)
                store(mass, T.float32(0), g)
                for at, n in pieces:
                    source = load(q, seq, (kv_head * i64(group) + g) * i64(dim) + i64(at), lanes=n)
                    store(query, source * const(spec.scale, n), g, i64(at), lanes=n)
                    store(acc, const(0.0, n), g, i64(at), lanes=n)

            with loop(T.max(T.truncdiv(end - begin + i64(step_keys - 1), i64(step_keys)), i64(0))) as step:
                start = hold_index(begin + step * i64(step_keys))
                count = hold_index(minimum(end - start, i64(step_keys)))
                with loop(count) as j:
                    page = T.bind(T.Cast("int64", page_table[seq, T.truncdiv(start + j, i64(spec.page_size))]))
                    offset = hold_index(T.truncmod(start + j, i64(spec.page_size)))

                    def row(kind: int) -> list[Expr]:
                        return [T.bind(to_float(load(pages, layer, page, i64(kind), kv_head, offset, i64(at), lanes=n),
                                                spec.kv_dtype, n)) for at, n in pieces]

                    for (at, n), value in zip(pieces, row(1), strict=True):
                        store(rows, value, j, i64(at), lanes=n)
                    key = row(0)
                    with loop(group) as g:
                        store(scores, _dot(query, g, key, pieces), g, j)
                with loop(group) as g:
                    with loop(i64(step_keys) - count) as j:
                        store(scores, T.float32(LOWEST), g, count + j)
                    softmax_step(isa, step_keys, scores, g, top, mass, acc, pieces)
                    sums = [Registers(1, n, start=load(acc, g, i64(at), lanes=n)) for at, n in pieces]
                    with loop(count) as j:
                        weight = T.bind(scores[g, j])
                        for (at, n), total in zip(pieces, sums, strict=True):
                            total[0] = fma(splat(weight, n), load(rows, j, i64(at), lanes=n), total[0])
                    for (at, n), total in zip(pieces, sums, strict=True):
                        store(acc, total[0], g, i64(at), lanes=n)

            def keep() -> None:
                with loop(group) as g:
                    row = hold_index(seq * i64(heads) + kv_head * i64(group) + g)
                    store(state, top[g], row, part, i64(0))
                    store(state, mass[g], row, part, i64(1))
                    for at, n in pieces:
                        store(values, load(acc, g, i64(at), lanes=n), row, part, i64(at), lanes=n)

            def finish() -> None:
                with loop(group) as g:
                    inverse = hold(T.float32(1) / T.max(mass[g], T.float32(1e-30)), 1)
                    for at, n in pieces:
                        store(y, load(acc, g, i64(at), lanes=n) * splat(inverse, n), seq,
                              (kv_head * i64(group) + g) * i64(dim) + i64(at), lanes=n)

            with when(part < own):
                either(own > i64(1), keep, finish)

        def serial() -> None:
            with loop(t * i64(kv_heads) * split) as task:
                one_task(task)

        def threads() -> None:
            with parallel(t * i64(kv_heads) * split) as task:
                one_task(task)

        # Starting the threads costs as much as attending to a few keys.
        either(T.And(few, t * T.Cast("int64", longest[0]) <= i64(tuning.serial_keys)), serial, threads)
        with when(split > i64(1)), loop(t) as s, loop(heads) as head:
            merge(s, head)

    return build(params, body)


def _dot(query: Any, g: Expr, key: list[Expr], pieces: list[tuple[int, int]]) -> Expr:
    """Sum over the head's numbers of query row g times the key in registers."""
    sums: dict[int, Expr] = {}
    for (at, n), part in zip(pieces, key, strict=True):
        value = load(query, g, i64(at), lanes=n)
        sums[n] = fma(value, part, sums[n]) if n in sums else value * part
    total = None
    for n, vector in sums.items():
        one = reduce_sum(vector, n)
        total = one if total is None else total + one
    return total


def softmax_step(isa: Isa, keys: int, scores: Any, row: Expr, top: Any, mass: Any, acc: Any,
                 pieces: list[tuple[int, int]]) -> None:
    """Turn one row of `keys` scores into weights exp(score - maximum) and rescale what was summed before."""
    lanes = isa.lanes
    vectors = [T.bind(load(scores, row, i64(v * lanes), lanes=lanes)) for v in range(keys // lanes)]
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


def _merge(seq: Expr, head: Expr, parts: Expr, values: Any, state: Any, y: Any, heads: int, dim: int,
           pieces: list[tuple[int, int]]) -> None:
    """y of one head = sum over parts of exp(top - largest top) * values, divided by the same sum of masses."""
    row, column = hold_index(seq * i64(heads) + head), hold_index(head * i64(dim))
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
    for at, n in pieces:
        store(y, load(total, i64(at), lanes=n) * splat(inverse, n), seq, column + i64(at), lanes=n)
