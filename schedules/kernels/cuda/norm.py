"""RMSNorm and residual add + RMSNorm: one block per row, 16-byte accesses, float32 sums. Between matmuls of few rows there
is none: rows_epilogue.py. How many threads share a row, and whether the kernel is launched while the one before still runs,
is `NormTuning`. How many rows there are decides at compile time, as far as it is known: `NormSpec.many_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.kernel_spec import Kernel, NormSpec, Stage
from relaxpack.schedules.kernels.cuda.common import finish, with_handles
from relaxpack.schedules.kernels.cuda.fragments import early_launch, high, low, pack, shuffle_xor
from tvm.script import tirx as T

LOAD, STORE = "ld.global.v4.b32", "st.global.v4.b32"


@dataclass(frozen=True)
class NormTuning:
    """The search space. `threads` is a multiple of 32. `blocks` of the grid at most: for more rows than that, each takes
    several in turn and keeps the weights in registers; 0: a block for every row."""

    threads: int
    dependent_launch: bool = False
    blocks: int = 0


# (hidden size, residual) → tuning for many rows of 16 bits, of the shapes that were measured (on an H200: docs/tuning.md).
_MANY_ROWS = {(4096, True): NormTuning(512, True, 264), (4096, False): NormTuning(256, True, 528),
              (2048, True): NormTuning(256, True, 1056)}


def default_tuning(spec: NormSpec, arch: str = "") -> NormTuning:
    """A thread for every 16 bytes of a row, as far as a block has threads. Launched dependently where the architecture can:
    2.7 to 2.1 us for few rows of 4096 on an H200 (docs/tuning.md). Of many rows what was faster there, where known."""
    few = NormTuning(min(1024, -(-spec.hidden_size // 8 // 32) * 32), early_launch(arch))
    known = spec.many_rows and arch == "sm_90a"
    return _MANY_ROWS.get((spec.hidden_size, spec.residual), few) if known else few


def norm_kernel(spec: NormSpec, arch: str, tuning: NormTuning | None = None) -> Kernel:
    """x, [residual], weight → [total], y, all [t, hidden_size]; each output may lie over its input."""
    epsilon = f"{spec.epsilon:g}".replace("-", "m").replace(".", "p").replace("+", "")
    tuning = tuning or default_tuning(spec, arch)
    default = default_tuning(replace(spec, many_rows=False), arch)      # a kernel has one name, whoever chose it
    marks = (f"_th{tuning.threads}" * (tuning.threads != default.threads)
             + "_in_turn" * (default.dependent_launch and not tuning.dependent_launch)
             + f"_bl{tuning.blocks}" * bool(tuning.blocks))
    name = f"{'add_' if spec.residual else ''}rms_norm_{spec.hidden_size}_{spec.activation_dtype}_eps{epsilon}{marks}"
    inputs = ("x", "residual", "weight") if spec.residual else ("x", "weight")
    outputs = ("total", "y") if spec.residual else ("y",)
    # An element is read before it is written, by the same thread.
    overwrites = (("residual", "total"), ("x", "y")) if spec.residual else (("x", "y"),)
    func = norm(spec, threads=tuning.threads, dependent_launch=tuning.dependent_launch, blocks=tuning.blocks, name=name)
    return Kernel((Stage(func, name, inputs, outputs, overwrites=overwrites),), "rule:cuda.norm")


def norm(spec: NormSpec, *, threads: int | None = None, dependent_launch: bool = False, blocks: int = 0,
         name: str = "rms_norm"):
    """PrimFunc x I`[t, H]`, [residual I`[t, H]`], weight f32`[H]` → [total], y I`[t, H]`. The norm is taken of the total
    as stored, rounded to the activation dtype. H must be a multiple of 8."""
    H, dtype, residual = spec.hidden_size, spec.activation_dtype, spec.residual
    assert H % 8 == 0
    vectors = H // 8
    THREADS = threads or default_tuning(spec).threads
    ROUNDS = -(-vectors // THREADS)
    WARPS = THREADS // 32
    PACK = pack(dtype)
    exact = vectors % THREADS == 0

    SEVERAL = blocks > 0
    TURNS = 2 if SEVERAL else 1                     # sums of a row while some threads still read those of the one before

    @T.inline
    def one_row(x, before, weight, total, y, sums, v, w, z, square, kept, row, turn, tx):
        square[0] = T.float32(0)
        for i in T.unroll(ROUNDS):
            k = T.meta_var((i * THREADS + tx) * 8)
            if T.bool(True) if exact else k < H:
                T.ptx[LOAD](w[0], w[1], w[2], w[3], x.ptr_to([row, k]))
                if residual:
                    T.ptx[LOAD](z[0], z[1], z[2], z[3], before.ptr_to([row, k]))
                    for e in T.unroll(4):
                        T.ptx[PACK](w[e], high(dtype, w[e]) + high(dtype, z[e]), low(dtype, w[e]) + low(dtype, z[e]))
                    T.ptx[STORE](total.ptr_to([row, k]), w[0], w[1], w[2], w[3])
                for e in T.unroll(4):
                    v[i * 8 + e * 2] = low(dtype, w[e])
                    v[i * 8 + e * 2 + 1] = high(dtype, w[e])
                for e in T.unroll(8):
                    square[0] = square[0] + v[i * 8 + e] * v[i * 8 + e]
        for e in T.unroll(5):
            square[0] = square[0] + shuffle_xor(square[0], T.shift_left(1, e))
        if WARPS > 1:
            if tx % 32 == 0:
                sums[turn * 32 + tx // 32] = square[0]
            T.cuda.cta_sync()
            square[0] = T.float32(0)
            for e in T.unroll(WARPS):
                square[0] = square[0] + sums[turn * 32 + e]
        square[0] = T.rsqrt(square[0] * T.float32(1.0 / H) + T.float32(spec.epsilon))
        for i in T.unroll(ROUNDS):
            k = T.meta_var((i * THREADS + tx) * 8)
            if T.bool(True) if exact else k < H:
                for e in T.unroll(4):
                    at = T.meta_var(i * 8 + e * 2)
                    T.ptx[PACK](w[e], v[at + 1] * square[0] * (kept[at + 1] if SEVERAL else weight[k + e * 2 + 1]),
                                v[at] * square[0] * (kept[at] if SEVERAL else weight[k + e * 2]))
                T.ptx[STORE](y.ptr_to([row, k]), w[0], w[1], w[2], w[3])

    @T.inline
    def bind(handles):
        t = T.int64()
        x = T.match_buffer(handles[0], (t, H), dtype, align=16)
        if residual:
            before = T.match_buffer(handles[1], (t, H), dtype, align=16)
        weight = T.match_buffer(handles[1 + residual], (H,), "float32", align=16)
        if residual:
            total = T.match_buffer(handles[3], (t, H), dtype, align=16)
        y = T.match_buffer(handles[-1], (t, H), dtype, align=16)
        T.device_entry()
        first = T.cta_id([T.Cast("int32", T.min(t, T.int64(blocks)) if SEVERAL else t)])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        sums = pool.alloc((32 * TURNS,), "float32", align=16)
        pool.commit()
        v = T.alloc_buffer((ROUNDS * 8,), "float32", scope="local")
        w = T.alloc_buffer((4,), "uint32", scope="local")
        z = T.alloc_buffer((4,), "uint32", scope="local")
        square = T.alloc_buffer((1,), "float32", scope="local")
        kept = T.alloc_buffer((ROUNDS * 8 if SEVERAL else 1,), "float32", scope="local")
        if SEVERAL:
            for i in T.unroll(ROUNDS):
                k = T.meta_var((i * THREADS + tx) * 8)
                if T.bool(True) if exact else k < H:
                    for e in T.unroll(8):
                        kept[i * 8 + e] = weight[k + e]
        if dependent_launch:
            T.ptx["griddepcontrol.wait"]()
            T.ptx["griddepcontrol.launch_dependents"]()
        if SEVERAL:
            row: T.int32
            turn: T.int32
            row = first
            turn = 0
            while row < T.Cast("int32", t):
                one_row(x, before if residual else x, weight, total if residual else y, y, sums, v, w, z, square, kept, row,
                        turn, tx)
                row = row + blocks
                turn = 1 - turn
        else:
            one_row(x, before if residual else x, weight, total if residual else y, y, sums, v, w, z, square, kept, first, 0,
                    tx)

    return finish(with_handles(5 if residual else 3, bind), name, dependent_launch)
