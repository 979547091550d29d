"""Hopper matmul for many rows: y[t, N] = x[t, K] W[N, K]^T, warp-specialised and persistent. 384 threads: warpgroups 0
and 1 multiply (64 rows of the tile each, wgmma m64nBNk16 from shared memory), one thread of warpgroup 2 issues TMA loads
into a ring of stages. The epilogue (bias, residual, gate) works on the accumulators in registers and leaves through
stmatrix and TMA stores, which clip at the edges, so any t and any N that is a multiple of 8 is right. Tiles
do not reach over the edges of x and the weight, where TMA is slow: the last ones begin earlier and compute some rows or
columns again, to the same bits.

With `cluster` 2, two blocks of neighbouring row tiles share the weight tile by TMA multicast. With `split`, where tiles
alone would not fill the chip, the blocks of a cluster share one tile and cut K: each sends the others their columns of
its partial sums through distributed shared memory, adds in a fixed order and stores its own columns. With `skew` the
second warpgroup starts that many stages late, so that one multiplies while the other is in its epilogue.
The residual of a tile travels through the ring behind its last k tile, so that it is there when the sums are.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import device, linear_func
from relaxpack.schedules.kernels.cuda.fragments import EXP2, LDMATRIX, LOG2_E, high, low, pack
from relaxpack.schedules.kernels.cuda.gemm_few import DESC, SW128, WG_FENCE
from relaxpack.schedules.kernels.cuda.many_operands import (
    BM,
    DESCRIPTOR,
    TMA_LOAD,
    WG,
    E4M3Operands,
    FloatOperands,
    RowScales,
    e4m3_func,
)
from tvm.script import tirx as T

BOX_SWIZZLE = {64: SW128, 32: 2, 16: 1}         # columns of a store box → swizzle of its rows of 128, 64 or 32 bytes
BK, CONSUMERS = 64, 2           # a k tile is 128 bytes of a row, as many as 64 numbers of 16 bits
TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
ARRIVE, WAIT = "barrier.cluster.arrive.release", "barrier.cluster.wait.acquire"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"
GELU = 2 * (2 / 3.141592653589793) ** 0.5 * LOG2_E
SHARED_LIMIT = 227 * 1024


def many_body(N: int, K: int, dtype: str, out_dtype: str, *, tile_n: int = 256, cluster: int = 1, split: int = 1,
              skew: int = 0, group_m: int = 8, blocks: int = 132, bias: bool = False, residual: bool = False,
              glu: str | None = None, dependent_launch: bool = False, e4m3: bool = False, promote: int = 0,
              whole_store: bool = False):
    """Buffers as in gemm_rows. tile_n: columns of a tile, at most 256; group_m: row tiles that are walked together to keep
    their x in L2; blocks: grid size, one block per multiprocessor (with `split` there is a cluster for every tile).
    e4m3: x and weight are pairs of codes and scales (many_operands.py), `dtype` is the residual's; promote: after how many
    k tiles the tensor cores' sums are added in float32, 0: at the end. whole_store: a tile goes through shared memory at
    once, which leaves less for the ring."""
    BN, CL, P = tile_n, cluster, split
    gated = glu is not None
    GATES = 2 if gated else 1
    OUT = N // GATES
    WIDTH = BN // P                                 # columns that one block brings to their end
    BO = WIDTH // 2 if gated else WIDTH            # its output columns
    assert N % 8 == 0 and K % 8 == 0 and BN <= 256 and CL in (1, 2) and blocks % CL == 0 and 1 <= P <= 8
    assert BO * P == BN // GATES and BO % 16 == 0 and (not gated or N % 16 == 0) and (P == 1 or CL == 1)
    ACC, ACC_OUT = 64 * BN // WG, 64 * WIDTH // WG  # float32 sums of a thread: of the tile, of its block's columns
    tma_store = out_dtype == dtype and OUT % 8 == 0
    EB = next(columns for columns in BOX_SWIZZLE if BO % columns == 0)      # columns of one TMA store
    whole_store &= tma_store
    BOXES_WG = BO // EB if whole_store else 2       # store boxes of a warpgroup
    epilogue_bytes = CONSUMERS * BOXES_WG * 64 * EB * 2 if tma_store else 0
    stage_bytes = (BM + BN) * BK * 2
    operands = E4M3Operands(N, K, BN) if e4m3 else FloatOperands(N, K, dtype, BN, CL)
    VALUES = operands.values
    KT, NT = -(-K // VALUES), -(-N // BN)
    S = min((SHARED_LIMIT - epilogue_bytes - 2048) // stage_bytes, max(-(-KT // P), 2))
    PIECES = 2 if promote and ACC > 96 else 1       # parts of the tile that are promoted one after the other
    APART, promoted = ACC // PIECES, promote > 0    # sums of a part
    APART_SUMS = APART if promoted else 1
    MMA, TAIL, weights_at = operands.mma(BN // PIECES), operands.tail, operands.at
    UPPER, LOWER = operands.weights >> 32, operands.weights & 0xFFFFFFFF
    encode, load_weights_of = operands.encode, operands.load_weights
    assert not e4m3 or CL == 1
    assert not promote or (e4m3 and BN % (16 * PIECES) == 0 and (PIECES == 1 or promote == 1))
    S_COLUMNS = -(-WIDTH // 4) * 4 if e4m3 else 4
    scales = RowScales(operands, WIDTH) if e4m3 else None
    HELD = scales.held + 2 if e4m3 else 1
    fetch_scales, put_scales, apply_scales = (scales.fetch, scales.put, scales.apply) if e4m3 else (None, None, None)
    PACK = pack(dtype)
    A16, B16 = BM * BK * 2 // 16, BN * BK * 2 // 16  # stage strides in descriptor units
    skew = 0 if P > 1 else min(skew, S - 2, KT - 1)
    clustered, divided = CL > 1, P > 1
    FITTING = max(operands.rows - BN, 0)            # the last column where a whole tile begins
    full_n = operands.rows == N >= BN
    by_ring = residual and tma_store and not divided        # how the residual comes: through the ring, or
    direct = residual and not by_ring                       # by the threads that add it
    BOX, BOXES = BM * EB, BO // EB                          # elements of one residual box, boxes of a tile
    IN_A, IN_STAGE = BM * BK // BOX, BM * BK // BOX + BN * BK // BOX        # boxes that fit the x part of a stage, the stage
    RT = -(-BOXES // IN_STAGE) if by_ring else 0            # stages that carry the residual
    words_shape = (ACC_OUT // 2 if divided else 2,)
    staging_shape = (CONSUMERS * BOXES_WG, 64 * EB) if tma_store else (1, 16)
    parts_shape = ((P - 1) * ACC_OUT // 4 * CONSUMERS * WG * 4,) if divided else (4,)
    assert parts_shape[0] * 4 <= S * stage_bytes

    def block_ids(tiles):
        if divided:
            return T.cluster_id([tiles]), T.cta_id_in_cluster([P])
        if clustered:
            return T.cluster_id([blocks // CL]), T.cta_id_in_cluster([CL])
        return T.cta_id([blocks]), 0

    def gate_exponent(gate):
        """log2 of exp(-gate), or for "geglu" of exp(-2 y) with y = sqrt(2 / pi) (gate + 0.044715 gate^3)."""
        if glu == "swiglu":
            return gate * T.float32(-LOG2_E)
        return gate * (gate * gate * T.float32(-0.044715 * GELU) - T.float32(GELU))

    def accumulators(c):
        return [c[i] for i in range(APART)]

    def swizzle(chunk, lane):                       # 16-byte chunk of row lane % 16 of a store box
        return chunk ^ {64: lane % 8, 32: lane // 2 % 4, 16: lane // 4 % 2}[EB]

    @T.inline
    def body(x, weight, bias_buffer, residual_buffer, y, t):
        x_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        w_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        encode(x_map, w_map, x, weight, t)
        if tma_store:
            y_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            T.call_packed("runtime.cuTensorMapEncodeTiled", y_map, dtype, 2, y.data,
                          OUT, t, OUT * 2, EB, 64, 1, 1, 0, BOX_SWIZZLE[EB], 0, 0)
        if by_ring:
            r_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            T.call_packed("runtime.cuTensorMapEncodeTiled", r_map, dtype, 2, residual_buffer.data,
                          OUT, t, OUT * 2, EB, T.min(t, BM), 1, 1, 0, BOX_SWIZZLE[EB], 2, 0)
        with device():
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            m_tiles = T.meta_var(T.Cast("int32", T.ceildiv(t, BM * CL)))        # row tiles of one cluster
            ids = T.meta_var(block_ids(m_tiles * NT))
            wid = T.warp_id([12])
            tx = T.thread_id([384])
            pool = T.SMEMPool()
            As = pool.alloc((S, BM * BK), dtype, align=1024)
            Bs = pool.alloc((S, BN * BK), dtype, align=1024)
            staging = pool.alloc(staging_shape, dtype, align=1024)
            full = pool.alloc((S,), "uint64", align=8)
            empty = pool.alloc((S,), "uint64", align=8)
            of_columns = pool.alloc((CONSUMERS, S_COLUMNS), "float32", align=16)
            pool.move_base_to(0)            # partial sums from other blocks, when nothing reads the ring any more
            parts = pool.alloc(parts_shape, "float32", align=1024)
            pool.commit()
            if tx == 0:
                for s in T.unroll(S):
                    T.ptx.mbarrier.init.shared.b64(full.ptr_to([s]), T.uint32(1))
                    T.ptx.mbarrier.init.shared.b64(empty.ptr_to([s]), T.uint32(CONSUMERS * 4 * CL))
                T.ptx.fence.proxy.async_.shared__cta()
                if clustered:
                    T.ptx["fence.mbarrier_init.release.cluster"]()
            if clustered:
                T.cuda.cluster_sync()
            else:
                T.cuda.cta_sync()

            rows = T.meta_var(T.Cast("int32", t))
            loaded = T.meta_var(T.min(rows, BM))                    # rows of x, and of the residual, in a tile
            total = m_tiles * NT
            part = T.meta_var(ids[1] if divided else 0)             # which piece of K, and of the tile's columns
            start = T.meta_var(part * KT // P)
            count = T.meta_var((part + 1) * KT // P - start)
            stage: T.int32
            phase: T.int32
            tile: T.int32
            tm: T.int32
            tn: T.int32
            row0: T.int32               # where the tile begins
            column0: T.int32
            first: T.int32
            together: T.int32
            stage = 0
            phase = 0
            tile = ids[0]
            step = T.meta_var(total if divided else blocks // CL)

            @T.inline
            def locate():
                first = tile // (group_m * NT) * group_m
                together = T.min(m_tiles - first, group_m)
                tm = first + tile % (group_m * NT) % together
                tn = tile % (group_m * NT) // together
                if clustered:
                    tm = tm * CL + ids[1]
                row0 = T.min(tm * BM, rows - loaded)
                column0 = T.min(tn * BN, FITTING)

            @T.inline
            def advance():
                stage = stage + 1
                if stage == S:
                    stage = 0
                    phase = phase ^ 1

            if wid >= CONSUMERS * 4:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](40)
                early: T.int32              # stages of the first tile that were asked for ahead of the loop
                early = 0

                @T.inline
                def load_x(slot, kt):
                    T.ptx[TMA_LOAD](As.ptr_to([slot, 0]), T.address_of(x_map), kt * VALUES, row0, full.ptr_to([slot]))

                @T.inline
                def load_weights(slot, kt):
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(
                        full.ptr_to([slot]), T.Cast("uint32", loaded * (BK * 2) + BN * BK * 2))
                    load_weights_of(Bs, slot, w_map, kt, column0, ids[1], full)

                @T.inline
                def load_residual():
                    for r in T.unroll(RT):
                        T.cuda.mbarrier_wait(empty.ptr_to([stage]), phase ^ 1)
                        boxes = T.meta_var(T.min(BOXES - r * IN_STAGE, IN_STAGE))
                        T.ptx.mbarrier.arrive.expect_tx.shared.b64(full.ptr_to([stage]),
                                                                   T.Cast("uint32", boxes * (loaded * EB * 2)))
                        for m in T.unroll(IN_STAGE):
                            column = T.meta_var(column0 // GATES + (r * IN_STAGE + m) * EB)
                            if r * IN_STAGE + m < BOXES:
                                if m < IN_A:
                                    T.ptx[TMA_LOAD](As.ptr_to([stage, m * BOX]), T.address_of(r_map), column, row0,
                                                    full.ptr_to([stage]))
                                else:
                                    T.ptx[TMA_LOAD](Bs.ptr_to([stage, (m - IN_A) * BOX]), T.address_of(r_map), column,
                                                    row0, full.ptr_to([stage]))
                        advance()

                if tx == CONSUMERS * WG:
                    if dependent_launch:
                        if tile < total:    # weights do not depend on the kernel before
                            locate()
                            early = T.min(count, T.int32(S))
                            for i in T.serial(early):
                                load_weights(i, start + i)
                        T.ptx["griddepcontrol.wait"]()
                        T.ptx["griddepcontrol.launch_dependents"]()
                        for i in T.serial(early):
                            load_x(i, start + i)
                    while tile < total:
                        locate()
                        for kt in T.serial(count, unroll=False):
                            if early > 0:
                                early = early - 1
                            else:
                                T.cuda.mbarrier_wait(empty.ptr_to([stage]), phase ^ 1)
                                load_weights(stage, start + kt)
                                load_x(stage, start + kt)
                            advance()
                        if by_ring:
                            load_residual()
                        tile = tile + step
                if divided:
                    for _ in T.unroll(2):
                        T.ptx[ARRIVE]()
                        T.ptx[WAIT]()
            else:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](232)
                c = T.alloc_buffer((ACC,), "float32", scope="local")
                apart = T.alloc_buffer((APART_SUMS,), "float32", scope="local")
                held = T.alloc_buffer((HELD,), "float32", scope="local")
                extra = T.alloc_buffer((4,), "float32", scope="local")
                word = T.alloc_buffer((4,), "uint32", scope="local")
                words = T.alloc_buffer(words_shape, "uint32", scope="local")
                wg = T.meta_var(wid // 4)
                lane = T.meta_var(tx % 32)
                first_column = T.meta_var(column0 // GATES + part * BO)
                peer: T.uint32              # clustered: empty[0] in block `lane` of the cluster; divided: a block's parts
                if clustered:
                    T.ptx["mapa.shared::cluster.u32"](peer, T.cuda.cvta_generic_to_shared(empty.ptr_to([0])),
                                                      T.Cast("uint32", lane % CL))
                inputs: T.uint64
                weights: T.uint64
                previous: T.int32
                inputs = T.uint64(DESC) + T.Cast("uint64", (T.cuda.cvta_generic_to_shared(
                    As.ptr_to([0, 0])) >> T.uint32(4)) + T.Cast("uint32", wg * (64 * BK * 2 // 16)))
                weights = T.cuda.func_call("descriptor", T.uint32(UPPER), T.uint32(LOWER), source_code=DESCRIPTOR,
                                           return_type="uint64") + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
                    Bs.ptr_to([0, 0])) >> T.uint32(4))

                @T.inline
                def release(slot, condition):
                    if clustered:
                        T.ptx.mbarrier.arrive.shared__cluster.b64(
                            peer + T.Cast("uint32", slot * 8), pred=T.And(condition, lane < CL))
                    else:
                        T.ptx.mbarrier.arrive.shared.b64(empty.ptr_to([slot]), pred=T.And(condition, lane == 0))

                @T.inline
                def fence(sums, size):
                    for i in T.unroll(size):
                        T.cuda.func_call("wg_fence", sums[i], source_code=WG_FENCE)

                @T.inline
                def multiply(sums, first, add):
                    """This stage into the sums of the columns from `first` on; not `add`: over what is there."""
                    T.ptx.wgmma.fence.sync.aligned()
                    for k in T.unroll(BK // 16):
                        T.ptx[MMA](*accumulators(sums),
                                   inputs + T.Cast("uint64", stage * A16 + k * 2),
                                   weights + T.Cast("uint64", stage * B16 + weights_at(k, first)),
                                   T.Or(k > 0, add) if promoted else T.bool(True), *TAIL)
                    T.ptx.wgmma.commit_group.sync.aligned()

                @T.inline
                def add_apart(first):
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                    fence(apart, APART)
                    for i in T.unroll(APART):
                        c[first + i] = c[first + i] + apart[i]

                @T.inline
                def multiply_apart(kt):
                    """This stage into sums of their own, which are added after `promote` stages and at the end."""
                    if promote == 1:
                        for piece in T.unroll(PIECES):
                            multiply(apart, piece * (BN // PIECES), T.bool(False))
                            add_apart(piece * APART)
                        release(stage, T.bool(True))
                    else:
                        multiply(apart, 0, kt % promote > 0)
                        if T.Or(kt % promote == promote - 1, kt == count - 1):
                            add_apart(0)
                            release(previous, kt % promote > 0)
                            release(stage, T.bool(True))
                        else:
                            T.ptx.wgmma.wait_group.sync.aligned(1)
                            release(previous, kt % promote > 0)

                @T.inline
                def add_bias():
                    for i in T.unroll(ACC_OUT // 4):
                        n = T.meta_var(column0 + part * WIDTH + i * 8 + lane % 4 * 2)
                        if T.bool(True) if full_n else n < N:
                            for e in T.unroll(4):
                                c[i * 4 + e] = c[i * 4 + e] + bias_buffer[n + e % 2]

                @T.inline
                def multiply_gate():
                    """gate / (1 + 2^exponent) * up, two with one reciprocal: half of an epilogue is waiting for ex2, rcp.
                    The bound keeps the product of both denominators finite; the gate is below 1e-16 there."""
                    for i in T.unroll(ACC_OUT // 8):
                        for h in T.unroll(2):
                            o = T.meta_var(i * 8 + h * 2)
                            for e in T.unroll(2):
                                T.ptx[EXP2](extra[e], T.min(gate_exponent(c[o + e]), T.float32(60)))
                                extra[e] = extra[e] + T.float32(1)
                            T.ptx["rcp.approx.ftz.f32"](extra[2], extra[0] * extra[1])
                            for e in T.unroll(2):
                                c[i * 4 + h * 2 + e] = c[o + e] * c[o + 4 + e] * (extra[2] * extra[1 - e])

                @T.inline
                def add_residual_of_ring():
                    for r in T.unroll(RT):
                        T.cuda.mbarrier_wait(full.ptr_to([stage]), phase)
                        for m in T.unroll(IN_STAGE):
                            if r * IN_STAGE + m < BOXES:
                                for j in T.unroll(EB // 16):
                                    at = T.meta_var((wid * 16 + lane % 16) * EB + swizzle(j * 2 + lane // 16, lane) * 8)
                                    o = T.meta_var((r * IN_STAGE + m) * (EB // 2) + j * 8)
                                    if m < IN_A:
                                        T.ptx[LDMATRIX](word[0], word[1], word[2], word[3],
                                                        As.ptr_to([stage, m * BOX + at]))
                                    else:
                                        T.ptx[LDMATRIX](word[0], word[1], word[2], word[3],
                                                        Bs.ptr_to([stage, (m - IN_A) * BOX + at]))
                                    for e in T.unroll(4):
                                        c[o + e * 2] = c[o + e * 2] + low(dtype, word[e])
                                        c[o + e * 2 + 1] = c[o + e * 2 + 1] + high(dtype, word[e])
                        release(stage, T.bool(True))
                        advance()

                @T.inline
                def fetch_residual(i, at):
                    """8 columns from 8 * i of this block's part of the tile, to two `words`."""
                    for h in T.unroll(2):
                        row = T.meta_var(row0 + wid * 16 + lane // 4 + h * 8)
                        n = T.meta_var(first_column + i * 8 + lane % 4 * 2)
                        if T.And(row < rows, n < OUT):
                            T.ptx["ld.global.b32"](words[at + h], residual_buffer.ptr_to([row, n]))

                @T.inline
                def add_fetched(i, at):
                    for h in T.unroll(2):
                        o = T.meta_var(i * 4 + h * 2)
                        c[o] = c[o] + low(dtype, words[at + h])
                        c[o + 1] = c[o + 1] + high(dtype, words[at + h])

                @T.inline
                def exchange():
                    """Columns of this block, summed over the cluster, in c[0 .. ACC_OUT - 1]."""
                    T.ptx[ARRIVE]()         # every block of the cluster is done with its ring
                    T.ptx[WAIT]()
                    for p in T.unroll(P):
                        T.ptx["mapa.shared::cluster.u32"](peer, T.cuda.cvta_generic_to_shared(parts.ptr_to([0])),
                                                          T.uint32(p))
                        if part != p:
                            for i in T.unroll(ACC_OUT // 4):
                                o = T.meta_var(p * ACC_OUT + i * 4)
                                slot = T.meta_var((part - T.if_then_else(part > p, 1, 0)) * (ACC_OUT // 4) + i)
                                T.ptx["st.shared::cluster.v4.f32"](
                                    peer + T.Cast("uint32", (slot * CONSUMERS * WG + tx) * 16),
                                    c[o], c[o + 1], c[o + 2], c[o + 3])
                    for p in T.unroll(1, P):
                        if part == p:
                            for i in T.unroll(ACC_OUT):
                                c[i] = c[p * ACC_OUT + i]
                    if direct:
                        for i in T.unroll(BO // 8):
                            fetch_residual(i, i * 2)
                    T.ptx[ARRIVE]()
                    T.ptx[WAIT]()
                    for i in T.unroll((P - 1) * ACC_OUT // 4):
                        o = T.meta_var(i * 4 % ACC_OUT)
                        T.ptx["ld.shared.v4.f32"](extra[0], extra[1], extra[2], extra[3],
                                                  parts.ptr_to([(i * CONSUMERS * WG + tx) * 4]))
                        for e in T.unroll(4):
                            c[o + e] = c[o + e] + extra[e]

                @T.inline
                def store_boxes():
                    for b in T.unroll(BO // EB):
                        box = T.meta_var(wg * 2 + b % 2)
                        if tx % WG == 0:
                            T.ptx["cp.async.bulk.wait_group.read"](T.min(b, 1))
                        T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
                        for j in T.unroll(EB // 16):
                            row = T.meta_var(wid % 4 * 16 + lane % 16)
                            chunk = T.meta_var(swizzle(j * 2 + lane // 16, lane))
                            o = T.meta_var(b * (EB // 2) + j * 8)
                            for e in T.unroll(4):
                                T.ptx[PACK](word[e], c[o + e * 2 + 1], c[o + e * 2])
                            T.ptx[STMATRIX](staging.ptr_to([box, row * EB + chunk * 8]), word[0], word[1], word[2], word[3])
                        T.ptx.fence.proxy.async_.shared__cta()
                        T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
                        if tx % WG == 0:
                            T.ptx[TMA_STORE](T.address_of(y_map), first_column + b * EB, row0 + wg * 64,
                                             staging.ptr_to([box, 0]))
                            T.ptx["cp.async.bulk.commit_group"]()

                @T.inline
                def store_whole():
                    if tx % WG == 0:
                        T.ptx["cp.async.bulk.wait_group.read"](0)
                    T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
                    for b in T.unroll(BO // EB):
                        for j in T.unroll(EB // 16):
                            row = T.meta_var(wid % 4 * 16 + lane % 16)
                            o = T.meta_var(b * (EB // 2) + j * 8)
                            for e in T.unroll(4):
                                T.ptx[PACK](word[e], c[o + e * 2 + 1], c[o + e * 2])
                            at = T.meta_var(row * EB + swizzle(j * 2 + lane // 16, lane) * 8)
                            T.ptx[STMATRIX](staging.ptr_to([wg * BOXES_WG + b, at]), word[0], word[1], word[2], word[3])
                    T.ptx.fence.proxy.async_.shared__cta()
                    T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
                    if tx % WG == 0:
                        for b in T.unroll(BO // EB):
                            T.ptx[TMA_STORE](T.address_of(y_map), first_column + b * EB, row0 + wg * 64,
                                             staging.ptr_to([wg * BOXES_WG + b, 0]))
                        T.ptx["cp.async.bulk.commit_group"]()

                @T.inline
                def store_direct():
                    if e4m3:
                        T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))   # nobody reads the scales any more
                    for h in T.unroll(2):
                        row = T.meta_var(row0 + wid * 16 + lane // 4 + h * 8)
                        if row < rows:
                            for i in T.unroll(BO // 8):
                                for e in T.unroll(2):
                                    n = T.meta_var(first_column + i * 8 + lane % 4 * 2 + e)
                                    if T.bool(True) if full_n else n < OUT:
                                        y[row, n] = T.Cast(out_dtype, c[i * 4 + h * 2 + e])

                if dependent_launch:
                    T.ptx["griddepcontrol.wait"]()
                if skew > 0:
                    if T.And(wg == 1, tile < total):
                        T.ptx["bar.sync"](T.uint32(3), T.uint32(CONSUMERS * WG))
                while tile < total:
                    locate()
                    if e4m3:
                        fetch_scales(held, x, weight, row0, column0, part, tx, rows)
                    for i in T.unroll(ACC):
                        c[i] = T.float32(0.0)
                    if not promoted:
                        fence(c, ACC)
                    previous = stage
                    for kt in T.serial(count, unroll=False):
                        T.cuda.mbarrier_wait(full.ptr_to([stage]), phase)
                        if skew > 0:
                            if T.And(kt == skew, T.And(wg == 0, tile == ids[0])):
                                T.ptx["bar.arrive"](T.uint32(3), T.uint32(CONSUMERS * WG))
                        if promoted:
                            multiply_apart(kt)
                        else:
                            multiply(c, 0, T.bool(True))
                            T.ptx.wgmma.wait_group.sync.aligned(1)
                            release(previous, kt > 0)
                        previous = stage
                        advance()
                    if e4m3:
                        put_scales(held, of_columns, tx)
                    if not promoted:
                        T.ptx.wgmma.wait_group.sync.aligned(0)
                        fence(c, ACC)
                        release(previous, T.bool(True))
                    if divided:
                        exchange()
                    if e4m3:
                        apply_scales(c, held, of_columns, extra, tx)
                    if bias:
                        add_bias()
                    if gated:
                        multiply_gate()
                    if by_ring:
                        add_residual_of_ring()
                    if direct:
                        for i in T.unroll(BO // 8):
                            if not divided:
                                fetch_residual(i, 0)
                            add_fetched(i, i * 2 if divided else 0)
                    if whole_store:
                        store_whole()
                    elif tma_store:
                        store_boxes()
                    else:
                        store_direct()
                    tile = tile + step
                if tma_store:
                    if tx % WG == 0:
                        T.ptx["cp.async.bulk.wait_group"](0)
            if clustered:                   # no block may leave while its peer still writes to it
                T.ptx["barrier.cluster.arrive"]()
                T.ptx["barrier.cluster.wait"]()

    return body


def gemm_many(N: int, K: int, dtype: str, out_dtype: str, *, name: str = "gemm_many", **options):
    """PrimFunc around many_body, which documents the options."""
    body = many_body(N, K, dtype, out_dtype, **options)
    cluster = max(options.pop("cluster", 1), options.get("split", 1))
    finished = e4m3_func if options.get("e4m3") else linear_func
    return finished(body, N, K, dtype, out_dtype, name, cluster=cluster, **options)
