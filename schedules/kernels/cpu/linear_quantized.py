"""Linear with quantised weights: int8 activations, integer dot products, float32 sums; decode and prefill.

Work: panels are spread over threads; for each panel, tiles of rows walk all groups of K, so that a weight byte comes
from memory once a call and from L1/L2 afterwards. Per group and row: 8 byte dot products of 16 (or 8) rows, then one
multiply by both scales. Rows beyond the last are clamped to it (computed twice, same value): one code path for any t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import LinearSpec

from .builder import Expr, Registers, T, build, const, hold_index, i64, load, loop, minimum, rows_loop, splat, store, symbol
from .epilogue import ROWS_OF_TASK, epilogue_buffers, linear_params, over_panels, store_panel, store_tile
from .isa import Isa, fma, prefetch, to_float
from .layout import HALF, LARGEST, OFFSETS, PANEL, Record, weight_layout
from .quantize_rows import QuantizedRows, allocate, quantize_group


@dataclass(frozen=True)
class QuantizedTuning:
    """What may vary without changing the layout of weights or the order in which floats are summed."""

    prefetch: int = 2048             # one row: bytes of the panel's stream that are fetched ahead; 0: none
    chains: int = 2                  # one row (and small tiles): integer sums that VNNI adds to in turn
    threads: bool = True             # decode: panels are spread over threads
    tiles: tuple[int, ...] = (4,)    # heights of tiles of rows, small to large
    tile_prefetch: bool = True       # tiles: fetch the next panel ahead
    rows_of_task: int = ROWS_OF_TASK # prefill: rows whose activations stay in L2 while a panel passes over them


def _codes(isa: Isa, weight: Any, record: Record, panel: Expr, group: Expr, half: Expr, lane: Expr) -> list[Expr]:
    """The group's codes of `isa.lanes` rows, in order of K, 4 a lane: u8 vectors (s8 for q8_0 without VNNI)."""
    size, out = isa.lanes * 4, []
    fmt = record.format

    def piece(j: int) -> Expr:
        return load(weight, panel, group, half, lane * i64(4) + i64(j * 64), lanes=size)

    if fmt.bits == 4:
        for j in range(fmt.group_size // 8):
            both = T.bind(piece(j))
            out.append(T.bind(T.bitwise_and(both, splat(T.uint8(15), size))))
            out.append(T.bind(T.shift_right(both, splat(T.uint8(4), size))))
        return out
    for j in range(fmt.group_size // 4):
        code = piece(j)
        if LARGEST[fmt.name] > 127 and not isa.vnni:
            code = T.reinterpret(f"int8x{size}", T.bitwise_xor(code, splat(T.uint8(128), size)))
        out.append(T.bind(code))
    return out


def _lane_vector(isa: Isa, weight: Any, record: Record, panel: Expr, group: Expr, half: Expr, byte: int,
                 lane: Expr) -> Expr:
    """Scales or minimums of `isa.lanes` rows as float32."""
    dtype = record.format.scale_dtype
    width = record.scale_bytes // HALF
    raw = load(weight, panel, group, half, lane * i64(width) + i64(byte), lanes=isa.lanes * width)
    return T.bind(to_float(T.reinterpret(f"{dtype}x{isa.lanes}", raw), dtype, isa.lanes))


def _add_group(isa: Isa, spec: LinearSpec, weight: Any, q: QuantizedRows, panel: Expr, group: Expr, half: Expr, lane: Expr,
               rows: list[Expr], acc: Registers, at: int, chains: int) -> None:
    """acc[at + m] += what one group adds to `isa.lanes` outputs of row m."""
    record, lanes, size = Record(spec.weight), isa.lanes, spec.weight.group_size
    largest = LARGEST[spec.weight.name]
    codes = _codes(isa, weight, record, panel, group, half, lane)
    scale = _lane_vector(isa, weight, record, panel, group, half, record.code_bytes, lane)
    low = (_lane_vector(isa, weight, record, panel, group, half, record.code_bytes + record.scale_bytes, lane)
           if record.has_minimum else None)
    for m, row in enumerate(rows):
        values = [T.reinterpret(f"int8x{lanes * 4}", splat(load(q.values, row, group * i64(size // 4) + i64(j)), lanes))
                  for j in range(size // 4)]
        if largest > 127 and not isa.vnni:
            dot = isa.signed_dot(codes, values)
        else:
            start = splat(load(q.starts, row, group), lanes) if q.starts is not None else None
            dot = isa.dot(codes, values, start, largest, chains if len(rows) <= 4 else 1)
        total = fma(scale * splat(load(q.scales, row, group), lanes), T.Cast(f"float32x{lanes}", dot), acc[at + m])
        if low is not None:
            total = fma(low, splat(load(q.sums, row, group), lanes), total)
        acc[at + m] = total


def _one_row(isa: Isa, spec: LinearSpec, tuning: QuantizedTuning, weight: Any, q: QuantizedRows, panel: Expr) -> list[Expr]:
    """Row 0: the panel is one stream of bytes, fetched ahead. → its sums as vectors."""
    lanes, vectors, record = isa.lanes, PANEL // isa.lanes, Record(spec.weight)
    acc = Registers(vectors, lanes, start=const(0.0, lanes))
    with loop(spec.in_features // spec.weight.group_size) as group:
        for v in range(vectors):
            half, lane = divmod(v * lanes, HALF)
            if tuning.prefetch:
                for line in range(lane * record.size // HALF, (lane + lanes) * record.size // HALF, 64):
                    prefetch(T.address_of(weight[panel, group, i64(half), i64(line + tuning.prefetch)]))
            _add_group(isa, spec, weight, q, panel, group, i64(half), i64(lane), [i64(0)], acc, v, tuning.chains)
    return [acc[v] for v in range(vectors)]


def _tile(isa: Isa, spec: LinearSpec, tuning: QuantizedTuning, weight: Any, q: QuantizedRows, panel: Expr,
          rows: list[Expr], sums: Any) -> None:
    """sums[m, 0..32] of several rows. One vector of outputs at a time walks all of K: together, LLVM would share the
    rows' broadcasts among the vectors and spill every one of them."""
    lanes, record = isa.lanes, Record(spec.weight)
    with loop(PANEL // lanes) as v:
        half = hold_index(T.truncdiv(v, i64(HALF // lanes)))
        lane = hold_index(T.truncmod(v, i64(HALF // lanes)) * i64(lanes))
        acc = Registers(len(rows), lanes, start=const(0.0, lanes))
        groups, part = spec.in_features // spec.weight.group_size, record.size * lanes // HALF
        with loop(groups) as group:
            # All passes together fetch the whole next panel; its bytes come in another order than this pass reads.
            if tuning.tile_prefetch:
                ahead = (v * i64(groups) + group) * i64(part)
                for line in range(0, part, 64):
                    prefetch(T.address_of(weight[panel + i64(1), i64(0), i64(0), ahead + i64(line)]))
            _add_group(isa, spec, weight, q, panel, group, half, lane, rows, acc, 0, tuning.chains)
        for m in range(len(rows)):
            store(sums, acc[m], i64(m), v * i64(lanes), lanes=lanes)


def default_tuning(isa: Isa) -> QuantizedTuning:
    return QuantizedTuning(tiles=(4, 16) if isa.lanes == 16 else (4,))


def linear_quantized(isa: Isa, spec: LinearSpec, tuning: QuantizedTuning | None = None) -> Any:
    """PrimFunc: x f32[t, K], weight, [bias], [residual] → y f32[t, N]."""
    tuning, t = tuning or default_tuning(isa), symbol("t")
    layout = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.gated)
    params = linear_params(spec, layout, t)
    panels = params[1][1][0]
    record = Record(spec.weight)
    signed = LARGEST[spec.weight.name] > 127 and not isa.vnni
    offset = OFFSETS.get(spec.weight.name, 0) if not signed else 0

    def body(x: Any, weight: Any, *rest: Any) -> None:
        bias, residual, y = epilogue_buffers(spec, rest)
        q = allocate(t, spec.in_features, spec.weight.group_size, record.has_minimum, offset > 0)

        def quantize(row: Expr) -> None:
            with loop(spec.in_features // spec.weight.group_size) as group:
                quantize_group(isa, x, row, group, spec.weight.group_size, offset, q)

        rows_loop(t, quantize)

        def rows_tile(panel: Expr, first: Expr, count: int) -> None:
            if count == 1:
                store_panel(spec, _one_row(isa, spec, tuning, weight, q, panel), isa.lanes, i64(0), panel, bias, residual, y)
                return
            sums = T.alloc_buffer((i64(count), i64(PANEL)), "float32")
            rows = [hold_index(minimum(first + i64(m), t - i64(1))) for m in range(count)]
            _tile(isa, spec, tuning, weight, q, panel, rows, sums)
            store_tile(spec, sums, isa.lanes, panel, first, count, t, bias, residual, y)

        over_panels(spec, t, panels, tuning.tiles, rows_tile, tuning.rows_of_task, tuning.threads)

    return build(params, body)
