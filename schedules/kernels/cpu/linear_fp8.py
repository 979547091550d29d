"""Linear with float8 e4m3fn weights: float32 activations and FMA, weights widened in registers; decode and prefill.

Sums run over 64 columns at a time and are then scaled into the total, in one order however many rows a call has, so a
row's result does not depend on the others. One row widens two stretches of 64 in turn; tiles of a few rows widen every
code once a tile; in prefill a stretch of a panel is widened once for up to 128 rows, into 8 KiB that stay in L1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import LinearSpec
from relaxpack.weight_format import BLOCK, WHOLE_ROW, WeightFormat

from .builder import (
    Expr,
    Registers,
    T,
    build,
    const,
    hold_index,
    i64,
    load,
    loop,
    minimum,
    parallel,
    splat,
    store,
    symbol,
)
from .epilogue import ROWS_OF_TASK, epilogue_buffers, linear_params, over_panels, store_panel, store_tile
from .isa import Isa, fma, prefetch, widen
from .layout import PANEL
from .layout_fp8 import group_columns, weight_layout

STRETCH = BLOCK // 2   # columns that are summed before the scale is applied


@dataclass(frozen=True)
class Fp8Tuning:
    """What may vary without changing the layout of weights or the order in which floats are summed."""

    unroll: int = 4                  # columns in one iteration; divides STRETCH
    prefetch: int = 8192             # decode: bytes of the panel's stream that are fetched ahead; 0: none
    threads: bool = True             # decode: panels are spread over threads
    tiles: tuple[int, ...] = (3,)    # decode: heights of tiles of rows, small to large
    tile: int = 3                    # prefill: height of a tile of rows
    rows_of_task: int = ROWS_OF_TASK # prefill: rows for which a stretch of a panel is widened once


def default_tuning(isa: Isa) -> Fp8Tuning:
    return Fp8Tuning(tiles=(4,), tile=8) if isa.lanes == 16 else Fp8Tuning()


@dataclass(frozen=True)
class Panel:
    """Addresses inside one panel of the packed weight."""

    weight: Any
    format: WeightFormat
    columns: int     # of the whole weight
    panel: Expr

    def values(self, pair: Expr, column: Expr, lanes: int) -> list[Expr]:
        """The 32 rows' numbers in a column, which counts from the start of the pair of stretches, divided by 256. They are
        widened together: half the instructions."""
        all_rows = T.bind(widen(load(self.weight, self.panel, *self._place(pair, column), lanes=PANEL), PANEL))
        return [T.bind(T.Shuffle([all_rows], [T.int32(i) for i in range(first, first + lanes)]))
                for first in range(0, PANEL, lanes)]

    def address(self, pair: Expr, column: Expr, ahead: int) -> Expr:
        group, at = self._place(pair, column)
        return T.address_of(self.weight[self.panel, group, at + i64(ahead)])

    def _place(self, pair: Expr, column: Expr) -> tuple[Expr, Expr]:
        if self.format.group_size == WHOLE_ROW:
            return i64(0), (i64(pair) * i64(BLOCK) + column) * i64(PANEL)
        return i64(pair), column * i64(PANEL)

    def scale(self, pair: Expr, first: int, lanes: int) -> Expr:
        whole = self.format.group_size == WHOLE_ROW
        at = group_columns(self.format, self.columns) * PANEL + first * 4
        raw = load(self.weight, self.panel, i64(0) if whole else i64(pair), i64(at), lanes=lanes * 4)
        return T.reinterpret(f"float32x{lanes}", raw)


def _stretches(columns: int, body: Callable[[Expr, Expr, int], None]) -> None:
    """body(pair, first column in it, columns) for each stretch, in order."""
    with loop(columns // STRETCH) as index:
        body(hold_index(T.truncdiv(index, i64(2))), hold_index(T.truncmod(index, i64(2)) * i64(STRETCH)), STRETCH)
    if columns % STRETCH:
        last = columns // STRETCH
        body(i64(last // 2), i64(last % 2 * STRETCH), columns % STRETCH)


def _steps(count: int, unroll: int, step: Callable[[Expr, int], None]) -> None:
    """step(column, which of the iteration) for each of `count` columns, `unroll` in one iteration."""
    with loop(count // unroll) as block:
        for u in range(unroll):
            step(block * i64(unroll) + i64(u), u)
    if count % unroll:
        with loop(count % unroll) as last:
            step(last + i64(count // unroll * unroll), 0)


def _one_row(isa: Isa, tuning: Fp8Tuning, x: Any, panel: Panel) -> list[Expr]:
    """Row 0; its sums as vectors. Two stretches at a time, since one alone waits for the latency of its additions."""
    lanes, vectors = isa.lanes, PANEL // isa.lanes
    total = Registers(vectors, lanes, start=const(0.0, lanes))
    acc = Registers(2 * vectors, lanes)

    def run(pair: Expr, parts: list[tuple[int, int]]) -> None:
        """Stretches of one pair as (first column, columns); all but a lone last one are whole."""
        for i in range(len(parts) * vectors):
            acc[i] = const(0.0, lanes)

        def step(k: Expr, u: int) -> None:
            for i, (first, _) in enumerate(parts):
                column = k + i64(first)
                value = T.bind(splat(load(x, 0, i64(pair) * i64(BLOCK) + column), lanes))
                for v, w in enumerate(panel.values(pair, column, lanes)):
                    acc[i * vectors + v] = fma(w, value, acc[i * vectors + v])
                if tuning.prefetch and not u % 2:       # 64 bytes are two columns
                    prefetch(panel.address(pair, column, tuning.prefetch))

        _steps(parts[0][1], tuning.unroll, step)
        for i in range(len(parts)):
            for v in range(vectors):
                total[v] = fma(acc[i * vectors + v], panel.scale(pair, v * lanes, lanes), total[v])

    with loop(panel.columns // BLOCK) as pair:
        run(pair, [(0, STRETCH), (STRETCH, STRETCH)])
    rest = panel.columns % BLOCK
    for first in range(0, rest, STRETCH):
        run(i64(panel.columns // BLOCK), [(first, min(STRETCH, rest - first))])
    return [total[v] for v in range(vectors)]


def _add_stretch(isa: Isa, tuning: Fp8Tuning, x: Any, panel: Panel, pair: Expr, first: Expr, count: int, rows: list[Expr],
                 weights: Callable[[Expr, int], list[Expr]], sums: Any, at: Expr) -> None:
    """sums[at + m] += scale * (stretch of the panel times row m). `weights(column, which of the iteration)`: 32 numbers."""
    lanes, vectors = isa.lanes, PANEL // isa.lanes
    acc = Registers(len(rows) * vectors, lanes, start=const(0.0, lanes))

    def step(k: Expr, u: int) -> None:
        w = weights(k + first, u)
        for m, row in enumerate(rows):
            value = T.bind(splat(load(x, row, pair * i64(BLOCK) + (k + first)), lanes))
            for v in range(vectors):
                acc[m * vectors + v] = fma(w[v], value, acc[m * vectors + v])

    _steps(count, tuning.unroll, step)
    for v in range(vectors):
        scale = T.bind(panel.scale(pair, v * lanes, lanes))
        for m in range(len(rows)):
            index = (at + i64(m), i64(v * lanes))
            store(sums, fma(acc[m * vectors + v], scale, load(sums, *index, lanes=lanes)), *index, lanes=lanes)


def _clear(sums: Any, rows: Expr, lanes: int) -> None:
    with loop(rows) as m:
        for v in range(PANEL // lanes):
            store(sums, const(0.0, lanes), m, i64(v * lanes), lanes=lanes)


def _few_rows(isa: Isa, tuning: Fp8Tuning, x: Any, panel: Panel, rows: list[Expr], sums: Any) -> None:
    _clear(sums, i64(len(rows)), isa.lanes)

    def stretch(pair: Expr, first: Expr, count: int) -> None:
        def weights(column: Expr, u: int) -> list[Expr]:
            if tuning.prefetch and not u % 2:
                prefetch(panel.address(pair, column, tuning.prefetch))
            return panel.values(pair, column, isa.lanes)

        _add_stretch(isa, tuning, x, panel, pair, first, count, rows, weights, sums, i64(0))

    _stretches(panel.columns, stretch)


def _many_rows(isa: Isa, tuning: Fp8Tuning, x: Any, panel: Panel, first_row: Expr, end: Expr, sums: Any) -> None:
    """Rows `first_row` to `end`; the last tile computes row end - 1 again where it reaches beyond."""
    lanes, height = isa.lanes, tuning.tile
    plain = T.alloc_buffer((i64(STRETCH), i64(PANEL)), "float32")
    tiles = hold_index(T.truncdiv(end - first_row + i64(height - 1), i64(height)))
    _clear(sums, tiles * i64(height), lanes)

    def stretch(pair: Expr, first: Expr, count: int) -> None:
        with loop(count) as k:
            for v, w in enumerate(panel.values(pair, k + first, lanes)):
                store(plain, w, k, i64(v * lanes), lanes=lanes)

        def weights(column: Expr, _: int) -> list[Expr]:
            return [T.bind(load(plain, column - first, i64(v * lanes), lanes=lanes)) for v in range(PANEL // lanes)]

        with loop(tiles) as tile:
            rows = [hold_index(minimum(first_row + tile * i64(height) + i64(m), end - i64(1))) for m in range(height)]
            _add_stretch(isa, tuning, x, panel, pair, first, count, rows, weights, sums, tile * i64(height))

    _stretches(panel.columns, stretch)


def linear_fp8(isa: Isa, spec: LinearSpec, tuning: Fp8Tuning | None = None) -> Any:
    """PrimFunc: x f32[t, K], weight, [bias], [residual] → y f32[t, N]."""
    tuning, t, lanes = tuning or default_tuning(isa), symbol("t"), isa.lanes
    assert STRETCH % tuning.unroll == 0
    layout = weight_layout(spec.weight, spec.out_features, spec.in_features, spec.gated)
    params = linear_params(spec, layout, t)
    panels = params[1][1][0]

    def body(x: Any, weight: Any, *rest: Any) -> None:
        bias, residual, y = epilogue_buffers(spec, rest)

        def panel_at(index: Expr) -> Panel:
            return Panel(weight, spec.weight, spec.in_features, index)

        def rows_tile(panel: Expr, first: Expr, count: int) -> None:
            if count == 1:
                store_panel(spec, _one_row(isa, tuning, x, panel_at(panel)), lanes, i64(0), panel, bias, residual, y)
                return
            sums = T.alloc_buffer((i64(count), i64(PANEL)), "float32")
            rows = [hold_index(minimum(first + i64(m), t - i64(1))) for m in range(count)]
            _few_rows(isa, tuning, x, panel_at(panel), rows, sums)
            store_tile(spec, sums, lanes, panel, first, count, t, bias, residual, y)

        if spec.phase == "decode":
            over_panels(spec, t, panels, tuning.tiles, rows_tile, tuning.rows_of_task, tuning.threads)
            return
        blocks = hold_index(T.truncdiv(t + i64(tuning.rows_of_task - 1), i64(tuning.rows_of_task)))
        with parallel(blocks * i64(panels)) as task:
            first = hold_index(T.truncmod(task, blocks) * i64(tuning.rows_of_task))
            end = hold_index(minimum(first + i64(tuning.rows_of_task), t))
            panel = hold_index(T.truncdiv(task, blocks))
            sums = T.alloc_buffer((i64(tuning.rows_of_task + tuning.tile), i64(PANEL)), "float32")
            _many_rows(isa, tuning, x, panel_at(panel), first, end, sums)
            store_tile(spec, sums, lanes, panel, first, tuning.rows_of_task, end, bias, residual, y)

    return build(params, body)
