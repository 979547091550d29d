"""Embedding: rows of the (plain or packed) table, one block per token. Ids outside the vocabulary are clamped, so that a
bad id can never read foreign memory; the runtime refuses them earlier."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.kernel_spec import EmbeddingSpec
from relaxpack.schedules.kernels.cuda.common import finish, fragment_sizes, optional, with_handles
from relaxpack.schedules.kernels.cuda.dequantize import STORE4, eight_values
from relaxpack.schedules.kernels.cuda.fragments import high, low, pack
from relaxpack.schedules.kernels.cuda.packing import scale_storage
from tvm.script import tirx as T

LOAD = "ld.global.nc.v4.b32"
MAX_THREADS = 256


def embedding(spec: EmbeddingSpec, *, name: str = "embedding"):
    """PrimFunc token_ids i32`[t]`, weight buffers → y I`[t, H]`."""
    V, H, dtype, weight = spec.vocab_size, spec.hidden_size, spec.activation_dtype, spec.weight
    assert H % 8 == 0
    body = (_packed(V, H, dtype, weight, spec.factor) if weight.quantized
            else _plain(V, H, dtype, weight.dtype, spec.factor))
    return finish(body, name)


def _plain(V: int, H: int, dtype: str, weight_dtype: str, factor: float):
    vectors, scaled = H // 8, factor != 1
    THREADS = min(MAX_THREADS, -(-vectors // 32) * 32)
    PACK = pack(dtype)

    @T.inline
    def bind(handles):
        t = T.int64()
        ids = T.match_buffer(handles[0], (t,), "int32", align=4)
        table = T.match_buffer(handles[1], (V, H), weight_dtype, align=16)
        y = T.match_buffer(handles[2], (t, H), dtype, align=16)
        T.device_entry()
        row = T.cta_id([T.Cast("int32", t)])
        tx = T.thread_id([THREADS])
        w = T.alloc_buffer((4,), "uint32", scope="local")
        token = T.meta_var(T.max(T.min(ids[row], V - 1), 0))
        for i in T.serial(-(-vectors // THREADS)):
            k = T.meta_var((i * THREADS + tx) * 8)
            if k < H:
                T.ptx[LOAD](w[0], w[1], w[2], w[3], table.ptr_to([token, k]))
                if scaled:
                    for e in T.unroll(4):
                        T.ptx[PACK](w[e], high(weight_dtype, w[e]) * T.float32(factor),
                                    low(weight_dtype, w[e]) * T.float32(factor))
                elif weight_dtype != dtype:
                    for e in T.unroll(4):
                        T.ptx[PACK](w[e], high(weight_dtype, w[e]), low(weight_dtype, w[e]))
                T.ptx[STORE4](y.ptr_to([row, k]), w[0], w[1], w[2], w[3])

    return with_handles(3, bind)


def _packed(V: int, H: int, dtype: str, weight, factor: float):
    chunks = -(-H // 64)
    words, groups = fragment_sizes(weight, V, H)
    stored = weight.minimum == "stored"
    items = chunks * 8                              # 8 lanes' shares (half, q) of each chunk
    THREADS = min(MAX_THREADS, -(-items // 32) * 32)
    run = eight_values(weight, chunks, dtype, factor)

    @T.inline
    def bind(handles):
        t = T.int64()
        ids = T.match_buffer(handles[0], (t,), "int32", align=4)
        codes = T.match_buffer(handles[1], (words,), "uint32", align=16)
        scales = T.match_buffer(handles[2], (groups,), scale_storage(weight), align=16)
        minimums = T.meta_var(optional(stored, "minimums", handles[3], (groups,), weight.scale_dtype))
        y = T.match_buffer(handles[-1], (t, H), dtype, align=16)
        T.device_entry()
        row = T.cta_id([T.Cast("int32", t)])
        tx = T.thread_id([THREADS])
        word = T.alloc_buffer((4,), "uint32", scope="local")
        pair = T.alloc_buffer((2,), "float32", scope="local")
        token = T.meta_var(T.max(T.min(ids[row], V - 1), 0))
        for i in T.serial(-(-items // THREADS)):
            item = T.meta_var(i * THREADS + tx)
            if item < items:
                run(codes, scales, minimums, word, pair, y, row, token // 16, item // 8, item % 8 // 4,
                    token % 8 * 4 + item % 4, token % 16 // 8, H)

    return with_handles(4 + stored, bind)
