"""Small device pieces that the CUDA kernels share: gated products, the buffers of the linear kernels in the contract's
order, and how a finished PrimFunc is marked. No kernel lives here."""

from __future__ import annotations

from typing import Any

import relaxpack.schedules.kernels.cuda.script_cache  # a faster parser
import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.kernel_spec import NORM_GROUP
from relaxpack.schedules.kernels.cuda.packing import scale_storage
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

SHORT = {"bfloat16": "bf16", "float16": "f16"}      # activation dtype → PTX name

_SILU = """
__device__ __forceinline__ float silu_f32(float x) { return x / (1.0f + __expf(-x)); }
"""
# 0.5 x (1 + tanh y) = x / (1 + exp(-2 y)) with y = sqrt(2 / pi) (x + 0.044715 x^3)
_GELU = """
__device__ __forceinline__ float gelu_tanh_f32(float x) {
  return x / (1.0f + __expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
}
"""


def glu_product(glu: str, gate, up):
    """The product of a gated linear unit in float32: silu(gate) * up, or with "geglu" gelu(gate) * up."""
    name, source = ("silu_f32", _SILU) if glu == "swiglu" else ("gelu_tanh_f32", _GELU)
    return T.cuda.func_call(name, gate, source_code=source, return_type="float32") * up


_ELECT = """
__device__ __forceinline__ unsigned elect_one() {
  unsigned one;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(one));
  return one; }
"""


def elected():
    """True in one lane of a warp whose 32 lanes are all here. Unlike with `lane == 0`, ptxas then knows that one thread is
    left, and a TMA copy needs no loop over the lanes that may want another one: 15 to 20 cycles instead of 60 to 70."""
    return T.cuda.func_call("elect_one", source_code=_ELECT, return_type="uint32") > T.uint32(0)


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


def block_ids(blocks: Any, cluster: int) -> Any:
    """(which cluster, which block of it) of `blocks` clusters; a cluster of one is a plain block."""
    if cluster > 1:
        return T.cluster_id([blocks]), T.cta_id_in_cluster([cluster])
    return T.cta_id([blocks]), 0


def entry(body, N: int, K: int, OUT: int, dtype: str, out_dtype: str, bias: bool, residual: bool,
          norm_epsilon: float | None = None, prepares_norm: bool = False):
    """The PrimFunc of a linear kernel with a float weight around the inlined `body(x, weight, bias, residual, y, t)`: the
    buffers that are there in the contract's order. `body` gets None for an absent buffer and opens the device part. A
    kernel that has to do with a norm gets `norm_buffers` as the last argument."""
    normed = norm_epsilon is not None
    outputs = 3 if prepares_norm else 1

    @T.inline
    def bind(handles):
        t = T.int64()
        x = T.match_buffer(handles[0], (t, K), dtype, align=16)
        weight = T.match_buffer(handles[1], (N, K), dtype, align=16)
        bias_buffer = T.meta_var(optional(bias, "bias", handles[2], (N,), "float32"))
        residual_buffer = T.meta_var(optional(residual, "residual", handles[2 + bias], (t, OUT), dtype))
        y = T.match_buffer(handles[-outputs], (t, OUT), out_dtype, align=16)
        norm = T.meta_var(norm_buffers(handles, t, OUT, K, dtype, normed, prepares_norm))
        if normed or prepares_norm:
            body(x, weight, bias_buffer, residual_buffer, y, t, None, norm)
        else:
            body(x, weight, bias_buffer, residual_buffer, y, t)

    return with_handles(2 + bias + residual + (normed or prepares_norm) + outputs, bind)


def norm_buffers(handles, t, OUT: int, K: int, dtype: str, normed: bool, prepares_norm: bool) -> list:
    """What a linear kernel reads and writes for the norm after it (weight, scaled, squares) or before it (squares). The
    input comes last of the inputs, the outputs behind y."""
    if prepares_norm:
        return [optional(True, "norm_weight", handles[-4], (OUT,), "float32"),
                optional(True, "scaled", handles[-2], (t, OUT), dtype),
                optional(True, "squares", handles[-1], (t, OUT // NORM_GROUP), "float32")]
    return [optional(True, "squares", handles[-2], (t, K // NORM_GROUP), "float32")] if normed else []


def linear_func(body, N: int, K: int, dtype: str, out_dtype: str, name: str, *, grid: str = "x", cluster: int = 1,
                bias: bool = False, residual: bool = False, glu: str | None = None, norm_epsilon: float | None = None,
                prepares_norm: bool = False, dependent_launch: bool = False, **_):
    """A finished PrimFunc around one inlined kernel; further options of the kernel are ignored here."""
    func = entry(body, N, K, N // 2 if glu else N, dtype, out_dtype, bias, residual, norm_epsilon, prepares_norm)
    return finish(func, name, dependent_launch, cluster, grid)


def by_rows(plans):
    """One inlined body out of several: `plans` are (largest t, body) in rising order, the last one serves all larger t. The
    host decides, so that one PrimFunc can hold a kernel for few rows and one for many."""
    (limit, first), *rest = plans
    if not rest:
        return first
    other = by_rows(rest)

    @T.inline
    def body(x, weight, bias_buffer, residual_buffer, y, t):
        if t <= limit:
            first(x, weight, bias_buffer, residual_buffer, y, t)
        else:
            other(x, weight, bias_buffer, residual_buffer, y, t)

    return body


def device():
    """The part of a kernel that runs on the device, as a `with` block; a PrimFunc may have several."""
    return T.attr({"tirx.device_entry": T.bool(True)})


def quant_entry(body, N: int, K: int, OUT: int, weight, dtype: str, out_dtype: str, bias: bool, residual: bool,
                norm_epsilon: float | None = None, prepares_norm: bool = False):
    """`entry` for a quantised weight in fragments: `body(x, codes, scales, minimums, bias, residual, y, t)`."""
    words, groups = fragment_sizes(weight, N, K)
    stored = weight.minimum == "stored"
    normed = norm_epsilon is not None
    outputs = 3 if prepares_norm else 1

    @T.inline
    def bind(handles):
        t = T.int64()
        x = T.match_buffer(handles[0], (t, K), dtype, align=16)
        codes = T.match_buffer(handles[1], (words,), "uint32", align=16)
        scales = T.match_buffer(handles[2], (groups,), scale_storage(weight), align=16)
        minimums = T.meta_var(optional(stored, "minimums", handles[3], (groups,), weight.scale_dtype))
        bias_buffer = T.meta_var(optional(bias, "bias", handles[3 + stored], (N,), "float32"))
        residual_buffer = T.meta_var(optional(residual, "residual", handles[3 + stored + bias], (t, OUT), dtype))
        y = T.match_buffer(handles[-outputs], (t, OUT), out_dtype, align=16)
        norm = T.meta_var(norm_buffers(handles, t, OUT, K, dtype, normed, prepares_norm))
        if normed or prepares_norm:
            body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t, norm)
        else:
            body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t)

    return with_handles(3 + stored + bias + residual + (normed or prepares_norm) + outputs, bind)


def optional(present: bool, name: str, handle, shape, dtype: str):
    """The buffer behind a handle where there is one, else None."""
    return IRBuilder.name(name, T.match_buffer(handle, shape, dtype, align=16)) if present else None


def fragment_sizes(weight, N: int, K: int) -> tuple[int, int]:
    """32-bit words of codes and number of groups of a packed weight; rows are padded to 16, K to 64."""
    values = -(-N // 16) * 16 * (-(-K // 64)) * 64
    groups = -(-N // 16) * 16 * weight.groups(K) if weight.long_groups else values // weight.group_size
    return values * weight.bits // 32, groups


def with_handles(count: int, bind):
    """A PrimFunc of `count` (2 to 11) buffers whose body is the inlined `bind(handles)`."""
    if count == 2:
        @T.prim_func
        def main(a: T.handle, b: T.handle):
            bind([a, b])
    elif count == 3:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle):
            bind([a, b, c])
    elif count == 4:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle):
            bind([a, b, c, d])
    elif count == 5:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle):
            bind([a, b, c, d, e])
    elif count == 6:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle):
            bind([a, b, c, d, e, f])
    elif count == 7:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, g: T.handle):
            bind([a, b, c, d, e, f, g])
    elif count == 8:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, g: T.handle, h: T.handle):
            bind([a, b, c, d, e, f, g, h])
    elif count == 9:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, g: T.handle, h: T.handle,
                 i: T.handle):
            bind([a, b, c, d, e, f, g, h, i])
    elif count == 10:
        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, g: T.handle, h: T.handle,
                 i: T.handle, j: T.handle):
            bind([a, b, c, d, e, f, g, h, i, j])
    else:
        assert count == 11, count

        @T.prim_func
        def main(a: T.handle, b: T.handle, c: T.handle, d: T.handle, e: T.handle, f: T.handle, g: T.handle, h: T.handle,
                 i: T.handle, j: T.handle, k: T.handle):
            bind([a, b, c, d, e, f, g, h, i, j, k])
    return main
