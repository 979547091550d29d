"""Small device pieces that the CUDA kernels share: dtype facts, packing of two floats into one register, silu, and how
a finished PrimFunc is marked. No kernel lives here."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from tvm.script import tirx as T

SHORT = {"bfloat16": "bf16", "float16": "f16"}      # activation dtype → PTX name

_PACK = """
__device__ __forceinline__ unsigned int pack_{short}(float low, float high) {{
  unsigned int d; asm("cvt.rn.{short}x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d; }}
"""
_SILU = """
__device__ __forceinline__ float silu_f32(float x) { return x / (1.0f + __expf(-x)); }
"""


def pack2(dtype: str, low, high):
    """Two float32 → one uint32 of two `dtype` values, round to nearest even, `low` in the low half."""
    short = SHORT[dtype]
    return T.cuda.func_call(f"pack_{short}", low, high, source_code=_PACK.format(short=short), return_type="uint32")


def silu(x):
    """x * sigmoid(x) in float32."""
    return T.cuda.func_call("silu_f32", x, source_code=_SILU, return_type="float32")


def mma_name(dtype: str) -> str:
    """The 16x8x16 tensor-core instruction of sm_80 and newer, float32 accumulation."""
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{SHORT[dtype]}.{SHORT[dtype]}.f32"


def finish(func, name: str, dependent_launch: bool = False, cluster: int = 1, grid: str = "x"):
    """Mark a kernel as scheduled and opaque to fusion. With `dependent_launch` it is launched while the kernel before
    it still runs (programmatic dependent launch); it must then execute griddepcontrol.wait before it touches anything
    but weights. `grid` names its block indices in order, "x" or "xy"."""
    func = func.with_attr("tirx.is_scheduled", True).with_attr("op_pattern", 8).with_attr("global_symbol", name)
    if dependent_launch:
        tags = ["clusterCtaIdx.x"] * (cluster > 1) + [f"blockIdx.{axis}" for axis in grid]
        func = func.with_attr("tirx.kernel_launch_params", [
            *tags, "threadIdx.x", "tirx.use_programtic_dependent_launch", "tirx.use_dyn_shared_memory"])
    return func


def entry(body, N: int, K: int, OUT: int, dtype: str, weight_dtype: str, out_dtype: str, bias: bool, residual: bool):
    """The PrimFunc of a linear kernel around the inlined `body(x, weight, bias, residual, y, t)`, with exactly the buffers
    that are there, in the contract's order; `body` gets x in place of what is absent and opens the device part."""
    if bias and residual:
        @T.prim_func
        def main(x_ptr: T.handle, w_ptr: T.handle, b_ptr: T.handle, r_ptr: T.handle, y_ptr: T.handle):
            t = T.int64()
            x = T.match_buffer(x_ptr, (t, K), dtype, align=16)
            weight = T.match_buffer(w_ptr, (N, K), weight_dtype, align=16)
            bias_buffer = T.match_buffer(b_ptr, (N,), "float32", align=16)
            residual_buffer = T.match_buffer(r_ptr, (t, OUT), dtype, align=16)
            y = T.match_buffer(y_ptr, (t, OUT), out_dtype, align=16)
            body(x, weight, bias_buffer, residual_buffer, y, t)
    elif bias:
        @T.prim_func
        def main(x_ptr: T.handle, w_ptr: T.handle, b_ptr: T.handle, y_ptr: T.handle):
            t = T.int64()
            x = T.match_buffer(x_ptr, (t, K), dtype, align=16)
            weight = T.match_buffer(w_ptr, (N, K), weight_dtype, align=16)
            bias_buffer = T.match_buffer(b_ptr, (N,), "float32", align=16)
            y = T.match_buffer(y_ptr, (t, OUT), out_dtype, align=16)
            body(x, weight, bias_buffer, x, y, t)
    elif residual:
        @T.prim_func
        def main(x_ptr: T.handle, w_ptr: T.handle, r_ptr: T.handle, y_ptr: T.handle):
            t = T.int64()
            x = T.match_buffer(x_ptr, (t, K), dtype, align=16)
            weight = T.match_buffer(w_ptr, (N, K), weight_dtype, align=16)
            residual_buffer = T.match_buffer(r_ptr, (t, OUT), dtype, align=16)
            y = T.match_buffer(y_ptr, (t, OUT), out_dtype, align=16)
            body(x, weight, x, residual_buffer, y, t)
    else:
        @T.prim_func
        def main(x_ptr: T.handle, w_ptr: T.handle, y_ptr: T.handle):
            t = T.int64()
            x = T.match_buffer(x_ptr, (t, K), dtype, align=16)
            weight = T.match_buffer(w_ptr, (N, K), weight_dtype, align=16)
            y = T.match_buffer(y_ptr, (t, OUT), out_dtype, align=16)
            body(x, weight, x, x, y, t)
    return main
