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
from relaxpack.schedules.kernels.cuda.common import device, elected, linear_func
from relaxpack.schedules.kernels.cuda.gemm_few import DESC
from relaxpack.schedules.kernels.cuda.many_epilogue import bias_of, gate_of
from relaxpack.schedules.kernels.cuda.many_exchange import exchange_of, meet
from relaxpack.schedules.kernels.cuda.many_operands import (
    DESCRIPTOR,
    TMA_LOAD,
    E4M3Operands,
    FloatOperands,
    RowScales,
    e4m3_func,
)
from relaxpack.schedules.kernels.cuda.many_product import ManyProduct, fence
from relaxpack.schedules.kernels.cuda.many_residual import FetchedResidual, RingResidual
from relaxpack.schedules.kernels.cuda.many_store import store_of
from relaxpack.schedules.kernels.cuda.many_tile import BK, BM, BOX_SWIZZLE, CONSUMERS, WG, ManyTile
from tvm.script import tirx as T


def many_body(N: int, K: int, dtype: str, out_dtype: str, *, tile_n: int = 256, cluster: int = 1, split: int = 1,
              skew: int = 0, group_m: int = 8, blocks: int = 132, bias: bool = False, residual: bool = False,
              glu: str | None = None, dependent_launch: bool = False, e4m3: bool = False, promote: int = 0,
              whole_store: bool = False):
    """Buffers as in gemm_rows. tile_n: columns of a tile, at most 256; group_m: row tiles that are walked together to keep
    their x in L2; blocks: grid size, one block per multiprocessor (with `split` there is a cluster for every tile).
    e4m3: x and weight are pairs of codes and scales (many_operands.py), `dtype` is the residual's; promote: after how many
    k tiles the tensor cores' sums are added in float32, 0: at the end. whole_store: a tile goes through shared memory at
    once, which leaves less for the ring."""
    BN, CL, P, gated = tile_n, cluster, split, glu is not None
    assert CL in (1, 2) and blocks % CL == 0 and (P == 1 or CL == 1) and not (e4m3 and CL > 1)
    assert not promote or e4m3
    operands = E4M3Operands(N, K, BN) if e4m3 else FloatOperands(N, K, dtype, BN, CL)
    sizes = ManyTile(N, K, values=operands.values, tile_n=BN, split=P, gated=gated, whole_store=whole_store,
                     tma_store=out_dtype == dtype and N // (2 if gated else 1) % 8 == 0)
    VALUES, KT, NT, S = operands.values, sizes.k_tiles, sizes.tiles, sizes.stages
    GATES, OUT, WIDTH, STRIDE = sizes.gates, sizes.out_features, sizes.width, sizes.stride
    BO, EB, ACC = sizes.outputs, sizes.box, sizes.sums
    tma_store, staging_shape, parts_shape = sizes.tma_store, sizes.staging_shape, sizes.parts_shape
    UPPER, LOWER = operands.weights >> 32, operands.weights & 0xFFFFFFFF
    encode, load_weights_of = operands.encode, operands.load_weights
    S_COLUMNS = -(-WIDTH // 4) * 4 if e4m3 else 4
    scales = RowScales(operands, WIDTH) if e4m3 else None
    HELD = scales.held + 2 if e4m3 else 1
    fetch_scales, put_scales, apply_scales = (scales.fetch, scales.put, scales.apply) if e4m3 else (None, None, None)
    skew = 0 if P > 1 else min(skew, S - 2, KT - 1)
    clustered, divided, promoted = CL > 1, P > 1, promote > 0
    FITTING = max(operands.rows - BN, 0)            # the last column where a whole tile begins
    full_n = operands.rows == N >= BN
    by_ring = residual and tma_store and not divided        # how the residual comes: through the ring, or
    direct = residual and not by_ring                       # by the threads that add it
    words_shape = (sizes.own_sums // 2 if divided else 2,)
    product, ring, fetched = ManyProduct(sizes, operands, promote), RingResidual(sizes, dtype), FetchedResidual(sizes, dtype)
    multiply, multiply_apart, APART_SUMS = product.multiply, product.multiply_apart, product.apart_sums
    encode_residual, load_residual, add_residual = ring.encode, ring.load, ring.add
    fetch_residual, add_fetched = fetched.fetch, fetched.add
    add_bias, multiply_gate, exchange = bias_of(sizes, N, full_n), gate_of(sizes, glu), exchange_of(sizes)
    store = store_of(sizes, dtype, out_dtype, full_n, e4m3)

    def block_ids(tiles):
        if divided:
            return T.cluster_id([tiles]), T.cta_id_in_cluster([P])
        if clustered:
            return T.cluster_id([blocks // CL]), T.cta_id_in_cluster([CL])
        return T.cta_id([blocks]), 0

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
            encode_residual(r_map, residual_buffer, t)
        stored_by = T.meta_var(y_map if tma_store else None)
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

                if T.And(wid == CONSUMERS * 4, elected()):
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
                            load_residual(As, Bs, full, empty, stage, phase, r_map, loaded, row0, column0, advance)
                        tile = tile + step
                if divided:
                    for _ in T.unroll(2):
                        meet()
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
                first_column = T.meta_var(column0 // GATES + part * (STRIDE // GATES))
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
                def request_residual():
                    if direct:
                        for i in T.unroll(BO // 8):
                            fetch_residual(words, residual_buffer, i, i * 2, row0, first_column, rows, wid, lane)

                if dependent_launch:
                    T.ptx["griddepcontrol.wait"]()
                if skew > 0:
                    if T.And(wg == 1, tile < total):
                        T.ptx["bar.sync"](T.uint32(3), T.uint32(CONSUMERS * WG))
                while tile < total:
                    locate()
                    if e4m3:
                        fetch_scales(held, x, weight, row0, column0 + part * STRIDE, tx, rows)
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
                            multiply_apart(c, apart, kt, count, stage, previous, inputs, weights, release)
                        else:
                            multiply(c, 0, T.bool(True), stage, inputs, weights)
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
                        exchange(c, parts, extra, peer, part, tx, request_residual)
                    if e4m3:
                        apply_scales(c, held, of_columns, extra, tx)
                    if bias:
                        add_bias(c, bias_buffer, column0 + part * STRIDE, lane)
                    if gated:
                        multiply_gate(c, extra)
                    if by_ring:
                        add_residual(c, word, As, Bs, full, stage, phase, wid, lane, release, advance)
                    if direct:
                        for i in T.unroll(BO // 8):
                            if not divided:
                                fetch_residual(words, residual_buffer, i, 0, row0, first_column, rows, wid, lane)
                            add_fetched(c, words, i, i * 2 if divided else 0)
                    store(c, word, staging, stored_by, y, row0, first_column, rows, wid, tx, lane)
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
