"""Few-row matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit and 8-bit weights on mma.m16n8k16 (sm_80 and newer). Codes are read
once, turned into exact small integers in registers and multiplied there; scales and minimums are applied to the float32
sums of each group, so nothing is rounded that the format does not round.

The weight comes in fragments (see packing.py): for each 16 rows x 64 values of K, lane 4g+q holds the codes of rows g and
g+8 at those K that it also loads of x, 16 bytes per lane for 4-bit codes.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import finish, mma_name, quant_entry, silu
from relaxpack.schedules.kernels.cuda.fragments import low
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

LOAD_CODES = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32"
LOAD4, LOAD2 = "ld.global.nc.v4.b32", "ld.global.nc.v2.b32"
LOAD_X4, LOAD_X2 = "ld.global.v4.b32", "ld.global.v2.b32"
# Bit patterns: a power of two whose lowest mantissa bits have weight 1 (128, 1024), and 1.0.
BASE = {"bfloat16": 0x4300, "float16": 0x6400}
ONE = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}


def twice(half: int) -> int:
    return half * 0x10001


def gemm_rows_quant(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 8,
                    strips: int = 1, warps: int = 8, unroll: int = 4, bias: bool = False, residual: bool = False,
                    swiglu: bool = False, dependent_launch: bool = False, name: str = "gemm_rows_quant"):
    """Buffers: x `[t, K]`, weight codes, scales, [minimums] as packing.py lays them out, [bias], [residual] → y. Arguments
    as in gemm_rows. Groups of 16 or 32; N and K of the packed weight are rounded up to 16 and 64 with zeros."""
    assert weight.group_size in (16, 32) and weight.bits in (4, 8) and K % 8 == 0
    STRIPS, KC = -(-N // 16), -(-K // 64)           # strips of 16 rows, chunks of 64
    STEPS, DG = (2, 1) if weight.group_size == 32 else (1, 2)    # steps of 16 per group, groups per half chunk
    NT, W, U, BITS = columns // 8, warps, unroll, weight.bits
    BM = 16 * strips
    wide = weight.group_size == 32                  # one group per half chunk, else two
    stored, f32_scales = weight.minimum == "stored", weight.scale_dtype == "float32"
    G = 4 if wide else 8                            # scales per lane and chunk: rows g, g + 8 x groups
    SW = G if f32_scales else G // 2                # the same in 32-bit registers
    rounds = -(-KC // (W * U))
    exact = K % 64 == 0 and KC % (W * U) == 0
    strips_exact = STRIPS % strips == 0
    MMA = mma_name(dtype)
    FMA = f"fma.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}x2"
    center = twice(BASE[dtype] + (8 if weight.minimum == "-8*scale" else 0)) | 0x80008000
    CW = 4 * BITS // 4                              # code registers per chunk and strip
    PITCH = BM + 4
    OUT, BO = (N // 2, BM // 2) if swiglu else (N, BM)
    THREADS = W * 32
    REG_C, REG_S, ACC = U * strips * CW, U * strips * SW, strips * NT * 4

    def scale(registers, base, h, group):
        """Scale of row g + 8h in `group` of the chunk, as float32; its registers start at `base`."""
        index = h * (G // 2) + group
        if f32_scales:
            return T.cuda.uint_as_float(registers[base + index])
        return low("float16", registers[base + index // 2] >> T.Cast("uint32", index % 2 * 16))

    @T.inline
    def load_scales(registers, base, buffer, first):
        if f32_scales:
            for e in T.unroll(SW // 4):
                T.ptx[LOAD4](registers[base + e * 4], registers[base + e * 4 + 1], registers[base + e * 4 + 2],
                             registers[base + e * 4 + 3], buffer.ptr_to([first + e * 4]))
        elif SW == 2:
            T.ptx[LOAD2](registers[base], registers[base + 1], buffer.ptr_to([first]))
        else:
            T.ptx[LOAD4](registers[base], registers[base + 1], registers[base + 2], registers[base + 3],
                         buffer.ptr_to([first]))

    def pair(c, base, j, h, p):
        """Register with codes 2p, 2p+1 of row g + 8h in half j at the bottom of each half word."""
        if BITS == 4:
            return c[base + j * 2 + h] >> T.Cast("uint32", p * 4)
        return c[base + j * 4 + h * 2 + p // 2] >> T.Cast("uint32", p % 2 * 8)

    def step(p, d):
        """Which of the two steps of 16 in a half chunk."""
        return p if wide else d

    @T.inline
    def decode(a, slot, word):
        if BITS == 4:
            T.ptx[FMA](a[slot], (word & T.uint32(0x000F000F)) | T.uint32(twice(BASE[dtype])), T.uint32(ONE[dtype]),
                       T.uint32(center))
        else:
            T.ptx[FMA](a[slot], (word & T.uint32(0x007F007F)) | T.uint32(twice(BASE[dtype])), T.uint32(ONE[dtype]),
                       (word & T.uint32(0x00800080)) | T.uint32(twice(BASE[dtype] | 0x8000)))

    @T.inline
    def store(partial, bias_buffer, residual_buffer, y, total, bx, m, column, f):
        base = T.meta_var(f // 8 * 16 + f % 8 if swiglu else f)
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for i in T.unroll(W):
            total[0] = total[0] + partial[i, column * PITCH + base]
            if swiglu:
                total[1] = total[1] + partial[i, column * PITCH + base + 8]
        if bias:
            total[0] = total[0] + bias_buffer[bx * BM + base]
            if swiglu:
                total[1] = total[1] + bias_buffer[bx * BM + base + 8]
        if swiglu:
            total[0] = silu(total[0]) * total[1]
        if residual:
            total[0] = total[0] + T.Cast("float32", residual_buffer[m, bx * BO + f])
        y[m, bx * BO + f] = T.Cast(out_dtype, total[0])

    @T.inline
    def body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t):
        T.device_entry()
        bx, by = T.cta_id([T.int32(-(-STRIPS // strips)), T.Cast("int32", T.ceildiv(t, columns))])
        wid = T.warp_id([W])
        tx = T.thread_id([THREADS])
        lane = T.meta_var(tx % 32)
        g = T.meta_var(lane // 4)
        q = T.meta_var(lane % 4)
        pool = T.SMEMPool()
        partial = pool.alloc((W, columns * PITCH), "float32", align=16)
        pool.commit()
        c = T.alloc_buffer((REG_C,), "uint32", scope="local")
        sc = T.alloc_buffer((REG_S,), "uint32", scope="local")
        mn = T.alloc_buffer((REG_S if stored else 1,), "uint32", scope="local")
        v = T.alloc_buffer((8 * NT,), "uint32", scope="local")
        a = T.alloc_buffer((8,), "uint32", scope="local")
        part = T.alloc_buffer((4,), "float32", scope="local")
        sums = T.alloc_buffer((NT * 4,), "float32", scope="local")
        acc = T.alloc_buffer((ACC,), "float32", scope="local")
        total = T.alloc_buffer((2,), "float32", scope="local")
        rows = T.meta_var(T.Cast("int32", t))
        for i in T.unroll(ACC):
            acc[i] = T.float32(0)
        for r in T.serial(rounds):
            for u in T.unroll(U):
                chunk = T.meta_var((r * U + u) * W + wid)
                for s in T.unroll(strips):
                    strip = T.meta_var(bx * strips + s)
                    o = T.meta_var((u * strips + s) * CW)
                    so = T.meta_var((u * strips + s) * SW)
                    piece = T.meta_var(strip * KC + chunk)      # which 16 x 64 piece of the weight
                    if T.bool(True) if exact and strips_exact else T.And(chunk < KC, strip < STRIPS):
                        for e in T.unroll(CW // 4):
                            T.ptx[LOAD_CODES](c[o + e * 4], c[o + e * 4 + 1], c[o + e * 4 + 2], c[o + e * 4 + 3],
                                              codes.ptr_to([piece * (CW * 32) + (e * 32 + lane) * 4]))
                        load_scales(sc, so, scales, (piece * 8 + g) * G)
                        if stored:
                            load_scales(mn, so, minimums, (piece * 8 + g) * G)
                    else:
                        for e in T.unroll(CW):
                            c[o + e] = T.uint32(0)
                        for e in T.unroll(SW):
                            sc[so + e] = T.uint32(0)
                            if stored:
                                mn[so + e] = T.uint32(0)
            if dependent_launch:
                if r == 0:
                    T.ptx["griddepcontrol.wait"]()
                    T.ptx["griddepcontrol.launch_dependents"]()
            for u in T.unroll(U):
                chunk = T.meta_var((r * U + u) * W + wid)
                for n in T.unroll(NT):
                    for j in T.unroll(2):
                        m = T.meta_var(by * columns + n * 8 + g)
                        o = T.meta_var((n * 2 + j) * 4)
                        for e in T.unroll(4):
                            v[o + e] = T.uint32(0)
                        if wide:
                            k = T.meta_var(chunk * 64 + j * 32 + q * 8)
                            if T.And(m < rows, T.bool(True) if exact else k < K):
                                T.ptx[LOAD_X4](v[o], v[o + 1], v[o + 2], v[o + 3], x.ptr_to([m, k]))
                        else:
                            for p in T.unroll(2):
                                k = T.meta_var(chunk * 64 + j * 32 + p * 16 + q * 4)
                                if T.And(m < rows, T.bool(True) if exact else k < K):
                                    T.ptx[LOAD_X2](v[o + p * 2], v[o + p * 2 + 1], x.ptr_to([m, k]))
                for j in T.unroll(2):
                    for d in T.unroll(DG):                          # groups in this half
                        if stored:                                  # sums of x over the group, by a matrix of ones
                            for n in T.unroll(NT):
                                for e in T.unroll(4):
                                    sums[n * 4 + e] = T.float32(0)
                                for p in T.unroll(STEPS):
                                    w = T.meta_var((n * 2 + j) * 4 + step(p, d) * 2)
                                    T.ptx[MMA](sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3],
                                               T.uint32(ONE[dtype]), T.uint32(ONE[dtype]), T.uint32(ONE[dtype]),
                                               T.uint32(ONE[dtype]), v[w], v[w + 1],
                                               sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3])
                        for s in T.unroll(strips):
                            o = T.meta_var((u * strips + s) * CW)
                            so = T.meta_var((u * strips + s) * SW)
                            for p in T.unroll(STEPS):
                                for e in T.unroll(4):               # e: row g + 8 * (e % 2), pair e // 2 of the step
                                    decode(a, p * 4 + e, pair(c, o, j, e % 2, step(p, d) * 2 + e // 2))
                            for n in T.unroll(NT):
                                for e in T.unroll(4):
                                    part[e] = T.float32(0)
                                for p in T.unroll(STEPS):
                                    w = T.meta_var((n * 2 + j) * 4 + step(p, d) * 2)
                                    T.ptx[MMA](part[0], part[1], part[2], part[3],
                                               a[p * 4], a[p * 4 + 1], a[p * 4 + 2], a[p * 4 + 3], v[w], v[w + 1],
                                               part[0], part[1], part[2], part[3])
                                for e in T.unroll(4):
                                    i = T.meta_var((s * NT + n) * 4 + e)
                                    acc[i] = acc[i] + part[e] * scale(sc, so, e // 2, j * DG + d)
                                    if stored:
                                        acc[i] = acc[i] + sums[n * 4 + e % 2] * scale(mn, so, e // 2, j * DG + d)
        for s in T.unroll(strips):
            for n in T.unroll(NT):
                for e in T.unroll(4):
                    partial[wid, (n * 8 + q * 2 + e % 2) * PITCH + s * 16 + e // 2 * 8 + g] = (
                        acc[(s * NT + n) * 4 + e])
        T.cuda.cta_sync()
        for i in T.serial(-(-columns * BO // THREADS)):
            item = T.meta_var(i * THREADS + tx)
            m = T.meta_var(by * columns + item // BO)
            f = T.meta_var(item % BO)
            if item < columns * BO:
                if T.And(m < rows, bx * BO + f < OUT):
                    store(partial, bias_buffer, residual_buffer, y, total, bx, m, item // BO, f)

    func = quant_entry(body, N, K, OUT, weight, dtype, out_dtype, bias, residual)
    return finish(func, name, dependent_launch, grid="xy")
