"""How a panel's finished sums become outputs: bias, residual, SwiGLU, and the partial last panel."""

from __future__ import annotations

from typing import Any

from relaxpack.kernel_spec import LinearSpec

from .builder import T, either, i64, load, loop, store
from .isa import silu
from .layout import HALF, PANEL

Expr = Any


def store_panel(spec: LinearSpec, sums: list[Expr], lanes: int, row: Expr, panel: Expr, bias: Any, residual: Any,
                y: Any) -> None:
    """Write the outputs of one row and panel. sums: the 32 lanes as vectors of `lanes`, in panel order."""
    columns = spec.out_features // 2 if spec.swiglu else spec.out_features
    width = HALF if spec.swiglu else PANEL
    if spec.swiglu:
        # The two halves are gate and up of the same columns. A bias would be cut the same way.
        count = len(sums) // 2
        gate_bias = up_bias = None
        first = panel * i64(width)

        def finish(v: int, at: Expr, n: int, gate: Expr, up: Expr) -> Expr:
            if spec.bias:
                gate = gate + load(bias, at, lanes=n)
                up = up + load(bias, at + i64(columns), lanes=n)
            return silu(gate, n) * up

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
