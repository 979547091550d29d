"""rms_norm and add_rms_norm: one pass for the sum of squares, one for the scaled output.

`total` may stand where `residual` stood and `y` where `x` stood: an element is read before it is written, by the same
thread. So these kernels do not promise that their buffers never alias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import NormSpec

from .builder import Expr, Registers, T, build, const, i64, load, loop, rows_loop, splat, store, symbol
from .isa import Isa, fma, reduce_sum


@dataclass(frozen=True)
class NormTuning:
    chains: int = 4         # sums of squares side by side
    serial_below: int = 16  # rows from which on threads share them


def norm(isa: Isa, spec: NormSpec, tuning: NormTuning = NormTuning()) -> Any:
    """PrimFunc: x [t, H], [residual [t, H]], weight f32[H] → [total [t, H]], y [t, H]."""
    t, size, lanes, chains = symbol("t"), spec.hidden_size, isa.lanes, tuning.chains
    rows = [("x", (t, size), "float32")]
    params = rows + ([("residual", (t, size), "float32")] if spec.residual else []) + [("weight", (size,), "float32")]
    params += ([("total", (t, size), "float32")] if spec.residual else []) + [("y", (t, size), "float32")]

    def body(*args: Any) -> None:
        names = dict(zip((name for name, _, _ in params), args, strict=True))
        x, weight, y = names["x"], names["weight"], names["y"]
        total = names.get("total")

        def one(row: Expr) -> None:
            acc = Registers(chains, lanes)
            rest = Registers(1, 1)
            for c in range(chains):
                acc[c] = const(0.0, lanes)
            rest[0] = T.float32(0)

            def square(at: Expr, n: int, into: Any, index: int) -> None:
                value = load(x, row, at, lanes=n)
                if total is not None:
                    value = value + load(names["residual"], row, at, lanes=n)
                value = T.bind(value)
                if total is not None:
                    store(total, value, row, at, lanes=n)
                into[index] = fma(value, value, into[index])

            step = chains * lanes
            with loop(size // step) as i:
                for c in range(chains):
                    square(i * i64(step) + i64(c * lanes), lanes, acc, c)
            done = size // step * step
            for c in range((size - done) // lanes):
                square(i64(done + c * lanes), lanes, acc, c)
            done += (size - done) // lanes * lanes
            if done < size:
                with loop(size - done) as i:
                    square(i + i64(done), 1, rest, 0)
            mean = (reduce_sum(_tree([acc[c] for c in range(chains)]), lanes) + rest[0]) * T.float32(1 / size)
            inverse = T.bind(T.float32(1) / T.sqrt(mean + T.float32(spec.epsilon)))
            source = total if total is not None else x

            def scale(at: Expr, n: int) -> None:
                store(y, load(source, row, at, lanes=n) * splat(inverse, n) * load(weight, at, lanes=n), row, at, lanes=n)

            with loop(size // lanes) as i:
                scale(i * i64(lanes), lanes)
            if size % lanes:
                with loop(size % lanes) as i:
                    scale(i + i64(size // lanes * lanes), 1)

        rows_loop(t, one, serial_below=tuning.serial_below)

    return build(params, body).without_attr("tirx.noalias")


def _tree(values: list[Expr]) -> Expr:
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
