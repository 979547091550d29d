"""RoPE and KV append for CUDA: rotates queries and keys, optionally normalises them per head, writes keys and values
into their slots of the pages and queries to an output.

One thread handles two chunks of a head that belong together under rotate-half, a small group of lanes a whole head.
The kernel moves each byte once: the floor is its reads and writes over the memory bandwidth.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, Kernel, Stage
from relaxpack.schedules.kernels.cuda.fragments import (
    AWAIT,
    RELEASE,
    SHORT,
    check_dtypes,
    early_launch,
    finish,
    high,
    low,
    pack,
    shuffle_xor,
)
from relaxpack.schedules.kernels.cuda.pages_fp8 import pack_e4m3
from tvm.script import tirx as T

THREADS = 128


def chunk_width(head_dim: int, rotary_dim: int) -> int:
    """Elements of one chunk: the widest vector both halves of the rotated and of the plain part divide into."""
    for width in (8, 4, 2) if rotary_dim % 2 == 0 and head_dim % 2 == 0 else ():
        if rotary_dim // 2 % width == 0 and (head_dim - rotary_dim) // 2 % width == 0:
            return width
    raise CompileError(f"rope_append: head_dim {head_dim} with rotary_dim {rotary_dim} needs both halves even")


def lanes_per_head(head_dim: int, rotary_dim: int) -> int:
    """Threads that rotate one head, a power of two. Raises CompileError where a warp does not suffice."""
    pairs, lanes = head_dim // 2 // chunk_width(head_dim, rotary_dim), 1
    while lanes < pairs:
        lanes *= 2
    if lanes > 32:
        raise CompileError(f"rope_append: head_dim {head_dim} with rotary_dim {rotary_dim} is too large for one warp")
    return lanes


def _function(spec: AttentionSpec, early: bool) -> Any:
    D, R, H, KV, PS = spec.head_dim, spec.rotary_dim, spec.num_heads, spec.num_kv_heads, spec.page_size
    V, LANES = chunk_width(D, R), lanes_per_head(D, R)
    W, HALF, HEADS = V // 2, R // 2, H + 2 * KV
    PAIRS, ROTATED, REST = D // 2 // V, HALF // V, (D - R) // 2
    L, MAX_POSITION, LOG_LANES = spec.num_layers, spec.max_position, LANES.bit_length() - 1
    act, kv, FP8 = spec.activation_dtype, spec.page_dtype, spec.fp8
    NORM = spec.qk_norm_epsilon is not None
    EPS = float(spec.qk_norm_epsilon or 0.0)
    TABLE = 4 if V % 4 == 0 and HALF % 4 == 0 else 2         # f32 of one load from the table
    LOAD = "ld.global.nc.b32" if W == 1 else f"ld.global.nc.v{W}.b32"
    STORE = "st.global.b32" if W == 1 else f"st.global.v{W}.b32"
    PACK_Q, PACK_KV = pack(act), pack(act if FP8 else spec.kv_dtype)

    def grid(t: Any) -> Any:
        return T.Cast("int32", T.ceildiv(t * (HEADS * LANES), THREADS))

    def load(words: Any, first: int, source: Any) -> Any:
        return T.ptx[LOAD](*[words[first + i] for i in range(W)], source)

    def load_table(words: Any, i: Any, source: Any) -> Any:
        return T.ptx[f"ld.global.nc.v{TABLE}.b32"](*[words[TABLE * i + j] for j in range(TABLE)], source)

    def store(destination: Any, words: Any, first: int) -> Any:
        return T.ptx[STORE](destination, *[words[first + i] for i in range(W)])

    def store_kv(destination: Any, words: Any, first: int) -> Any:
        if not FP8:
            return store(destination, words, first)
        if W == 1:
            return T.ptx["st.global.b16"](destination, T.Cast("uint16", words[first]))
        pairs = [words[first + i] | words[first + i + 1] << T.uint32(16) for i in range(0, W, 2)]
        return T.ptx["st.global.b32" if W == 2 else "st.global.v2.b32"](destination, *pairs)

    @T.inline
    def body(qkv, rope_table, positions, slots, q_norm, k_norm, layer, pages, q, t, bx, tx):
        x = T.alloc_buffer((2 * V,), "float32", scope="local")       # the two chunks of this thread
        words = T.alloc_buffer((2 * W,), "uint32", scope="local")
        cos = T.alloc_buffer((V,), "uint32", scope="local")
        sin = T.alloc_buffer((V,), "uint32", scope="local")
        total: T.float32
        rotated: T.float32
        item = T.meta_var(T.Cast("int64", bx) * THREADS + T.Cast("int64", tx))
        row: T.int64
        head: T.int32
        pair: T.int32
        first: T.int32
        second: T.int32
        slot: T.int32
        place: T.int64
        row = item // (HEADS * LANES)
        head = T.Cast("int32", item % (HEADS * LANES)) // LANES
        pair = tx % LANES
        live = T.meta_var(T.And(row < t, pair < PAIRS))
        if early:
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
        first = T.if_then_else(pair < ROTATED, pair * V, R + (pair - ROTATED) * V)
        second = T.if_then_else(pair < ROTATED, pair * V + HALF, R + (pair - ROTATED) * V + REST)
        for i in T.unroll(2 * W):
            words[i] = T.uint32(0)
        if live:
            load(words, 0, qkv.ptr_to([row, head * D + first]))
            load(words, W, qkv.ptr_to([row, head * D + second]))
        for i in T.unroll(2 * W):
            x[2 * i] = low(act, words[i])
            x[2 * i + 1] = high(act, words[i])
        if NORM:
            total = T.float32(0)
            for i in T.unroll(2 * V):
                total = total + x[i] * x[i]
            for i in T.unroll(LOG_LANES):
                total = total + shuffle_xor(total, 1 << i)
            total = T.rsqrt(total * T.float32(1.0 / D) + T.float32(EPS))
            if T.And(live, head < H + KV):
                for i in T.unroll(V):
                    x[i] = x[i] * total * T.if_then_else(head < H, q_norm[first + i], k_norm[first + i])
                    x[V + i] = x[V + i] * total * T.if_then_else(head < H, q_norm[second + i], k_norm[second + i])
        if live:
            if T.And(pair < ROTATED, head < H + KV):
                place = T.Cast("int64", positions[row])
                for i in T.unroll(V // TABLE):
                    load_table(cos, i, rope_table.ptr_to([place, pair * V + TABLE * i]))
                    load_table(sin, i, rope_table.ptr_to([place, HALF + pair * V + TABLE * i]))
                for i in T.unroll(V):
                    rotated = x[i] * T.cuda.uint_as_float(cos[i]) - x[V + i] * T.cuda.uint_as_float(sin[i])
                    x[V + i] = x[V + i] * T.cuda.uint_as_float(cos[i]) + x[i] * T.cuda.uint_as_float(sin[i])
                    x[i] = rotated
            if head < H:
                for i in T.unroll(2 * W):
                    T.ptx[PACK_Q](words[i], x[2 * i + 1], x[2 * i])
                store(q.ptr_to([row, head * D + first]), words, 0)
                store(q.ptr_to([row, head * D + second]), words, W)
            else:
                for i in T.unroll(2 * W):
                    if FP8:
                        words[i] = pack_e4m3(x[2 * i + 1], x[2 * i])
                    else:
                        T.ptx[PACK_KV](words[i], x[2 * i + 1], x[2 * i])
                slot = slots[row]
                kv_head = T.meta_var(T.Cast("int64", (head - H) % KV))
                is_value = T.meta_var(T.Cast("int64", (head - H) // KV))
                place = T.Cast("int64", slot // PS)
                store_kv(pages.ptr_to([layer, place, is_value, kv_head, slot % PS, first]), words, 0)
                store_kv(pages.ptr_to([layer, place, is_value, kv_head, slot % PS, second]), words, W)

    if NORM:
        @T.prim_func
        def rope_append(qkv_h: T.handle, rope_table_h: T.handle, positions_h: T.handle, slots_h: T.handle,
                        q_norm_h: T.handle, k_norm_h: T.handle, layer: T.int64, pages_h: T.handle, q_h: T.handle):
            t = T.int64()
            p = T.int64()
            qkv = T.match_buffer(qkv_h, (t, HEADS * D), act, align=16)
            rope_table = T.match_buffer(rope_table_h, (MAX_POSITION, R), "float32", align=16)
            positions = T.match_buffer(positions_h, (t,), "int32")
            slots = T.match_buffer(slots_h, (t,), "int32")
            q_norm = T.match_buffer(q_norm_h, (D,), "float32")
            k_norm = T.match_buffer(k_norm_h, (D,), "float32")
            pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
            q = T.match_buffer(q_h, (t, H * D), act, align=16)
            T.device_entry()
            bx = T.cta_id([grid(t)])
            tx = T.thread_id([THREADS])
            body(qkv, rope_table, positions, slots, q_norm, k_norm, layer, pages, q, t, bx, tx)
    else:
        @T.prim_func
        def rope_append(qkv_h: T.handle, rope_table_h: T.handle, positions_h: T.handle, slots_h: T.handle,
                        layer: T.int64, pages_h: T.handle, q_h: T.handle):
            t = T.int64()
            p = T.int64()
            qkv = T.match_buffer(qkv_h, (t, HEADS * D), act, align=16)
            rope_table = T.match_buffer(rope_table_h, (MAX_POSITION, R), "float32", align=16)
            positions = T.match_buffer(positions_h, (t,), "int32")
            slots = T.match_buffer(slots_h, (t,), "int32")
            pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
            q = T.match_buffer(q_h, (t, H * D), act, align=16)
            T.device_entry()
            bx = T.cta_id([grid(t)])
            tx = T.thread_id([THREADS])
            body(qkv, rope_table, positions, slots, None, None, layer, pages, q, t, bx, tx)
    return rope_append


def rope_append(spec: AttentionSpec, arch: str = "sm_90a") -> Kernel:
    """qkv I[t, (H+2KV)*D], rope_table, positions, slots, [q_norm, k_norm], layer → pages (in place), q I[t, H*D]."""
    check_dtypes(spec.activation_dtype, *() if spec.fp8 else (spec.kv_dtype,))
    norms = ("q_norm", "k_norm") if spec.qk_norm_epsilon is not None else ()
    stored = "e4m3" if spec.fp8 else SHORT[spec.kv_dtype]
    name = (f"rope_append_{SHORT[spec.activation_dtype]}_{stored}_h{spec.num_heads}x{spec.num_kv_heads}"
            f"_d{spec.head_dim}r{spec.rotary_dim}_p{spec.page_size}{'_norm' if norms else ''}")
    early = early_launch(arch)
    stage = Stage(finish(_function(spec, early), early, shared=False), name,
                  inputs=("qkv", "rope_table", "positions", "slots", *norms, "layer", "pages"),
                  outputs=("q",), inplace=("pages",))
    return Kernel((stage,), source="rule:cuda.rope_append")
