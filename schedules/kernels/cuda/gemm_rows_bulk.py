"""Few-row matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit, 8-bit and fp8 weights on Hopper: the sums of gemm_rows_quant.py
(exact codes on mma.m16n8k16, scales applied to the float32 sums of each group), but the weights come to shared memory by
bulk copies instead of into registers. A warp asks for several pieces of its share of K ahead, before the kernel ahead of
this one is complete, and many blocks fit on a multiprocessor: that many bytes in flight is what reaches the bandwidth.

Every warp has stages and barriers of its own, so warps meet only to add their sums.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_fp8 import codes_of
from relaxpack.schedules.kernels.cuda.common import finish, quant_entry
from relaxpack.schedules.kernels.cuda.rows_epilogue import RowsEpilogue
from relaxpack.schedules.kernels.cuda.rows_product import RowsProduct
from relaxpack.weight_format import WHOLE_ROW, WeightFormat
from tvm.script import tirx as T

BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
EVICT_FIRST = 0x12F0000000000000
SHARED4, SHARED2 = "ld.shared.v4.b32", "ld.shared.v2.b32"


def gemm_rows_bulk(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 8, warps: int = 8,
                   unroll: int = 4, stages: int = 2, blocks_per_sm: int = 3, bias: bool = False, residual: bool = False,
                   glu: str | None = None, norm_epsilon: float | None = None, prepares_norm: bool = False,
                   dependent_launch: bool = False, convert: bool = False, name: str = "gemm_rows_bulk"):
    """Buffers as in gemm_rows_quant. A block has 16 weight rows; unroll: chunks of 64 values that a warp copies and
    multiplies together (even); stages: such groups under way per warp; blocks_per_sm bounds the registers."""
    assert K % 8 == 0 and columns % 8 == 0 and unroll % 2 == 0
    STRIPS, KC = -(-N // 16), -(-K // 64)
    F = codes_of(weight, dtype, KC, convert)
    NT, W, U = columns // 8, warps, unroll
    PIECES = -(-KC // U)                            # groups of chunks in K, the last may be short
    rounds = -(-PIECES // W)
    D = min(stages, rounds)
    exact = K % (64 * U) == 0 and PIECES % W == 0
    E = RowsEpilogue(N, K, dtype, out_dtype, columns=columns, strips=1, warps=warps, bias=bias, residual=residual, glu=glu,
                     norm_epsilon=norm_epsilon, prepares_norm=prepares_norm)
    PITCH, prefetch, request, scale, store = E.pitch, E.prefetch, E.request, E.scale, E.store
    long_groups, whole_row = weight.long_groups, weight.group_size == WHOLE_ROW
    CW = weight.bits * 32                           # words of codes of a chunk, then of scales of a group of chunks
    LANE = F.scale_words
    SW = 0 if whole_row else U // 2 * 16 if long_groups else U * 8 * LANE
    ROW_SCALES = 0 if whole_row else -(-KC // 2) * 16 if long_groups else KC * 8 * LANE      # of a strip in memory, in words
    PER_CHUNK = 8 if long_groups else 8 * LANE             # words of scales of a chunk (long groups: of two chunks, 16)
    stored, f32 = F.stored, F.f32
    P = RowsProduct(F, NT, dtype, K, exact)
    load_share, add_x, product = P.load_x, P.add_x, P.multiply
    SIZE = 4 if f32 else 2                          # bytes of a scale

    @T.inline
    def body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t, norm=None):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": blocks_per_sm})
        bx, by = T.cta_id([T.int32(STRIPS), T.Cast("int32", T.ceildiv(t, columns))])
        wid = T.warp_id([W])
        tx = T.thread_id([W * 32])
        lane = T.meta_var(tx % 32)
        g = T.meta_var(lane // 4)
        q = T.meta_var(lane % 4)
        pool = T.SMEMPool()
        full = pool.alloc((W * D,), "uint64", align=8)
        partial = pool.alloc((W, columns * PITCH), "float32", align=16)
        Cs = pool.alloc((W * D, U * CW), "uint32", align=128)
        Ss = pool.alloc((W * D, max(SW, 4)), "uint32", align=128)
        Ms = pool.alloc((W * D, SW if stored else 4), "uint32", align=128)
        scales_of_rows = T.meta_var(E.alloc_scales(pool))
        pool.commit()
        held = T.alloc_buffer((E.held,), "uint32", scope="local")
        squares = T.alloc_buffer((E.squares,), "uint32", scope="local")
        c = T.alloc_buffer((F.words,), "uint32", scope="local")
        sc = T.alloc_buffer((LANE,), "uint32", scope="local")
        mn = T.alloc_buffer((LANE if stored else 1,), "uint32", scope="local")
        v = T.alloc_buffer((8 * NT * U,), "uint32", scope="local")
        a = T.alloc_buffer((9,), "uint32", scope="local")
        part = T.alloc_buffer((4,), "float32", scope="local")
        sums = T.alloc_buffer((NT * 4,), "float32", scope="local")
        acc = T.alloc_buffer((NT * 4,), "float32", scope="local")
        total = T.alloc_buffer((3,), "float32", scope="local")
        rows = T.meta_var(T.Cast("int32", t))

        @T.inline
        def copy(r):
            """One lane: codes, scales and minimums of round r into its stage."""
            piece = T.meta_var(r * W + wid)
            slot = T.meta_var(wid * D + r % D)
            first = T.meta_var(piece * U)
            chunks = T.meta_var(U if KC % U == 0 else T.min(KC - first, U))
            words = T.meta_var((chunks + 1) // 2 * 16 if long_groups else chunks * PER_CHUNK)
            place = T.meta_var(bx * ROW_SCALES + (first // 2 * 16 if long_groups else first * PER_CHUNK))     # in words
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(full.ptr_to([slot]), T.Cast("uint32", chunks * (CW * 4)) + (
                T.uint32(0) if whole_row else T.Cast("uint32", words * (8 if stored else 4))))
            T.ptx[BULK](Cs.ptr_to([slot, 0]), codes.ptr_to([(bx * KC + first) * CW]), T.Cast("uint32", chunks * (CW * 4)),
                        full.ptr_to([slot]), T.uint64(EVICT_FIRST))
            if not whole_row:
                T.ptx[BULK](Ss.ptr_to([slot, 0]), scales.ptr_to([place * (4 // SIZE)]), T.Cast("uint32", words * 4),
                            full.ptr_to([slot]), T.uint64(EVICT_FIRST))
            if stored:
                T.ptx[BULK](Ms.ptr_to([slot, 0]), minimums.ptr_to([place * (4 // SIZE)]), T.Cast("uint32", words * 4),
                            full.ptr_to([slot]), T.uint64(EVICT_FIRST))

        @T.inline
        def load_x(r):
            for u in T.unroll(U):
                chunk = T.meta_var((r * W + wid) * U + u)
                load_share(v, x, u, chunk, by * columns, rows, g, q, True)

        @T.inline
        def load_scales(registers, buffer, slot, u):
            first = T.meta_var(u // 2 * 16 + g * 2 if long_groups else u * PER_CHUNK + g * LANE)
            if LANE == 2:
                T.ptx[SHARED2](registers[0], registers[1], buffer.ptr_to([slot, first]))
            else:
                for e in T.unroll(LANE // 4):
                    T.ptx[SHARED4](registers[e * 4], registers[e * 4 + 1], registers[e * 4 + 2], registers[e * 4 + 3],
                                   buffer.ptr_to([slot, first + e * 4]))

        @T.inline
        def multiply(slot, u):
            for e in T.unroll(F.words // 4):
                T.ptx[SHARED4](c[e * 4], c[e * 4 + 1], c[e * 4 + 2], c[e * 4 + 3],
                               Cs.ptr_to([slot, u * CW + F.place(lane, e)]))
            if not whole_row:
                load_scales(sc, Ss, slot, u)
            if stored:
                load_scales(mn, Ms, slot, u)
            for j in T.unroll(2):
                for d in T.unroll(F.groups):
                    add_x(sums, v, u, j, d)
                    product(acc, 0, part, a, sums, c, 0, sc, mn, 0, v, u, j, d)

        if lane == 0:
            for d in T.unroll(D):
                T.ptx.mbarrier.init.shared.b64(full.ptr_to([wid * D + d]), T.uint32(1))
            T.ptx.fence.proxy.async_.shared__cta()
            for d in T.unroll(D):                   # weights do not depend on the kernel before
                if T.bool(True) if exact else d * W + wid < PIECES:
                    copy(d)
        T.cuda.warp_sync()
        if whole_row:
            for h in T.unroll(2):
                sc[h] = T.cuda.float_as_uint(scales[(bx * 8 + g) * 2 + h])
        prefetch(held, norm, bx, tx)
        if dependent_launch:
            T.ptx["griddepcontrol.launch_dependents"]()      # it waits for this kernel, which ends after its own wait
            T.ptx["griddepcontrol.wait"]()
        request(held, residual_buffer, bx, by, tx, rows)
        scale(scales_of_rows, squares, total, norm, by, tx, wid, rows)
        for i in T.unroll(NT * 4):
            acc[i] = T.float32(0)
        for r in T.serial(rounds):
            if T.bool(True) if exact else r * W + wid < PIECES:
                load_x(r)
                T.cuda.mbarrier_wait(full.ptr_to([wid * D + r % D]), r // D % 2)
                for u in T.unroll(U):
                    if T.bool(True) if KC % U == 0 else (r * W + wid) * U + u < KC:
                        multiply(wid * D + r % D, u)
                if D < rounds:
                    T.cuda.warp_sync()
                    if T.And(lane == 0, T.And(r + D < rounds, T.bool(True) if exact else (r + D) * W + wid < PIECES)):
                        copy(r + D)
        for n in T.unroll(NT):
            for e in T.unroll(4):
                partial[wid, (n * 8 + q * 2 + e % 2) * PITCH + e // 2 * 8 + g] = acc[n * 4 + e]
        T.cuda.cta_sync()
        store(partial, scales_of_rows, bias_buffer, held, y, norm, total, bx, by, tx, rows)

    func = quant_entry(body, N, K, E.outputs, weight, dtype, out_dtype, bias, residual, norm_epsilon, prepares_norm)
    return finish(func, name, dependent_launch, grid="xy")
