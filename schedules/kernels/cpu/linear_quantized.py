"""Linear with quantised weights: int8 activations, integer dot products, float32 sums; decode and prefill.

Work: panels are spread over threads; for each panel, tiles of rows walk all groups of K, so that a weight byte comes
from memory once a call and from L1/L2 afterwards. Per group and row: 8 byte dot products of 16 (or 8) rows, then one
multiply by both scales. Rows beyond the last are clamped to it (computed twice, same value): one code path for any t.
"""

from __future__ import annotations

from typing import Any

from relaxpack.kernel_spec import LinearSpec

from .builder import Expr, Registers, T, build, const, either, i64, load, loop, minimum, parallel, rows_loop, splat, symbol
from .epilogue import store_panel
from .isa import Isa, fma, prefetch, to_float
from .layout import HALF, LARGEST, OFFSETS, PANEL, Record, weight_layout
from .quantize_rows import QuantizedRows, allocate, quantize_group

PREFETCH_BYTES = 2048


def _codes(isa: Isa, weight: Any, record: Record, panel: Expr, group: Expr, half: int, lane: int) -> list[Expr]:
    """The group's codes of `isa.lanes` rows, in order of K, 4 a lane: u8 vectors (s8 for q8_0 without VNNI)."""
    size, out = isa.lanes * 4, []
    fmt = record.format
    if fmt.bits == 4:
        for j in range(fmt.group_size // 8):
            both = T.bind(load(weight, panel, group, half, i64(j * 64 + lane * 4), lanes=size))
            out.append(T.bind(T.bitwise_and(both, splat(T.uint8(15), size))))
            out.append(T.bind(T.shift_right(both, splat(T.uint8(4), size))))
        return out
    for j in range(fmt.group_size // 4):
        code = load(weight, panel, group, half, i64(j * 64 + lane * 4), lanes=size)
        if LARGEST[fmt.name] > 127 and not isa.vnni:
            code = T.reinterpret(f"int8x{size}", T.bitwise_xor(code, splat(T.uint8(128), size)))
        out.append(T.bind(code))
    return out


def _lane_vector(isa: Isa, weight: Any, record: Record, panel: Expr, group: Expr, half: int, byte: int, lane: int) -> Expr:
    """Scales or minimums of `isa.lanes` rows as float32."""
    dtype = record.format.scale_dtype
    width = record.scale_bytes // HALF
    raw = load(weight, panel, group, half, i64(byte + lane * width), lanes=isa.lanes * width)
    return T.bind(to_float(T.reinterpret(f"{dtype}x{isa.lanes}", raw), dtype, isa.lanes))


def _tile(isa: Isa, spec: LinearSpec, weight: Any, q: QuantizedRows, panel: Expr, rows: list[Expr]) -> list[list[Expr]]:
    """Sums [row][vector] of one panel over all of K."""
    record, lanes = Record(spec.weight), isa.lanes
    group_size, vectors = spec.weight.group_size, PANEL // lanes
    acc = Registers(len(rows) * vectors, lanes)
    for i in range(len(rows) * vectors):
        acc[i] = const(0.0, lanes)
    with loop(spec.in_features // group_size) as group:
        for v in range(vectors):
            half, lane = divmod(v * lanes, HALF)
            if len(rows) == 1:
                for line in range(0, record.size * lanes // HALF, 64):
                    prefetch(T.address_of(weight[panel, group, i64(half), i64(line + PREFETCH_BYTES)]))
            codes = _codes(isa, weight, record, panel, group, half, lane)
            scale = _lane_vector(isa, weight, record, panel, group, half, record.code_bytes, lane)
            low = (_lane_vector(isa, weight, record, panel, group, half, record.code_bytes + record.scale_bytes, lane)
                   if record.has_minimum else None)
            for m, row in enumerate(rows):
                values = [T.reinterpret(f"int8x{lanes * 4}",
                                        splat(load(q.values, row, group * i64(group_size // 4) + i64(j)), lanes))
                          for j in range(group_size // 4)]
                start = splat(load(q.starts, row, group), lanes) if q.starts is not None else None
                if LARGEST[spec.weight.name] > 127 and not isa.vnni:
                    dot = isa.signed_dot(codes, values)
                else:
                    dot = isa.dot(codes, values, start, LARGEST[spec.weight.name])
                index = m * vectors + v
                total = fma(scale * splat(load(q.scales, row, group), lanes), T.Cast(f"float32x{lanes}", dot),
                            acc[index])
                if low is not None:
                    total = fma(low, splat(load(q.sums, row, group), lanes), total)
                acc[index] = total
    return [[acc[m * vectors + v] for v in range(vectors)] for m in range(len(rows))]


def linear_quantized(isa: Isa, spec: LinearSpec) -> Any:
    """PrimFunc: x f32[t, K], weight, [bias], [residual] → y f32[t, N]."""
    t = symbol("t")
    (_, shape, dtype), = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.swiglu).buffers
    columns = spec.out_features // 2 if spec.swiglu else spec.out_features
    tile = 8 if isa.lanes == 16 else 4
    params = [("x", (t, spec.in_features), "float32"), ("weight", shape, dtype)]
    params += [("bias", (spec.out_features,), "float32")] if spec.bias else []
    params += [("residual", (t, columns), "float32")] if spec.residual else []
    params += [("y", (t, columns), "float32")]
    record = Record(spec.weight)
    signed = LARGEST[spec.weight.name] > 127 and not isa.vnni
    offset = OFFSETS.get(spec.weight.name, 0) if not signed else 0

    def body(x: Any, weight: Any, *rest: Any) -> None:
        rest = list(rest)
        bias = rest.pop(0) if spec.bias else None
        residual = rest.pop(0) if spec.residual else None
        y, = rest
        q = allocate(t, spec.in_features, spec.weight.group_size, record.has_minimum, offset > 0)

        def quantize(row: Expr) -> None:
            with loop(spec.in_features // spec.weight.group_size) as group:
                quantize_group(isa, x, row, group, spec.weight.group_size, offset, q)

        rows_loop(t, quantize)
        with parallel(shape[0]) as panel:
            def rows_tile(first: Expr, count: int) -> None:
                rows = [T.bind(minimum(first + i64(m), t - i64(1))) for m in range(count)]
                for row, sums in zip(rows, _tile(isa, spec, weight, q, panel, rows), strict=True):
                    store_panel(spec, sums, isa.lanes, row, panel, bias, residual, y)

            def many() -> None:
                with loop(T.truncdiv(t + i64(tile - 1), i64(tile))) as block:
                    rows_tile(block * i64(tile), tile)

            if spec.phase == "decode":
                either(t == i64(1), lambda: rows_tile(i64(0), 1), many)
            else:
                many()

    return build(params, body)
