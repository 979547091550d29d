"""RoPE and KV append in one pass over the rows of qkv: normalised (where asked), rotated, keys and values written to
their page slots, queries to a tensor of their own. Pairs are (i, i + rotary_dim/2), as in Hugging Face checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import AttentionSpec

from .builder import Expr, T, build, i64, load, loop, rows_loop, splat, store, symbol, vectors_of
from .isa import Isa, fma, reduce_sum, to_e4m3


def pages_shape(spec: AttentionSpec, num_pages: Expr) -> tuple[Any, ...]:
    return (spec.num_layers, num_pages, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)


@dataclass(frozen=True)
class RopeTuning:
    serial_below: int = 4   # rows from which on threads share them


def rope_append(isa: Isa, spec: AttentionSpec, tuning: RopeTuning = RopeTuning()) -> Any:
    """PrimFunc: qkv, rope_table, positions, slots, [q_norm, k_norm], pages, layer → q; pages in place."""
    t, p = symbol("t"), symbol("p")
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    normed = spec.qk_norm_epsilon is not None
    params = [("qkv", (t, (heads + 2 * kv_heads) * dim), "float32"),
              ("rope_table", (spec.max_position, spec.rotary_dim), "float32"),
              ("positions", (t,), "int32"), ("slots", (t,), "int32")]
    params += [("q_norm", (dim,), "float32"), ("k_norm", (dim,), "float32")] if normed else []
    params += [("pages", pages_shape(spec, p), spec.page_dtype), ("layer", None, "int64"),
               ("q", (t, heads * dim), "float32")]

    def body(qkv: Any, table: Any, positions: Any, slots: Any, *rest: Any) -> None:
        q_norm, k_norm = rest[:2] if normed else (None, None)
        pages, layer, q = rest[-3:]

        def one(row: Expr) -> None:
            position = T.bind(T.Cast("int64", positions[row]))
            slot = T.bind(T.Cast("int64", slots[row]))
            page = T.bind(T.truncdiv(slot, i64(spec.page_size)))
            offset = T.bind(T.truncmod(slot, i64(spec.page_size)))

            def to_page(kind: int, head: Expr, at: int, value: Expr, n: int) -> None:
                kv_type = spec.kv_dtype if n == 1 else f"{spec.kv_dtype}x{n}"
                if spec.fp8:
                    value = to_e4m3(value, n)
                elif spec.kv_dtype != "float32":
                    value = T.Cast(kv_type, value)
                store(pages, value, layer, page, i64(kind), head, offset, i64(at), lanes=n)

            with loop(heads) as head:
                _rotate(isa, spec, qkv, row, head * i64(dim), table, position, q_norm,
                        lambda at, value, n: store(q, value, row, head * i64(dim) + i64(at), lanes=n))
            with loop(kv_heads) as head:
                _rotate(isa, spec, qkv, row, (head + i64(heads)) * i64(dim), table, position, k_norm,
                        lambda at, value, n: to_page(0, head, at, value, n))
                for at, n in vectors_of(dim, isa.lanes):
                    base = (head + i64(heads + kv_heads)) * i64(dim) + i64(at)
                    to_page(1, head, at, load(qkv, row, base, lanes=n), n)

        rows_loop(t, one, serial_below=tuning.serial_below)

    return build(params, body)


def _rotate(isa: Isa, spec: AttentionSpec, qkv: Any, row: Expr, base: Expr, table: Any, position: Expr, weight: Any,
            put: Any) -> None:
    """Emit one head: [norm], rotation of the first rotary_dim numbers, the others as they are."""
    scale = None
    if weight is not None:
        sums: dict[int, Expr] = {}
        for at, n in vectors_of(spec.head_dim, isa.lanes):
            value = T.bind(load(qkv, row, base + i64(at), lanes=n))
            sums[n] = fma(value, value, sums[n]) if n in sums else value * value
        total = T.float32(0)
        for n, part in sums.items():
            total = total + reduce_sum(part, n)
        mean = total * T.float32(1 / spec.head_dim)
        scale = T.bind(T.float32(1) / T.sqrt(mean + T.float32(spec.qk_norm_epsilon)))

    def read(at: int, n: int) -> Expr:
        value = load(qkv, row, base + i64(at), lanes=n)
        if scale is not None:
            value = value * splat(scale, n) * load(weight, i64(at), lanes=n)
        return T.bind(value)

    half = spec.rotary_dim // 2
    for at, n in vectors_of(half, isa.lanes):
        cos = T.bind(load(table, position, i64(at), lanes=n))
        sin = T.bind(load(table, position, i64(half + at), lanes=n))
        first, second = read(at, n), read(half + at, n)
        put(at, first * cos - second * sin, n)
        put(half + at, second * cos + first * sin, n)
    for at, n in vectors_of(spec.head_dim - spec.rotary_dim, isa.lanes):
        put(spec.rotary_dim + at, read(spec.rotary_dim + at, n), n)
