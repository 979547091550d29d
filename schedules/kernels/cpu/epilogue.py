"""What the linear kernels share: their parameters, how panels and tiles of rows are dealt out, and how a panel's finished
sums become outputs: bias, residual, gated linear unit, and the partial last panel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relaxpack.kernel_spec import LinearSpec, WeightLayout

from .builder import T, either, hold_index, i64, load, loop, minimum, parallel, store
from .isa import gelu, silu
from .layout import HALF, PANEL

Expr = Any


def linear_params(spec: LinearSpec, layout: WeightLayout, rows: Expr) -> list[tuple[str, tuple[Any, ...], str]]:
    """x f32[t, K], weight, [bias], [residual], y f32[t, N] as `build` takes them; the weight's first size is its panels."""
    (_, shape, dtype), = layout.buffers
    y = ((rows, spec.out_features // 2 if spec.gated else spec.out_features), "float32")
    bias = [("bias", (spec.out_features,), "float32")] if spec.bias else []
    residual = [("residual", *y)] if spec.residual else []
    return [("x", (rows, spec.in_features), "float32"), ("weight", shape, dtype), *bias, *residual, ("y", *y)]


def epilogue_buffers(spec: LinearSpec, buffers: tuple[Any, ...]) -> tuple[Any | None, Any | None, Any]:
    """(bias, residual, y) of the buffers behind x and weight; None for those that the spec does not have."""
    rest = list(buffers)
    bias = rest.pop(0) if spec.bias else None
    residual = rest.pop(0) if spec.residual else None
    y, = rest
    return bias, residual, y


ROWS_OF_TASK = 128  # rows of a prefill task: their activations stay in L2 while the panel passes over them


def over_panels(spec: LinearSpec, rows: Expr, panels: int, tiles: tuple[int, ...],
                emit: Callable[[Expr, Expr, int], None], rows_of_task: int = ROWS_OF_TASK, threads: bool = True) -> None:
    """Spread panels over threads (prefill: panels x blocks of rows) and call emit(panel, first row, rows of the tile).
    Without `threads` the caller's thread does all panels of a decode.

    `tiles` are tile heights, small to large. Rows are covered by the largest, what remains by the smallest; the last
    tile may reach beyond the rows. In decode one row alone has code of its own (a tile of 1).
    """
    def cover(panel: Expr, first: Expr, end: Expr) -> None:
        for tile in sorted(set(tiles), reverse=True):
            blocks = hold_index(T.truncdiv(end - first + i64(tile - 1 if tile == tiles[0] else 0), i64(tile)))
            start = first
            with loop(blocks) as block:
                emit(panel, start + block * i64(tile), tile)
            first = hold_index(start + blocks * i64(tile))

    if spec.phase == "prefill":
        blocks = hold_index(T.truncdiv(rows + i64(rows_of_task - 1), i64(rows_of_task)))
        with parallel(blocks * i64(panels)) as task:
            first = hold_index(T.truncmod(task, blocks) * i64(rows_of_task))
            end = hold_index(minimum(first + i64(rows_of_task), rows))
            cover(hold_index(T.truncdiv(task, blocks)), first, end)
        return
    with (parallel if threads else loop)(panels) as panel:
        either(rows == i64(1), lambda: emit(panel, i64(0), 1), lambda: cover(panel, i64(0), rows))


def store_tile(spec: LinearSpec, sums: Any, lanes: int, panel: Expr, first: Expr, count: int, rows: Expr, bias: Any,
               residual: Any, y: Any) -> None:
    """Write the outputs of a tile: sums f32[count, 32]; rows from `rows` on do not exist."""
    with loop(minimum(i64(count), rows - first)) as m:
        vectors = [load(sums, m, i64(v * lanes), lanes=lanes) for v in range(PANEL // lanes)]
        store_panel(spec, vectors, lanes, first + m, panel, bias, residual, y)


def store_panel(spec: LinearSpec, sums: list[Expr], lanes: int, row: Expr, panel: Expr, bias: Any, residual: Any,
                y: Any) -> None:
    """Write the outputs of one row and panel. sums: the 32 lanes as vectors of `lanes`, in panel order."""
    columns = spec.out_features // 2 if spec.gated else spec.out_features
    width = HALF if spec.gated else PANEL
    if spec.gated:
        # The two halves are gate and up of the same columns. A bias would be cut the same way.
        count = len(sums) // 2
        gate_bias = up_bias = None
        first = panel * i64(width)

        def finish(v: int, at: Expr, n: int, gate: Expr, up: Expr) -> Expr:
            if spec.bias:
                gate = gate + load(bias, at, lanes=n)
                up = up + load(bias, at + i64(columns), lanes=n)
            return (silu if spec.glu == "swiglu" else gelu)(gate, n) * up

        pairs = [(sums[v], sums[count + v]) for v in range(count)]
    else:
        first = panel * i64(width)

        def finish(v: int, at: Expr, n: int, value: Expr) -> Expr:
            return value + load(bias, at, lanes=n) if spec.bias else value

        pairs = [(s,) for s in sums]

    def write(at: Expr, n: int, value: Expr) -> None:
        if spec.residual:
            value = value + load(residual, row, at, lanes=n)
        store(y, value, row, at, lanes=n)

    def whole() -> None:
        for v, parts in enumerate(pairs):
            at = first + i64(v * lanes)
            write(at, lanes, finish(v, at, lanes, *parts))

    def partial() -> None:
        spill = T.alloc_buffer((i64(len(pairs[0]) * width),), "float32")
        for v, parts in enumerate(pairs):
            for part, value in enumerate(parts):
                store(spill, value, i64(part * width + v * lanes), lanes=lanes)
        with loop(columns % width) as j:
            at = first + j
            write(at, 1, finish(0, at, 1, *[load(spill, j + i64(part * width)) for part in range(len(pairs[0]))]))

    if columns % width == 0:
        whole()
    else:
        either(panel < i64(columns // width), whole, partial)
