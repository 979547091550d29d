"""Linear with float weights (f32, f16, bf16): float32 activations and FMA; decode and prefill.

Work: panels are spread over threads; per panel, tiles of rows walk K with all sums in registers. A row's sum runs over K
in the same order whatever the tile, so a row's result does not depend on how many rows the call has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import LinearSpec

from .builder import Expr, Registers, T, build, const, hold_index, i64, load, loop, minimum, splat, store, symbol
from .epilogue import ROWS_OF_TASK, epilogue_buffers, linear_params, over_panels, store_panel, store_tile
from .isa import Isa, fma, prefetch, to_float
from .layout import PANEL, float_storage, weight_layout


@dataclass(frozen=True)
class FloatTuning:
    """What may vary without changing the layout of weights or the order in which floats are summed."""

    unroll: int = 4                  # steps of K in one iteration
    prefetch: int = 32               # one row: steps of K fetched ahead; 0: none
    threads: bool = True             # decode: panels are spread over threads
    tiles: tuple[int, ...] = (3,)    # heights of tiles of rows, small to large
    rows_of_task: int = ROWS_OF_TASK # prefill: rows whose activations stay in L2 while a panel passes over them


def default_tuning(isa: Isa) -> FloatTuning:
    return FloatTuning(tiles=(8,) if isa.lanes == 16 else (3,))


def _tile(isa: Isa, spec: LinearSpec, tuning: FloatTuning, x: Any, weight: Any, panel: Expr, rows: list[Expr]) -> Registers:
    """Sums of row m and vector v at [m * vectors + v]."""
    lanes, vectors, storage, unroll = isa.lanes, PANEL // isa.lanes, float_storage(spec.weight), tuning.unroll
    acc = Registers(len(rows) * vectors, lanes, start=const(0.0, lanes))

    def step(k: Expr) -> None:
        w = [T.bind(to_float(load(weight, panel, k, i64(v * lanes), lanes=lanes), storage, lanes))
             for v in range(vectors)]
        for m, row in enumerate(rows):
            value = T.bind(splat(load(x, row, k), lanes))
            for v in range(vectors):
                acc[m * vectors + v] = fma(w[v], value, acc[m * vectors + v])

    with loop(spec.in_features // unroll) as block:
        if len(rows) == 1 and tuning.prefetch:
            bytes_per_row = PANEL * spec.weight.bits // 8
            for line in range(0, unroll * bytes_per_row, 64):
                k, at = divmod(line, bytes_per_row)
                prefetch(T.address_of(weight[panel, block * i64(unroll) + i64(tuning.prefetch + k),
                                             i64(at * 8 // spec.weight.bits)]))
        for u in range(unroll):
            step(block * i64(unroll) + i64(u))
    if spec.in_features % unroll:
        with loop(spec.in_features % unroll) as u:
            step(u + i64(spec.in_features // unroll * unroll))
    return acc


def linear_float(isa: Isa, spec: LinearSpec, tuning: FloatTuning | None = None) -> Any:
    """PrimFunc: x f32[t, K], weight, [bias], [residual] → y f32[t, N]."""
    tuning, t = tuning or default_tuning(isa), symbol("t")
    layout = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.gated)
    params = linear_params(spec, layout, t)
    panels = params[1][1][0]

    def body(x: Any, weight: Any, *rest: Any) -> None:
        bias, residual, y = epilogue_buffers(spec, rest)

        vectors = PANEL // isa.lanes

        def rows_tile(panel: Expr, first: Expr, count: int) -> None:
            rows = [hold_index(minimum(first + i64(m), t - i64(1))) for m in range(count)]
            acc = _tile(isa, spec, tuning, x, weight, panel, rows)
            if count == 1:
                store_panel(spec, [acc[v] for v in range(vectors)], isa.lanes, first, panel, bias, residual, y)
                return
            sums = T.alloc_buffer((i64(count), i64(PANEL)), "float32")
            for m in range(count):
                for v in range(vectors):
                    store(sums, acc[m * vectors + v], i64(m), i64(v * isa.lanes), lanes=isa.lanes)
            store_tile(spec, sums, isa.lanes, panel, first, count, t, bias, residual, y)

        over_panels(spec, t, panels, tuning.tiles, rows_tile, tuning.rows_of_task, tuning.threads)

    return build(params, body)
