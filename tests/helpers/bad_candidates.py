"""Candidates that harm whoever builds or runs them, as modules of TVM: real ones, compiled and run like any other."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.schedules.kernels.cpu.builder import T, build, i64, load, loop, splat, store

SHAPE = (64, 64)


def _choice(body: Callable[..., None]) -> dict[str, Any]:
    func = build([("a", SHAPE, "float32"), ("b", SHAPE, "float32")], body)
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return {"kind": "module", "module": base64.b64encode(tvm.ir.save_json(module).encode()).decode()}


def runs_forever() -> dict[str, Any]:
    def body(a: Any, b: Any) -> None:
        with T.While(b[i64(0), i64(0)] == b[i64(0), i64(0)] or a[i64(0), i64(0)] == a[i64(0), i64(0)]):
            store(b, a[i64(0), i64(0)], i64(0), i64(0))
    return _choice(body)


def crashes_the_runner() -> dict[str, Any]:
    """Writes far outside its buffer."""
    def body(a: Any, b: Any) -> None:
        with loop(1 << 12) as i:
            store(b, a[i64(0), i64(0)], i * i64(1 << 30), i64(0))
    return _choice(body)


def crashes_the_builder() -> dict[str, Any]:
    """An instruction the target does not have: LLVM gives up with abort()."""
    def body(a: Any, b: Any) -> None:
        codes = T.reinterpret("int32x16", load(a, i64(0), i64(0), lanes=16))
        total = T.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpbusd.512", splat(T.int32(0), 16),
                                        T.reinterpret("uint8x64", codes), T.reinterpret("int8x64", codes))
        store(b, T.reinterpret("float32x16", total), i64(0), i64(0), lanes=16)
    return _choice(body)


def is_wrong() -> dict[str, Any]:
    """2.001 a instead of 2 a."""
    def body(a: Any, b: Any) -> None:
        with loop(SHAPE[0]) as i, loop(SHAPE[1]) as j:
            store(b, a[i, j] * T.float32(2.001), i, j)
    return _choice(body)


def is_right() -> dict[str, Any]:
    def body(a: Any, b: Any) -> None:
        with loop(SHAPE[0]) as i, loop(SHAPE[1] // 16) as j:
            store(b, load(a, i, j * i64(16), lanes=16) * splat(T.float32(2), 16), i, j * i64(16), lanes=16)
    return _choice(body)
