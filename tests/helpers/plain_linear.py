"""Loops in float32 for `PlainKernels`: products, embedding and norms."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import NORM_GROUP
from tvm.script import tirx as T

ATTRS = {"op_pattern": 8, "tirx.is_scheduled": True, "tirx.noalias": True}


def _silu(x: Any) -> Any:
    return x / (T.float32(1) + T.exp(-x))


def _gelu(x: Any) -> Any:
    y = T.float32(np.sqrt(2 / np.pi)) * (x + T.float32(0.044715) * x * x * x)
    return T.float32(0.5) * x * (T.float32(1) + T.tanh(y))


_SCALAR = {"swiglu": _silu, "geglu": _gelu}


@functools.cache
def linear_loops(n: int, k: int, bias: bool, glu: str | None) -> Any:
    """x[t, k], weight[n, k], [bias[n]] → y[t, n], or with `glu` the product of its halves, y[t, n / 2]."""
    gated, act = glu is not None, _SCALAR[glu or "swiglu"]
    width = n // 2 if gated else n

    @T.inline
    def multiply(x, w, bias_b, y, t):
        for i in range(t):
            for j in range(width):
                a = T.alloc_buffer((2,), "float32")
                a[0] = T.float32(0)
                a[1] = T.float32(0)
                for c in range(k):
                    a[0] = a[0] + x[i, c] * w[j, c]
                    if gated:
                        a[1] = a[1] + x[i, c] * w[width + j, c]
                if bias:
                    a[0] = a[0] + bias_b[j]
                    if gated:
                        a[1] = a[1] + bias_b[width + j]
                if gated:
                    y[i, j] = act(a[0]) * a[1]
                else:
                    y[i, j] = a[0]

    if bias:
        @T.prim_func(private=True, s_tir=True)
        def f(x_h: T.handle, w: T.Buffer((T.int64(n), T.int64(k)), "float32"),
              bias_b: T.Buffer((T.int64(n),), "float32"), y_h: T.handle):
            T.func_attr(ATTRS)
            t = T.int64()
            x = T.match_buffer(x_h, (t, T.int64(k)), "float32")
            y = T.match_buffer(y_h, (t, T.int64(width)), "float32")
            multiply(x, w, bias_b, y, t)
        return f

    @T.prim_func(private=True, s_tir=True)
    def g(x_h: T.handle, w: T.Buffer((T.int64(n), T.int64(k)), "float32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(k)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(width)), "float32")
        multiply(x, w, None, y, t)
    return g


@functools.cache
def add_loops(h: int) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, r_h: T.handle, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        r = T.match_buffer(r_h, (t, T.int64(h)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            for j in range(h):
                y[i, j] = x[i, j] + r[i, j]
    return f


@functools.cache
def prepare_loops(h: int) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, w: T.Buffer((T.int64(h),), "float32"), scaled_h: T.handle, squares_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        scaled = T.match_buffer(scaled_h, (t, T.int64(h)), "float32")
        squares = T.match_buffer(squares_h, (t, T.int64(h // NORM_GROUP)), "float32")
        for i in range(t):
            for g in range(h // NORM_GROUP):
                squares[i, g] = T.float32(0)
                for j in range(NORM_GROUP):
                    scaled[i, g * NORM_GROUP + j] = x[i, g * NORM_GROUP + j] * w[g * NORM_GROUP + j]
                    squares[i, g] = squares[i, g] + x[i, g * NORM_GROUP + j] * x[i, g * NORM_GROUP + j]
    return f


@functools.cache
def normed_loops(h: int, eps: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(scaled_h: T.handle, squares_h: T.handle, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        scaled = T.match_buffer(scaled_h, (t, T.int64(h)), "float32")
        squares = T.match_buffer(squares_h, (t, T.int64(h // NORM_GROUP)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            a = T.alloc_buffer((1,), "float32")
            a[0] = T.float32(0)
            for g in range(h // NORM_GROUP):
                a[0] = a[0] + squares[i, g]
            for j in range(h):
                y[i, j] = scaled[i, j] / T.sqrt(a[0] / T.float32(h) + T.float32(eps))
    return f


@functools.cache
def embedding_loops(v: int, h: int, factor: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(ids_h: T.handle, w: T.Buffer((T.int64(v), T.int64(h)), "float32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        ids = T.match_buffer(ids_h, (t,), "int32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            for j in range(h):
                y[i, j] = w[T.max(T.min(ids[i], v - 1), 0), j] * T.float32(factor)      # clamped, as on a GPU
    return f


@functools.cache
def norm_loops(h: int, eps: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, w: T.Buffer((T.int64(h),), "float32"), y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            a = T.alloc_buffer((1,), "float32")
            a[0] = T.float32(0)
            for j in range(h):
                a[0] = a[0] + x[i, j] * x[i, j]
            for j in range(h):
                y[i, j] = x[i, j] / T.sqrt(a[0] / T.float32(h) + T.float32(eps)) * w[j]
    return f


@functools.cache
def add_norm_loops(h: int, eps: float) -> Any:
    @T.prim_func(private=True, s_tir=True)
    def f(x_h: T.handle, r_h: T.handle, w: T.Buffer((T.int64(h),), "float32"), s_h: T.handle, y_h: T.handle):
        T.func_attr(ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(h)), "float32")
        r = T.match_buffer(r_h, (t, T.int64(h)), "float32")
        s = T.match_buffer(s_h, (t, T.int64(h)), "float32")
        y = T.match_buffer(y_h, (t, T.int64(h)), "float32")
        for i in range(t):
            a = T.alloc_buffer((1,), "float32")
            a[0] = T.float32(0)
            for j in range(h):
                s[i, j] = x[i, j] + r[i, j]
                a[0] = a[0] + s[i, j] * s[i, j]
            for j in range(h):
                y[i, j] = s[i, j] / T.sqrt(a[0] / T.float32(h) + T.float32(eps)) * w[j]
    return f
