"""Embedding gather: one row out of the packed panels of the (possibly tied) table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relaxpack.kernel_spec import EmbeddingSpec, WeightLayout

from .builder import Expr, T, build, i64, load, loop, rows_loop, splat, store, symbol
from .isa import to_float
from .layout import HALF, PANEL, Record, float_storage, weight_layout


def embedding(spec: EmbeddingSpec) -> Any:
    """PrimFunc: token_ids i32[t], weight (the layout of linear) → y [t, H]. An id outside the table reads its nearest
    row: the engine checks ids, a kernel must not fault."""
    def one(weight: Any, y: Any, row: Expr, token: Expr, panel: Expr) -> None:
        half = T.bind(T.truncdiv(T.truncmod(token, i64(PANEL)), i64(HALF)))
        lane = T.bind(T.truncmod(token, i64(HALF)))
        if spec.weight.quantized:
            _row_quantized(spec, weight, y, row, panel, half, lane)
        else:
            with loop(spec.hidden_size) as k:
                value = weight[panel, k, half * i64(HALF) + lane]
                store(y, times(spec, to_float(value, float_storage(spec.weight), 1)), row, k)

    return look_up(spec, weight_layout(spec.weight, spec.vocab_size, spec.hidden_size, False), one)


def look_up(spec: EmbeddingSpec, layout: WeightLayout, one: Callable[[Any, Any, Expr, Expr, Expr], None]) -> Any:
    """The PrimFunc around `one(weight, y, row, token, panel)`, which writes a row of y."""
    t = symbol("t")
    (_, shape, dtype), = layout.buffers
    params = [("token_ids", (t,), "int32"), ("weight", shape, dtype), ("y", (t, spec.hidden_size), "float32")]

    def body(token_ids: Any, weight: Any, y: Any) -> None:
        def row_of(row: Expr) -> None:
            token = T.bind(T.Cast("int64", T.max(T.min(token_ids[row], T.int32(spec.vocab_size - 1)), T.int32(0))))
            one(weight, y, row, token, T.bind(T.truncdiv(token, i64(PANEL))))

        rows_loop(t, row_of)

    return build(params, body)


def times(spec: EmbeddingSpec, value: Expr) -> Expr:
    return value if spec.factor == 1 else value * T.float32(spec.factor)


def _row_quantized(spec: EmbeddingSpec, weight: Any, y: Any, row: Expr, panel: Expr, half: Expr, lane: Expr) -> None:
    record, size = Record(spec.weight), spec.weight.group_size
    width = record.scale_bytes // HALF

    with loop(spec.hidden_size // size) as group:
        def number(byte: int) -> Expr:
            raw = load(weight, panel, group, half, i64(byte) + lane * i64(width), lanes=width)
            dtype = spec.weight.scale_dtype
            return T.bind(to_float(T.reinterpret(dtype, raw), dtype, 1))

        scale = T.bind(times(spec, number(record.code_bytes)))
        low = (T.bind(times(spec, number(record.code_bytes + record.scale_bytes))) if record.has_minimum
               else T.bind(scale * T.float32(-record.offset)))

        def put(at: int, codes: Expr) -> None:
            value = T.Cast("float32x4", codes) * splat(scale, 4) + splat(low, 4)
            store(y, value, row, group * i64(size) + i64(at), lanes=4)

        for j in range(record.code_bytes // 64):
            raw = T.bind(load(weight, panel, group, half, lane * i64(4) + i64(j * 64), lanes=4))
            if spec.weight.bits == 4:
                put(j * 8, T.bitwise_and(raw, splat(T.uint8(15), 4)))
                put(j * 8 + 4, T.shift_right(raw, splat(T.uint8(4), 4)))
            else:
                put(j * 4, raw)
