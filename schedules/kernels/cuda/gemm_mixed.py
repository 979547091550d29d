"""Hopper matmul y[t, N] = x[t, K] W[N, K]^T for 4-bit, 8-bit and fp8 weights: wgmma with the weights from registers. Codes,
scales and minimums come through a ring of TMA stages; consumers turn them into 16-bit numbers (codes_scaled.py says how
exactly) and multiply 64 weight rows by up to 256 rows of x at once, so the work per weight does not grow with the rows.

Packed weights have an order of K of their own (packing.py) in which a lane's 8 codes are neighbours, while wgmma reads x
from shared memory in its order. So x does not come by TMA: a producer warpgroup loads 64 bytes of a row per thread, of which
it makes the four 16-byte pieces that wgmma expects, and stores these into the swizzled tile. K may be cut over the `split`
blocks of a cluster as in gemm_few.py.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_scaled import CHUNKS, ScaledCodes
from relaxpack.schedules.kernels.cuda.common import SHORT, block_ids, device, finish, quant_entry
from relaxpack.schedules.kernels.cuda.gemm_few import DESC, WG_FENCE
from relaxpack.schedules.kernels.cuda.packed_tiles import PackedTiles
from relaxpack.schedules.kernels.cuda.split_epilogue import SplitEpilogue
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

WG = 128
STAGE_K = CHUNKS * 64           # values of K per stage
LOAD_X = "ld.global.v4.b32"
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 88, 208       # of two consumer warpgroups in a block that has a multiprocessor


def fits(weight: WeightFormat, columns: int, consumers: int, strips: int, blocks_per_sm: int) -> bool:
    """Whether a tile has room for two stages of shared memory and its numbers in registers."""
    rows = 64 * consumers * strips
    scales = 8 if weight.group_size == 16 else 4 if weight.scale_dtype == "float32" else 2      # words of a lane and chunk
    words = weight.bits * 64 + 16 * scales * (2 if weight.minimum == "stored" else 1)           # of 16 rows and a stage
    stage = rows // 16 * words * 4 + columns * STAGE_K * 2
    budget = 227 * 1024 if blocks_per_sm == 1 else 228 * 1024 // blocks_per_sm - 1024
    threads = (consumers + 1) * WG * blocks_per_sm
    registers = CONSUMER_REGISTERS if blocks_per_sm == 1 and consumers == 2 else min(255, 65536 // threads // 8 * 8)
    return (2 * stage + 2048 <= budget and columns * (rows + 4) * 4 + 1024 <= budget
            and strips * columns // 2 + 32 * strips + 32 <= registers)


def gemm_mixed(N: int, K: int, weight: WeightFormat, dtype: str, out_dtype: str, *, columns: int = 16, consumers: int = 2,
               strips: int = 1, split: int = 1, blocks_per_sm: int = 2, stages: int = 16, bias: bool = False,
               residual: bool = False, glu: str | None = None, dependent_launch: bool = False, convert: bool = False,
               name: str = "gemm_mixed"):
    """Buffers as in gemm_rows_quant. columns: rows of x per block (multiple of 8, at most 256); consumers: warpgroups, each
    64 * `strips` weight rows; split: blocks of a cluster along K; stages: of 128 values of K, at most what fits."""
    gated = glu is not None
    assert N % 8 == 0 and K % 8 == 0 and columns % 8 == 0 and 8 <= columns <= 256 and 1 <= split <= 8
    assert not gated or N % 16 == 0
    F = ScaledCodes(weight, dtype, convert)
    NB, NC, R, S = columns, consumers, strips, split
    BM = 64 * NC * R
    BS = BM // 16                                   # strips of 16 rows of a block
    STRIPS, KC = -(-N // 16), -(-K // 64)
    KT, GROUPS = -(-KC // CHUNKS), -(-N // BM)
    CONSUMERS = NC * WG
    THREADS = CONSUMERS + WG
    ACC = NB // 2                                   # float32 sums of a thread and 64 rows
    CW, SW = F.code_words, F.scale_words            # words of a strip and stage
    stored, whole_row = F.stored, F.whole_row
    SCALES = max(SW, 4)
    stage_bytes = BS * (CW + SCALES * (2 if stored else 1)) * 4 + NB * STAGE_K * 2
    budget = 227 * 1024 if blocks_per_sm == 1 else 228 * 1024 // blocks_per_sm - 1024
    ring = min((budget - 2048) // stage_bytes, stages, max(-(-KT // S), 2))
    E = SplitEpilogue(dtype, out_dtype, out_features=N // 2 if gated else N, rows=BM, columns=NB, split=S, threads=THREADS,
                      clustered=S > 1, bias=bias, residual=residual, glu=glu)
    PITCH, end = E.pitch, E.finish
    assert ring >= 2 and NB * PITCH * 4 + 1024 <= budget, "the tile does not fit"
    MMA = f"wgmma.mma_async.sync.aligned.m64n{NB}k16.f32.{SHORT[dtype]}.{SHORT[dtype]}"
    tiles = PackedTiles(F, STRIPS, KC, BS)
    map_codes, map_scales, load_weights = tiles.map_codes, tiles.map_scales, tiles.load
    TASKS = NB * 2 * CHUNKS                         # 64-byte pieces of x per stage
    REPEAT = -(-TASKS // WG)
    DEPTH = 4 if TASKS < WG or (REPEAT == 1 and blocks_per_sm == 1) else 2      # pieces of x that a thread has under way
    exact = K % STAGE_K == 0
    wide = F.codes.wide
    shift_registers = blocks_per_sm == 1 and NC == 2 and R * ACC >= 64
    groups = F.groups
    load_codes, make_scales, decode = F.load, F.scales, F.decode

    def accumulators(c, r):
        return [c[r * ACC + i] for i in range(ACC)]

    @T.inline
    def body(x, codes, scales, minimums, bias_buffer, residual_buffer, y, t):
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
            ids = T.meta_var(block_ids(GROUPS * T.Cast("int32", T.ceildiv(t, NB)), S))
            wid = T.warp_id([THREADS // 32])
            tx = T.thread_id([THREADS])
            lane = T.meta_var(tx % 32)
            part = T.meta_var(ids[1])
            tile = T.meta_var(ids[0] % GROUPS)
            first_row = T.meta_var(ids[0] // GROUPS * NB)
            rows = T.meta_var(T.Cast("int32", t))
            start = T.meta_var(part * KT // S)
            pool = T.SMEMPool()
            full = pool.alloc((ring,), "uint64", align=8)
            empty = pool.alloc((ring,), "uint64", align=8)
            Xs = pool.alloc((ring, NB * STAGE_K), dtype, align=1024)
            Cs = pool.alloc((ring, BS * CW), "uint32", align=128)
            Ss = pool.alloc((ring, BS * SCALES), "uint32", align=128)
            Ms = pool.alloc((ring, BS * SCALES if stored else 4), "uint32", align=128)
            pool.move_base_to(1024)         # the partial sums reuse the ring when nothing reads it any more
            partial = pool.alloc((NB * PITCH,), "float32", align=16)
            pool.commit()
            count: T.int32
            count = (part + 1) * KT // S - start
            if tx == 0:
                for s in T.unroll(ring):
                    T.ptx.mbarrier.init.shared.b64(full.ptr_to([s]), T.uint32(WG + 1))
                    T.ptx.mbarrier.init.shared.b64(empty.ptr_to([s]), T.uint32(NC * 4))
                T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.cta_sync()

            if wid >= NC * 4:
                if shift_registers:
                    T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS)
                v = T.alloc_buffer((DEPTH * 16,), "uint32", scope="local")
                px = T.meta_var(tx - CONSUMERS)

                @T.inline
                def load_x(f, slot):
                    """Piece f of this thread (REPEAT pieces a stage) into registers: 32 values of K of one row."""
                    task = T.meta_var(f % REPEAT * WG + px)
                    m = T.meta_var(first_row + task % NB)
                    k = T.meta_var((start + f // REPEAT) * STAGE_K + task // NB * 32)
                    for e in T.unroll(4):
                        if T.And(T.And(m < rows, T.bool(True) if TASKS % WG == 0 else task < TASKS),
                                 T.bool(True) if exact else k + e * 8 < K):
                            T.ptx[LOAD_X](v[slot * 16 + e * 4], v[slot * 16 + e * 4 + 1], v[slot * 16 + e * 4 + 2],
                                          v[slot * 16 + e * 4 + 3], x.ptr_to([m, k + e * 8]))
                        else:
                            for i in T.unroll(4):
                                v[slot * 16 + e * 4 + i] = T.uint32(0)

                @T.inline
                def store_x(f, stage, slot):
                    """Its four 16-byte pieces of wgmma's order into the swizzled tile of the stage."""
                    task = T.meta_var(f % REPEAT * WG + px)
                    row = T.meta_var(task % NB)
                    half = T.meta_var(task // NB)               # of a stage: chunk half // 2
                    if T.bool(True) if TASKS % WG == 0 else task < TASKS:
                        for e in T.unroll(4):
                            first = T.meta_var(slot * 16 + (e if wide else e // 2 * 8 + e % 2))
                            step = T.meta_var(4 if wide else 2)
                            T.ptx["st.shared.v4.b32"](
                                Xs.ptr_to([stage, half // 2 * (NB * 64) + row * 64 + ((half % 2 * 4 + e) ^ (row % 8)) * 8]),
                                v[first], v[first + step], v[first + 2 * step], v[first + 3 * step])

                if px == 0:
                    for i in T.serial(T.min(count, ring)):      # weights do not depend on the kernel before
                        load_weights(i, start + i, tile, full, maps, Cs, Ss, Ms)
                if dependent_launch:
                    T.ptx["griddepcontrol.wait"]()
                    T.ptx["griddepcontrol.launch_dependents"]()
                for d in T.unroll(DEPTH):
                    if d < count * REPEAT:
                        load_x(d, d)
                for b in T.serial(T.ceildiv(count * REPEAT, DEPTH)):
                    for d in T.unroll(DEPTH):
                        f = T.meta_var(b * DEPTH + d)
                        i = T.meta_var(f // REPEAT)
                        if f < count * REPEAT:
                            if T.And(i >= ring, f % REPEAT == 0):
                                T.cuda.mbarrier_wait(empty.ptr_to([i % ring]), i // ring % 2 ^ 1)
                                if px == 0:
                                    load_weights(i % ring, start + i, tile, full, maps, Cs, Ss, Ms)
                            store_x(f, i % ring, d)
                            if f % REPEAT == REPEAT - 1:
                                T.ptx.fence.proxy.async_.shared__cta()
                                T.ptx.mbarrier.arrive.shared.b64(full.ptr_to([i % ring]))
                            if f + DEPTH < count * REPEAT:
                                load_x(f + DEPTH, d)
                T.ptx["bar.sync"](T.uint32(1), T.uint32(THREADS))       # that of the consumers below
            else:
                if shift_registers:
                    T.ptx["setmaxnreg.inc.sync.aligned.u32"](CONSUMER_REGISTERS)
                sums = T.alloc_buffer((R * ACC,), "float32", scope="local")
                a = T.alloc_buffer((2 * R * 16 + 1,), "uint32", scope="local")
                c = T.alloc_buffer((weight.bits,), "uint32", scope="local")
                sc = T.alloc_buffer((F.lane_words,), "uint32", scope="local")
                mn = T.alloc_buffer((F.lane_words,), "uint32", scope="local")
                upper = T.alloc_buffer((2 * groups,), "uint32", scope="local")
                lower = T.alloc_buffer((2 * groups,), "uint32", scope="local")
                least = T.alloc_buffer((2 * groups,), "uint32", scope="local")
                f = T.alloc_buffer((2,), "float32", scope="local")
                inputs: T.uint64
                stage: T.int32
                phase: T.int32
                previous: T.int32
                inputs = T.uint64(DESC) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(Xs.ptr_to([0, 0])) >> T.uint32(4))
                if dependent_launch:
                    T.ptx["griddepcontrol.wait"]()
                for i in T.unroll(R * ACC):
                    sums[i] = T.float32(0.0)
                for i in T.unroll(R * ACC):
                    T.cuda.func_call("wg_fence", sums[i], source_code=WG_FENCE)
                stage = 0
                phase = 0
                previous = 0
                for i in T.serial(count):
                    T.cuda.mbarrier_wait(full.ptr_to([stage]), phase)
                    for u in T.unroll(CHUNKS):
                        for r in T.unroll(R):
                            strip = T.meta_var((wid // 4 * R + r) * 4 + wid % 4)
                            load_codes(c, 0, sc, mn, 0, Cs, Ss, Ms, stage, BS, strip, u, lane)
                            if not whole_row:
                                make_scales(upper, lower, least, f, sc, mn)
                            decode(a, (u * R + r) * 16, 2 * R * 16, c, upper, lower, least)
                        T.ptx.wgmma.fence.sync.aligned()
                        for k in T.unroll(4):
                            for r in T.unroll(R):
                                o = T.meta_var((u * R + r) * 16 + k * 4)
                                T.ptx[MMA](*accumulators(sums, r), a[o], a[o + 1], a[o + 2], a[o + 3],
                                           inputs + T.Cast("uint64", stage * (NB * STAGE_K * 2 // 16)
                                                           + u * (NB * 64 * 2 // 16) + k * 2),
                                           T.bool(True), 1, 1, 0)
                        T.ptx.wgmma.commit_group.sync.aligned()
                        T.ptx.wgmma.wait_group.sync.aligned(1)
                        if u == 0:                      # the stage before is multiplied
                            T.ptx.mbarrier.arrive.shared.b64(empty.ptr_to([previous]), pred=T.And(i > 0, lane == 0))
                    previous = stage
                    stage = stage + 1
                    if stage == ring:
                        stage = 0
                        phase = phase ^ 1
                T.ptx.wgmma.wait_group.sync.aligned(0)
                for i in T.unroll(R * ACC):
                    T.cuda.func_call("wg_fence", sums[i], source_code=WG_FENCE)
                # The ring is done with. Of all threads: racecheck loses track of a barrier of a part of them.
                T.ptx["bar.sync"](T.uint32(1), T.uint32(THREADS))
                for r in T.unroll(R):
                    strip = T.meta_var((wid // 4 * R + r) * 4 + wid % 4)
                    if whole_row:
                        for h in T.unroll(2):
                            f[h] = T.float32(0)
                            if tile * BS + strip < STRIPS:
                                f[h] = scales[((tile * BS + strip) * 8 + lane // 4) * 2 + h]
                    for i in T.unroll(ACC):
                        partial[(i // 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + strip * 16 + i % 4 // 2 * 8 + lane // 4] = (
                            sums[r * ACC + i] * f[i % 4 // 2] if whole_row else sums[r * ACC + i])
            end(partial, bias_buffer, residual_buffer, y, tile, part, 0, first_row, rows, tx)

    func = quant_entry(body, N, K, N // 2 if gated else N, weight, dtype, out_dtype, bias, residual)
    return finish(func, name, dependent_launch, S)
