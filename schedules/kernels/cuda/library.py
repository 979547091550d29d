"""Kernels that are calls of a library: a host function that hands addresses, sizes and dtypes to a packed function, which
launches on the current stream (`runtime/library/`). Never chosen by a rule: only where a tuning record says that the
library won. (Addresses, because TVM describes a bfloat16 buffer as float32 where a host has no such numbers.)
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import Kernel, LinearSpec, Stage
from tvm.script import tirx as T

LIBRARIES = ("cublaslt",)
_ATTRS = {"op_pattern": 8, "tirx.is_scheduled": True}


def why_not(spec: LinearSpec, library: str) -> str | None:
    """Why a library cannot compute this, or None where it can."""
    if library not in LIBRARIES:
        return f"library {library!r} is unknown to this relaxpack"
    if spec.weight.name not in ("bf16", "f16") or spec.weight.dtype != spec.activation_dtype:
        return f"{library} multiplies plain weights of the activations' dtype, not {spec.weight.name}"
    if spec.bias or spec.gated:
        return f"{library} is not called for {'a bias' if spec.bias else 'a gated linear unit'}"
    if spec.residual and spec.out_dtype != spec.activation_dtype:
        return f"{library} adds no {spec.activation_dtype} residual to {spec.out_dtype}"
    return None


def library_linear(spec: LinearSpec, library: str, algorithm: int = 0) -> Kernel:
    """`algorithm`: a place in the library's own ranking. Raises CompileError where `why_not` has a reason."""
    if (reason := why_not(spec, library)) is not None:
        raise CompileError(f"linear {spec.out_features}x{spec.in_features}: {reason}")
    name = (f"{library}_{spec.out_features}x{spec.in_features}{'_residual' if spec.residual else ''}_{spec.activation_dtype}"
            f"_{spec.out_dtype}{f'_a{algorithm}' if algorithm else ''}")
    function = f"relaxpack.{library}.matmul{'_add' if spec.residual else ''}"
    func = _call(function, spec.out_features, spec.in_features, spec.activation_dtype, spec.out_dtype, spec.residual,
                 algorithm)
    inputs = ("x", "weight", "residual") if spec.residual else ("x", "weight")
    return Kernel((Stage(func, name, inputs, ("y",)),), f"library:{library}")


def _call(function: str, N: int, K: int, dtype: str, out_dtype: str, residual: bool, algorithm: int = 0) -> Any:
    more = (T.int64(algorithm),) if algorithm else ()        # bundles from before there was a choice give nothing

    if residual:
        @T.prim_func(private=True, s_tir=True)
        def call_add(x_h: T.handle, w_h: T.handle, r_h: T.handle, y_h: T.handle):
            T.func_attr(_ATTRS)
            t = T.int64()
            x = T.match_buffer(x_h, (t, T.int64(K)), dtype)
            w = T.match_buffer(w_h, (T.int64(N), T.int64(K)), dtype)
            r = T.match_buffer(r_h, (t, T.int64(N)), dtype)
            y = T.match_buffer(y_h, (t, T.int64(N)), out_dtype)
            T.evaluate(T.call_packed(function, x.data, w.data, r.data, y.data, t, T.int64(N), T.int64(K), dtype, out_dtype,
                                     *more))
        return call_add

    @T.prim_func(private=True, s_tir=True)
    def call(x_h: T.handle, w_h: T.handle, y_h: T.handle):
        T.func_attr(_ATTRS)
        t = T.int64()
        x = T.match_buffer(x_h, (t, T.int64(K)), dtype)
        w = T.match_buffer(w_h, (T.int64(N), T.int64(K)), dtype)
        y = T.match_buffer(y_h, (t, T.int64(N)), out_dtype)
        T.evaluate(T.call_packed(function, x.data, w.data, y.data, t, T.int64(N), T.int64(K), dtype, out_dtype, *more))
    return call
