"""Linear with float weights (f32, f16, bf16): float32 activations and FMA; decode and prefill.

Work: panels are spread over threads; per panel, tiles of rows walk K with all sums in registers. A row's sum runs over K
in the same order whatever the tile, so a row's result does not depend on how many rows the call has.
"""

from __future__ import annotations

from typing import Any

from relaxpack.kernel_spec import LinearSpec

from .builder import Expr, Registers, T, build, const, either, i64, load, loop, minimum, parallel, splat, symbol
from .epilogue import store_panel
from .isa import Isa, fma, prefetch, to_float
from .layout import PANEL, float_storage, weight_layout

UNROLL = 4
PREFETCH_ROWS = 32


def _tile(isa: Isa, spec: LinearSpec, x: Any, weight: Any, panel: Expr, rows: list[Expr]) -> list[list[Expr]]:
    lanes, vectors, storage = isa.lanes, PANEL // isa.lanes, float_storage(spec.weight)
    acc = Registers(len(rows) * vectors, lanes)
    for i in range(len(rows) * vectors):
        acc[i] = const(0.0, lanes)

    def step(k: Expr) -> None:
        w = [T.bind(to_float(load(weight, panel, k, i64(v * lanes), lanes=lanes), storage, lanes))
             for v in range(vectors)]
        for m, row in enumerate(rows):
            value = T.bind(splat(load(x, row, k), lanes))
            for v in range(vectors):
                acc[m * vectors + v] = fma(w[v], value, acc[m * vectors + v])

    with loop(spec.in_features // UNROLL) as block:
        if len(rows) == 1:
            bytes_per_row = PANEL * spec.weight.bits // 8
            for line in range(0, UNROLL * bytes_per_row, 64):
                k, at = divmod(line, bytes_per_row)
                prefetch(T.address_of(weight[panel, block * i64(UNROLL) + i64(PREFETCH_ROWS + k),
                                             i64(at * 8 // spec.weight.bits)]))
        for u in range(UNROLL):
            step(block * i64(UNROLL) + i64(u))
    if spec.in_features % UNROLL:
        with loop(spec.in_features % UNROLL) as u:
            step(u + i64(spec.in_features // UNROLL * UNROLL))
    return [[acc[m * vectors + v] for v in range(vectors)] for m in range(len(rows))]


def linear_float(isa: Isa, spec: LinearSpec) -> Any:
    """PrimFunc: x f32[t, K], weight, [bias], [residual] → y f32[t, N]."""
    t = symbol("t")
    (_, shape, dtype), = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.swiglu).buffers
    columns = spec.out_features // 2 if spec.swiglu else spec.out_features
    tile = 8 if isa.lanes == 16 else 3
    params = [("x", (t, spec.in_features), "float32"), ("weight", shape, dtype)]
    params += [("bias", (spec.out_features,), "float32")] if spec.bias else []
    params += [("residual", (t, columns), "float32")] if spec.residual else []
    params += [("y", (t, columns), "float32")]

    def body(x: Any, weight: Any, *rest: Any) -> None:
        rest = list(rest)
        bias = rest.pop(0) if spec.bias else None
        residual = rest.pop(0) if spec.residual else None
        y, = rest
        with parallel(shape[0]) as panel:
            def rows_tile(first: Expr, count: int) -> None:
                rows = [T.bind(minimum(first + i64(m), t - i64(1))) for m in range(count)]
                for row, sums in zip(rows, _tile(isa, spec, x, weight, panel, rows), strict=True):
                    store_panel(spec, sums, isa.lanes, row, panel, bias, residual, y)

            def many() -> None:
                with loop(T.truncdiv(t + i64(tile - 1), i64(tile))) as block:
                    rows_tile(block * i64(tile), tile)

            if spec.phase == "decode":
                either(t == i64(1), lambda: rows_tile(i64(0), 1), many)
            else:
                many()

    return build(params, body)
