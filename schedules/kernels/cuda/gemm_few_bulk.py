"""Matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit, 8-bit and fp8 weights and 9 rows or more, up to 64 a block, on Hopper: the
sums of gemm_rows_quant.py (exact codes on mma.m16n8k16, scales applied to the float32 sums of each group; stored minimums as
minimums_product.py says), but a producer warp brings weights and x by TMA through one ring of stages, so neither waits for
products and x is read once per block. One thread takes 60 to 70 cycles for each copy it asks for; up to three warps, the
`feeders`, share that.

The warps of a block are `groups` times `warps`: a group takes every groups-th stage of K, its warps own `strips` blocks of
16 weight rows each. Barriers are per stage, so a warp meets others only at the end, where groups, and the `split` blocks of
a cluster along K, add their sums in a fixed order. How lanes read the swizzled x: see gemm_few_quant.py.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_fp8 import codes_of
from relaxpack.schedules.kernels.cuda.codes_scaled import CHUNKS, SHARED2, SHARED4, ScaledCodes
from relaxpack.schedules.kernels.cuda.common import block_ids, device, finish, mma_name, quant_entry
from relaxpack.schedules.kernels.cuda.gemm_few import EVICT_LAST, SW128, TMA_LOAD
from relaxpack.schedules.kernels.cuda.minimums_product import MinimumsProduct
from relaxpack.schedules.kernels.cuda.packed_tiles import PackedTiles
from relaxpack.schedules.kernels.cuda.rows_product import RowsProduct
from relaxpack.schedules.kernels.cuda.split_epilogue import SplitEpilogue
from relaxpack.weight_format import WHOLE_ROW, WeightFormat
from tvm.script import tirx as T

U = CHUNKS                      # chunks of 64 values of K per stage
TMA_LOAD_3D = TMA_LOAD.replace("2d", "3d")


def stage_bytes(weight: WeightFormat, columns: int, strips: int) -> int:
    """Shared memory of a stage of `strips` strips in all and `columns` rows of x, rounded up."""
    scales = 8 if weight.group_size == 16 else 4 if weight.scale_dtype == "float32" else 2      # words of a lane and chunk
    words = 0 if weight.group_size == WHOLE_ROW else 16 if weight.long_groups else U * 8 * scales
    scale_bytes = -(-strips * words // 32) * 128
    return strips * U * weight.bits * 128 + scale_bytes * (2 if weight.minimum == "stored" else 1) + columns * U * 64 * 2


def stages_that_fit(weight: WeightFormat, columns: int, warps: int, strips: int, groups: int, blocks_per_sm: int) -> int:
    """Stages that the shared memory of a block has room for, none where its partial sums have none."""
    budget = 227 * 1024 if blocks_per_sm == 1 else 228 * 1024 // blocks_per_sm - 1024
    sums = groups * columns * (16 * warps * strips + 4) * 4
    return (budget - 2048) // stage_bytes(weight, columns, warps * strips) if sums + 1024 <= budget else 0


def most_feeders(weight: WeightFormat) -> int:
    """Warps that can share the copies of a stage: codes, scales with minimums, where a stage has any, and x."""
    return 2 if weight.group_size == WHOLE_ROW else 3


def gemm_few_bulk(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 16, warps: int = 2,
                  strips: int = 2, groups: int = 4, split: int = 1, stages: int = 48, blocks_per_sm: int = 1,
                  scaled: bool = False, feeders: int = 1, bias: bool = False, residual: bool = False, glu: str | None = None,
                  dependent_launch: bool = False, convert: bool = False, name: str = "gemm_few_bulk"):
    """Buffers as in gemm_rows_quant. columns: rows of x per block (multiple of 8); stages: of 128 values of K under way, at
    most what fits `blocks_per_sm` blocks; feeders: 1, 2 (one for weights, one for x) or 3 (codes, scales with minimums, x);
    the other options are explained above."""
    gated = glu is not None
    assert N % 8 == 0 and K % 8 == 0 and columns % 8 == 0 and columns <= 256 and 1 <= split <= 8
    assert (not gated or N % 16 == 0) and 1 <= feeders <= most_feeders(weight)
    STRIPS, KC = -(-N // 16), -(-K // 64)
    F = codes_of(weight, dtype, KC, convert)
    NB, NT, W, R, G, S = columns, columns // 8, warps, strips, groups, split
    BS, BM = W * R, W * R * 16                      # strips and weight rows of a block
    KT, TILES = -(-KC // U), -(-STRIPS // BS)
    THREADS = (W * G + feeders) * 32
    shared_feed, whole_box = feeders > 1, feeders > 1 and K % 64 == 0      # x of a stage in one box
    Q = ScaledCodes(weight, dtype, convert)
    whole_row, stored, LANE, CW, SW = Q.whole_row, Q.stored, Q.lane_words, Q.code_words, Q.scale_words
    SCALES = -(-BS * SW // 32) * 32 or 1            # of a stage: every TMA box begins at a multiple of 128 bytes
    assert BS <= 256
    X_BYTES = NB * U * 64 * 2
    tiles = PackedTiles(Q, STRIPS, KC, BS, 0 if shared_feed else X_BYTES)
    map_codes, map_scales = tiles.map_codes, tiles.map_scales
    load_all_weights = tiles.load
    # A stage belongs to one group: of another one's phases a group could not tell the last but one from the next.
    D = min(stages_that_fit(weight, columns, warps, strips, groups, blocks_per_sm), stages, max(-(-KT // S), G)) // G * G
    E = SplitEpilogue(dtype, out_dtype, out_features=N // 2 if gated else N, rows=BM, columns=NB, split=S, threads=THREADS,
                      clustered=S > 1, bias=bias, residual=residual, glu=glu, groups=G)
    PITCH, end = E.pitch, E.finish
    assert D >= G, "the tile does not fit"
    apart = stored and not scaled
    product, wide = RowsProduct(F, NT, dtype, K, True, apart).multiply, F.wide
    M = MinimumsProduct(F, NT, dtype) if apart else None
    words, MMA = F.words, mma_name(dtype)
    load_codes, make_scales, decode = Q.load, Q.scales, Q.decode

    @T.inline
    def body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t):
        x_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if whole_box:
            T.call_packed("runtime.cuTensorMapEncodeTiled", x_map, dtype, 3, x.data,
                          64, t, KC, K * 2, 128, 64, NB, U, 1, 1, 1, 0, SW128, 3, 0)
        else:
            T.call_packed("runtime.cuTensorMapEncodeTiled", x_map, dtype, 2, x.data,
                          K, t, K * 2, 64, NB, 1, 1, 0, SW128, 3, 0)
        c_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        map_codes(c_map, codes)
        if not whole_row:
            s_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            map_scales(s_map, scales)
        if stored:
            m_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            map_scales(m_map, minimums)
        maps = T.meta_var([c_map, None if whole_row else s_map, m_map if stored else None])
        with device():
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": blocks_per_sm})
            ids = T.meta_var(block_ids(TILES * T.Cast("int32", T.ceildiv(t, NB)), S))
            wid = T.warp_id([W * G + feeders])
            tx = T.thread_id([THREADS])
            lane = T.meta_var(tx % 32)
            g = T.meta_var(lane // 4)
            q = T.meta_var(lane % 4)
            part = T.meta_var(ids[1])
            tile = T.meta_var(ids[0] % TILES)
            first_row = T.meta_var(ids[0] // TILES * NB)
            rows = T.meta_var(T.Cast("int32", t))
            start = T.meta_var(part * KT // S)
            pool = T.SMEMPool()
            full = pool.alloc((D,), "uint64", align=8)
            empty = pool.alloc((D,), "uint64", align=8)
            Xs = pool.alloc((D, U * NB * 64), dtype, align=1024)
            Cs = pool.alloc((D, BS * CW), "uint32", align=128)
            Ss = pool.alloc((D, SCALES), "uint32", align=128)
            Ms = pool.alloc((D, SCALES if stored else 1), "uint32", align=128)
            pool.move_base_to(1024)         # the partial sums reuse the ring when nothing reads it any more
            partial = pool.alloc((G * NB * PITCH,), "float32", align=16)
            pool.commit()
            count: T.int32
            count = (part + 1) * KT // S - start
            if tx == 0:
                for s in T.unroll(D):
                    T.ptx.mbarrier.init.shared.b64(full.ptr_to([s]), T.uint32(feeders))
                    T.ptx.mbarrier.init.shared.b64(empty.ptr_to([s]), T.uint32(W))
                T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()

            @T.inline
            def load_x(slot, stage):
                if shared_feed:
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(full.ptr_to([slot]), T.uint32(X_BYTES))
                if whole_box:
                    T.ptx[TMA_LOAD_3D](Xs.ptr_to([slot, 0]), T.address_of(x_map), 0, first_row, stage * U,
                                       full.ptr_to([slot]), T.uint64(EVICT_LAST))
                else:
                    for u in T.unroll(U):
                        T.ptx[TMA_LOAD](Xs.ptr_to([slot, u * (NB * 64)]), T.address_of(x_map), (stage * U + u) * 64,
                                        first_row, full.ptr_to([slot]), T.uint64(EVICT_LAST))

            @T.inline
            def begin(load):
                for i in T.serial(T.min(count, D)):
                    load(i, start + i)

            @T.inline
            def go_on(load):
                for j in T.serial(T.max(count - D, 0)):
                    T.cuda.mbarrier_wait(empty.ptr_to([j % D]), j // D % 2)
                    load(j % D, start + j + D)

            @T.inline
            def load_weights(slot, stage):
                load_all_weights(slot, stage, tile, full, maps, Cs, Ss, Ms)

            @T.inline
            def load_codes_alone(slot, stage):
                tiles.load_codes(slot, stage, tile, full, maps, Cs, Ss, Ms)

            @T.inline
            def load_scales_alone(slot, stage):
                tiles.load_scales(slot, stage, tile, full, maps, Cs, Ss, Ms)

            @T.inline
            def load_both(slot, stage):
                load_weights(slot, stage)
                load_x(slot, stage)

            @T.inline
            def wait_for_x():
                if dependent_launch:
                    T.ptx["griddepcontrol.launch_dependents"]()
                    T.ptx["griddepcontrol.wait"]()

            if wid == W * G if feeders == 1 else wid >= W * G:
                if lane == 0:
                    if feeders == 1:
                        begin(load_weights)                     # weights do not depend on the kernel before
                        wait_for_x()
                        begin(load_x)
                        go_on(load_both)
                    elif wid == W * G + feeders - 1:
                        wait_for_x()
                        begin(load_x)
                        go_on(load_x)
                    elif feeders == 2:
                        begin(load_weights)
                        go_on(load_weights)
                    elif wid == W * G:
                        begin(load_codes_alone)
                        go_on(load_codes_alone)
                    else:
                        begin(load_scales_alone)
                        go_on(load_scales_alone)
                T.cuda.warp_sync()
                T.ptx["bar.sync"](T.uint32(1), T.uint32(THREADS))
            else:
                wn = T.meta_var(wid % W)
                kg = T.meta_var(wid // W)
                c = T.alloc_buffer((R * words,), "uint32", scope="local")
                sc = T.alloc_buffer((R * LANE,), "uint32", scope="local")
                mn = T.meta_var(None if apart else T.alloc_buffer((R * LANE if stored else 1,), "uint32", scope="local"))
                v = T.alloc_buffer((8 * NT,), "uint32", scope="local")
                a = T.alloc_buffer((R * 16 + 1 if scaled else 9,), "uint32", scope="local")
                upper = T.alloc_buffer((2 * Q.groups,), "uint32", scope="local")
                lower = T.alloc_buffer((2 * Q.groups,), "uint32", scope="local")
                least = T.alloc_buffer((2 * Q.groups,), "uint32", scope="local")
                f = T.alloc_buffer((4 if apart else 2,), "float32", scope="local")
                piece = T.alloc_buffer((4,), "float32", scope="local")
                sums = T.alloc_buffer((NT * 4,), "float32", scope="local")
                keep = T.meta_var(T.alloc_buffer((1,), "uint32", scope="local") if apart else None)
                split = T.meta_var(T.alloc_buffer((2 * NT,), "uint32", scope="local") if apart else None)
                m = T.meta_var(T.alloc_buffer((4,), "uint32", scope="local") if apart else None)
                acc = T.alloc_buffer((R * NT * 4,), "float32", scope="local")
                stage: T.int32
                phase: T.int32

                @T.inline
                def load_rows(u, j):
                    """Lane (g, q)'s x of half a chunk; column g of a tile is row g // 2 + 4 (g % 2)."""
                    for n in T.unroll(NT):
                        row = T.meta_var(n * 8 + g // 2 + g % 2 * 4)
                        o = T.meta_var((n * 2 + j) * 4)
                        if wide:
                            T.ptx[SHARED4](v[o], v[o + 1], v[o + 2], v[o + 3], Xs.ptr_to(
                                [stage, u * (NB * 64) + row * 64 + ((j * 4 + q) ^ (row % 8)) * 8]))
                        else:
                            for p in T.unroll(2):
                                T.ptx[SHARED2](v[o + p * 2], v[o + p * 2 + 1], Xs.ptr_to(
                                    [stage, u * (NB * 64) + row * 64 + ((j * 4 + p * 2 + q // 2) ^ (row % 8)) * 8
                                     + q % 2 * 4]))

                @T.inline
                def add_products(j):
                    for p in T.unroll(2):
                        for r in T.unroll(R):
                            o = T.meta_var(r * 16 + (j * 2 + p) * 4)
                            for n in T.unroll(NT):
                                i = T.meta_var((r * NT + n) * 4)
                                w = T.meta_var((n * 2 + j) * 4 + p * 2)
                                T.ptx[MMA](acc[i], acc[i + 1], acc[i + 2], acc[i + 3], a[o], a[o + 1], a[o + 2], a[o + 3],
                                           v[w], v[w + 1], acc[i], acc[i + 1], acc[i + 2], acc[i + 3])

                if dependent_launch:
                    T.ptx["griddepcontrol.wait"]()
                @T.inline
                def load_row_scales():
                    for r in T.unroll(R):
                        for h in T.unroll(2):
                            sc[r * 2 + h] = T.uint32(0)
                            if tile * BS + wn * R + r < STRIPS:
                                sc[r * 2 + h] = T.cuda.float_as_uint(scales[((tile * BS + wn * R + r) * 8 + g) * 2 + h])
                if whole_row and not scaled:
                    load_row_scales()
                for i in T.unroll(R * NT * 4):
                    acc[i] = T.float32(0)
                stage = kg
                phase = 0
                for i in T.serial(T.ceildiv(T.max(count - kg, 0), G)):
                    T.cuda.mbarrier_wait(full.ptr_to([stage]), phase)
                    if apart:
                        M.clear(sums)
                    for u in T.serial(U):                   # unrolled, 64 rows need more registers than there are
                        for r in T.unroll(R):
                            if scaled:
                                load_codes(c, 0, sc, mn, 0, Cs, Ss, Ms, stage, BS, wn * R + r, u, lane)
                                if not whole_row:
                                    make_scales(upper, lower, least, f, sc, mn)
                                decode(a, r * 16, R * 16, c, upper, lower, least)
                            else:
                                load_codes(c, r * words, sc, mn, r * LANE, Cs, Ss, Ms, stage, BS, wn * R + r, u, lane)
                        for j in T.unroll(2):
                            load_rows(u, j)
                            if scaled:
                                add_products(j)
                            else:
                                for d in T.unroll(F.groups):
                                    if apart:
                                        M.add_x(sums, keep, v, u, j, g)
                                    for r in T.unroll(R):
                                        product(acc, r, piece, a, sums, c, r * words, sc, mn, r * LANE, v, 0, j, d)
                    if apart:
                        M.halve_sums(split, sums)
                        for r in T.unroll(R):
                            M.add(acc, r, f, m, split, Ss, Ms, stage, wn * R + r, g, q)
                    T.cuda.warp_sync()
                    T.ptx.mbarrier.arrive.shared.b64(empty.ptr_to([stage]), pred=lane == 0)
                    stage = stage + G
                    if stage >= D:
                        stage = stage - D
                        phase = phase ^ 1
                T.ptx["bar.sync"](T.uint32(1), T.uint32(THREADS))           # every warp is done with the ring
                if whole_row and scaled:
                    load_row_scales()
                for r in T.unroll(R):
                    for n in T.unroll(NT):
                        for e in T.unroll(4):       # e: row g + 8 (e // 2); column 2 q + e % 2 is row q + 4 (e % 2) of x
                            partial[(kg * NB + n * 8 + q + e % 2 * 4) * PITCH + (wn * R + r) * 16 + e // 2 * 8 + g] = (
                                acc[(r * NT + n) * 4 + e] * T.cuda.uint_as_float(sc[r * 2 + e // 2]) if scaled and whole_row
                                else acc[(r * NT + n) * 4 + e])
            end(partial, bias_buffer, residual_buffer, y, tile, part, 0, first_row, rows, tx)

    func = quant_entry(body, N, K, N // 2 if gated else N, weight, dtype, out_dtype, bias, residual)
    return finish(func, name, dependent_launch, S)
