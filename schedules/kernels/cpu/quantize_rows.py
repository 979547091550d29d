"""The first part of every quantised linear: rows of activations become int8 with one scale a group, as llama.cpp does.

A group of activations is a group of the weight format. scale = max|x| / 127; values = round(x / scale) in -127..127.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .builder import Registers, T, hold, i64, load, splat, store
from .isa import Isa, nearest, reduce_max, reduce_sum, vabs, vmax

Expr = Any


@dataclass(frozen=True)
class QuantizedRows:
    values: Any            # int32[t, K/4], 4 int8 each
    scales: Any            # f32[t, K/group]
    sums: Any | None       # f32: scale * sum(values); where the weight stores minimums
    starts: Any | None     # int32: -offset * sum(values); where codes carry an offset


def allocate(rows: Expr, features: int, group: int, sums: bool, starts: bool) -> QuantizedRows:
    """Buffers for `rows` rows; `sums`, `starts`: whether the weight needs them."""
    def buffer(columns: int, dtype: str) -> Any:
        return T.alloc_buffer((rows, i64(columns)), dtype)

    groups = features // group
    return QuantizedRows(buffer(features // 4, "int32"), buffer(groups, "float32"),
                         buffer(groups, "float32") if sums else None, buffer(groups, "int32") if starts else None)


def quantize_group(isa: Isa, x: Any, row: Expr, group: Expr, size: int, offset: int, out: QuantizedRows) -> None:
    """Emit the quantisation of one group of one row."""
    lanes = min(isa.lanes, size)
    pieces = size // lanes
    regs = Registers(pieces, lanes)
    for i in range(pieces):
        regs[i] = load(x, row, group * i64(size) + i64(i * lanes), lanes=lanes)
    biggest = vabs(regs[0], lanes)
    for i in range(1, pieces):
        biggest = vmax(biggest, vabs(regs[i], lanes), lanes)
    biggest = hold(reduce_max(biggest, lanes), 1)
    scale = hold(biggest * T.float32(1 / 127), 1)
    inverse = hold(T.float32(127) / T.max(biggest, T.float32(1e-30)), 1)
    total = None
    for i in range(pieces):
        q = hold(T.Cast(f"int32x{lanes}", nearest(regs[i] * splat(inverse, lanes), lanes)), lanes, "int32")
        total = q if total is None else total + q
        store(out.values, T.reinterpret(f"int32x{lanes // 4}", T.Cast(f"int8x{lanes}", q)),
              row, group * i64(size // 4) + i64(i * lanes // 4), lanes=lanes // 4)
    store(out.scales, scale, row, group)
    if out.sums is not None or out.starts is not None:
        summed = hold(reduce_sum(total, lanes, "int32"), 1, "int32")
        if out.sums is not None:
            store(out.sums, scale * T.Cast("float32", summed), row, group)
        if out.starts is not None:
            store(out.starts, summed * T.int32(-offset), row, group)
