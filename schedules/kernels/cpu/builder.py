"""Shorthand over TVM's IRBuilder with which the CPU kernels are written as plain Python.

Kernels here are direct loop nests (no blocks, no schedule afterwards): Python loops unroll, `loop` and `parallel`
emit loops. Everything that depends on the instruction set is in `isa`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

Expr = Any


def i64(value: int | Expr) -> Expr:
    """Indices and extents are int64 throughout: TIR does not mix widths."""
    return T.int64(value) if isinstance(value, int) else value


def symbol(name: str) -> Expr:
    return tirx.Var(name, "int64")


def build(params: Sequence[tuple[str, tuple[int | Expr, ...] | None, str]], body: Callable[..., None]) -> Any:
    """The PrimFunc over `params` (name, shape or None for a scalar, dtype) whose statements `body(*params)` emits."""
    with IRBuilder() as ib:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name("kernel")
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8})
            args = [T.arg(name, tirx.Var(name, dtype) if shape is None
                          else T.buffer([i64(d) for d in shape], dtype))
                    for name, shape, dtype in params]
            body(*args)
    return ib.get()


def loop(extent: int | Expr) -> Any:
    return T.serial(i64(0), i64(extent))


def parallel(extent: int | Expr) -> Any:
    return T.parallel(i64(0), i64(extent))


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def either(condition: Expr, yes: Callable[[], None], no: Callable[[], None]) -> None:
    with T.If(condition):
        with T.Then():
            yes()
        with T.Else():
            no()


def rows_loop(rows: Expr, body: Callable[[Expr], None], serial_below: int = 8) -> None:
    """One call of `body` a row; without the thread pool while there are few rows (a launch costs microseconds)."""
    def serial() -> None:
        with loop(rows) as row:
            body(row)

    def threads() -> None:
        with parallel(rows) as row:
            body(row)

    either(rows < i64(serial_below), serial, threads)


def at(base: Expr, lanes: int, stride: int = 1) -> Expr:
    """Index of `lanes` neighbours from `base` on."""
    base = i64(base)
    return base if lanes == 1 else T.Ramp(base, T.int64(stride), lanes)


def load(buffer: Any, *index: Expr, lanes: int = 1) -> Expr:
    """`lanes` neighbours along the last axis."""
    return buffer[(*[i64(i) for i in index[:-1]], at(index[-1], lanes))]


def store(buffer: Any, value: Expr, *index: Expr, lanes: int = 1) -> None:
    T.buffer_store(buffer, value, [*[i64(i) for i in index[:-1]], at(index[-1], lanes)])


def splat(value: Expr, lanes: int) -> Expr:
    return value if lanes == 1 else T.Broadcast(value, lanes)


def const(value: float, lanes: int = 1) -> Expr:
    return splat(T.float32(value), lanes)


class Registers:
    """Local vectors, read and written by constant index.

    Each is a scalar-typed array of its own: TVM shares the storage of dead buffers whatever their vector types and then
    trips over an access of the other type, and arrays above 1 KiB (or scope="local") would become heap calls.
    """

    def __init__(self, count: int, lanes: int, dtype: str = "float32", start: Expr | None = None) -> None:
        self.lanes = lanes
        self.buffers = [T.alloc_buffer((i64(lanes),), dtype) for _ in range(count)]
        if start is not None:
            for i in range(count):
                self[i] = start

    def __getitem__(self, index: int) -> Expr:
        return load(self.buffers[index], i64(0), lanes=self.lanes)

    def __setitem__(self, index: int, value: Expr) -> None:
        store(self.buffers[index], value, i64(0), lanes=self.lanes)

    def set(self, index: int, value: Expr) -> None:
        self[index] = value


def hold(value: Expr, lanes: int, dtype: str = "float32") -> Expr:
    """A value that is used several times. TVM's simplifier copies a bound value that reads no buffer into each of its
    uses, so a chain of `T.bind`s of arithmetic grows exponentially; a load is not copied."""
    register = Registers(1, lanes, dtype, value)
    return T.bind(register[0])


def hold_index(value: Expr) -> Expr:
    """As `hold`, for an int64 that many addresses are computed from."""
    return hold(value, 1, "int64")


def minimum(a: Expr, b: Expr) -> Expr:
    return T.min(i64(a), i64(b))


def vectors_of(size: int, lanes: int) -> list[tuple[int, int]]:
    """Cut `size` into (offset, lanes) pieces of full vectors, then halves: 80 with 16 lanes → 5 x 16; 40 → 2 x 16, 8."""
    pieces, offset = [], 0
    while offset < size:
        while lanes > size - offset:
            lanes //= 2
        pieces.append((offset, lanes))
        offset += lanes
    return pieces
