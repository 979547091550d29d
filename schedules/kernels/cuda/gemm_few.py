"""Hopper matmul for a few rows (2 to about 128): y[t, N] = x[t, K] W[N, K]^T, weights read once at memory speed.

The weights are the M side of wgmma (64 rows a warpgroup), the activation rows its N side, so 8 rows cost 8 columns. One
producer thread streams weights and activations through a ring of TMA stages that fills the shared memory; that many
bytes in flight is what reaches the bandwidth. Where N alone gives too few blocks, the `split` blocks of a cluster share
one strip of weight rows and cut K; their partial sums are added through distributed shared memory in a fixed order, so
the result does not depend on timing and no workspace or counter is needed.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import SHORT, entry, finish, silu
from tvm.script import tirx as T

BK = 64                        # values of K per stage: one 128-byte swizzle row
SW128 = 3                      # swizzle of the tensor maps and matrix descriptors
DESC = (1 << 62) | (64 << 32) | (1 << 16)       # K-major, 128-byte swizzle, 8-row groups 1024 bytes apart
TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
WG_FENCE = """
__device__ __forceinline__ void wg_fence(float& r) { asm volatile("" : "+f"(r) :: "memory"); }
"""


def gemm_few(N: int, K: int, dtype: str, out_dtype: str, *, columns: int = 16, consumers: int = 1, split: int = 1,
             blocks_per_sm: int = 2, bias: bool = False, residual: bool = False, swiglu: bool = False,
             dependent_launch: bool = False, name: str = "gemm_few"):
    """Buffers as in gemm_rows. columns: rows of x per block (multiple of 8, at most 256); consumers: warpgroups, each 64
    weight rows; split: blocks of a cluster along K (1 to 8)."""
    assert K % 8 == 0 and columns % 8 == 0 and 8 <= columns <= 256 and (not swiglu or N % 16 == 0)
    BM, NB, NC, S = 64 * consumers, columns, consumers, split
    THREADS = NC * 128 + 32
    ACC = NB // 2                                   # float32 accumulators per thread
    PITCH = BM + 4
    KT, TILES = -(-K // BK), -(-N // BM)
    stage_bytes = (BM + NB) * BK * 2
    budget = 227 * 1024 if blocks_per_sm == 1 else 228 * 1024 // blocks_per_sm - 1024
    stages = min((budget - NB * PITCH * 4 - 1280) // stage_bytes, -(-KT // S))
    assert stages >= 2, "the tile does not fit"
    MMA = f"wgmma.mma_async.sync.aligned.m64n{NB}k16.f32.{SHORT[dtype]}.{SHORT[dtype]}"
    OUT = N // 2 if swiglu else N
    BO = BM // 2 if swiglu else BM
    clustered = S > 1

    def accumulators(c):
        return [c[i] for i in range(ACC)]

    def block_ids(blocks):
        if clustered:
            return T.cluster_id([blocks]), T.cta_id_in_cluster([S])
        return T.cta_id([blocks]), 0

    @T.inline
    def store(partial, peers, bias_buffer, residual_buffer, y, value, tile, m, column, f):
        base = T.meta_var(f // 8 * 16 + f % 8 if swiglu else f)
        value[0] = T.float32(0)
        value[1] = T.float32(0)
        for i in T.unroll(S):
            if clustered:
                T.ptx["ld.shared::cluster.f32"](
                    value[2], peers[i] + T.Cast("uint32", (column * PITCH + base) * 4))
                value[0] = value[0] + value[2]
                if swiglu:
                    T.ptx["ld.shared::cluster.f32"](
                        value[2], peers[i] + T.Cast("uint32", (column * PITCH + base + 8) * 4))
                    value[1] = value[1] + value[2]
            else:
                value[0] = value[0] + partial[column * PITCH + base]
                if swiglu:
                    value[1] = value[1] + partial[column * PITCH + base + 8]
        if bias:
            value[0] = value[0] + bias_buffer[tile * BM + base]
            if swiglu:
                value[1] = value[1] + bias_buffer[tile * BM + base + 8]
        if swiglu:
            value[0] = silu(value[0]) * value[1]
        if residual:
            value[0] = value[0] + T.Cast("float32", residual_buffer[m, tile * BO + f])
        y[m, tile * BO + f] = T.Cast(out_dtype, value[0])

    @T.inline
    def body(x, weight, bias_buffer, residual_buffer, y, t):
        w_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", w_map, dtype, 2, weight.data,
                      K, N, K * 2, BK, BM, 1, 1, 0, SW128, 3, 0)
        x_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", x_map, dtype, 2, x.data,
                      K, t, K * 2, BK, NB, 1, 1, 0, SW128, 3, 0)
        T.device_entry()
        ids = T.meta_var(block_ids(TILES * T.Cast("int32", T.ceildiv(t, NB))))
        wid = T.warp_id([THREADS // 32])
        tx = T.thread_id([THREADS])
        lane = T.meta_var(tx % 32)
        tile = T.meta_var(ids[0] % TILES)
        first_row = T.meta_var(ids[0] // TILES * NB)
        rows = T.meta_var(T.Cast("int32", t))
        start = T.meta_var(ids[1] * KT // S)
        pool = T.SMEMPool()
        Ws = pool.alloc((stages, BM * BK), dtype, align=1024)
        Xs = pool.alloc((stages, NB * BK), dtype, align=1024)
        partial = pool.alloc((NB * PITCH,), "float32", align=16)
        full = pool.alloc((stages,), "uint64", align=8)
        empty = pool.alloc((stages,), "uint64", align=8)
        pool.commit()
        count: T.int32
        count = (ids[1] + 1) * KT // S - start
        if tx == 0:
            for s in T.unroll(stages):
                T.ptx.mbarrier.init.shared.b64(full.ptr_to([s]), T.uint32(1))
                T.ptx.mbarrier.init.shared.b64(empty.ptr_to([s]), T.uint32(NC * 4))
            T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if wid >= NC * 4:
            if tx == NC * 128:
                for i in T.serial(T.min(count, stages)):        # weights do not depend on the kernel before
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(full.ptr_to([i]), T.uint32(stage_bytes))
                    T.ptx[TMA_LOAD](Ws.ptr_to([i, 0]), T.address_of(w_map), (start + i) * BK, tile * BM,
                                    full.ptr_to([i]), T.uint64(EVICT_FIRST))
                if dependent_launch:
                    T.ptx["griddepcontrol.wait"]()
                    T.ptx["griddepcontrol.launch_dependents"]()
                for i in T.serial(T.min(count, stages)):
                    T.ptx[TMA_LOAD](Xs.ptr_to([i, 0]), T.address_of(x_map), (start + i) * BK, first_row,
                                    full.ptr_to([i]), T.uint64(EVICT_LAST))
                for j in T.serial(T.max(count - stages, 0)):
                    slot = T.meta_var(j % stages)
                    T.cuda.mbarrier_wait(empty.ptr_to([slot]), j // stages % 2)
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(full.ptr_to([slot]), T.uint32(stage_bytes))
                    T.ptx[TMA_LOAD](Ws.ptr_to([slot, 0]), T.address_of(w_map), (start + j + stages) * BK, tile * BM,
                                    full.ptr_to([slot]), T.uint64(EVICT_FIRST))
                    T.ptx[TMA_LOAD](Xs.ptr_to([slot, 0]), T.address_of(x_map), (start + j + stages) * BK, first_row,
                                    full.ptr_to([slot]), T.uint64(EVICT_LAST))
        else:
            c = T.alloc_buffer((ACC,), "float32", scope="local")
            wg = T.meta_var(wid // 4)
            weights: T.uint64
            inputs: T.uint64
            stage: T.int32
            phase: T.int32
            previous: T.int32
            weights = T.uint64(DESC) + T.Cast("uint64", (T.cuda.cvta_generic_to_shared(
                Ws.ptr_to([0, 0])) >> T.uint32(4)) + T.Cast("uint32", wg * (64 * BK * 2 // 16)))
            inputs = T.uint64(DESC) + T.Cast("uint64", T.cuda.cvta_generic_to_shared(
                Xs.ptr_to([0, 0])) >> T.uint32(4))
            if dependent_launch:
                T.ptx["griddepcontrol.wait"]()
            for i in T.unroll(ACC):
                c[i] = T.float32(0.0)
            for i in T.unroll(ACC):
                T.cuda.func_call("wg_fence", c[i], source_code=WG_FENCE)
            stage = 0
            phase = 0
            previous = 0
            for i in T.serial(count):
                T.cuda.mbarrier_wait(full.ptr_to([stage]), phase)
                T.ptx.wgmma.fence.sync.aligned()
                for k in T.unroll(BK // 16):
                    T.ptx[MMA](*accumulators(c),
                               weights + T.Cast("uint64", stage * (BM * BK * 2 // 16) + k * 2),
                               inputs + T.Cast("uint64", stage * (NB * BK * 2 // 16) + k * 2),
                               T.bool(True), 1, 1, 0, 0)
                T.ptx.wgmma.commit_group.sync.aligned()
                T.ptx.wgmma.wait_group.sync.aligned(1)
                T.ptx.mbarrier.arrive.shared.b64(empty.ptr_to([previous]), pred=T.And(i > 0, lane == 0))
                previous = stage
                stage = stage + 1
                if stage == stages:
                    stage = 0
                    phase = phase ^ 1
            T.ptx.wgmma.wait_group.sync.aligned(0)
            for i in T.unroll(ACC):
                T.cuda.func_call("wg_fence", c[i], source_code=WG_FENCE)
            for i in T.unroll(ACC):
                partial[(i // 4 * 8 + lane % 4 * 2 + i % 2) * PITCH
                        + wid * 16 + i % 4 // 2 * 8 + lane // 4] = c[i]
        if clustered:
            T.ptx["barrier.cluster.arrive.release"]()
            T.ptx["barrier.cluster.wait.acquire"]()
        else:
            T.cuda.cta_sync()
        value = T.alloc_buffer((3,), "float32", scope="local")
        peers = T.alloc_buffer((S,), "uint32", scope="local")
        if clustered:
            for i in T.unroll(S):
                T.ptx["mapa.shared::cluster.u32"](
                    peers[i], T.cuda.cvta_generic_to_shared(partial.ptr_to([0])), T.uint32(i))
        for i in T.serial(-(-NB * BO // (THREADS * S))):
            item = T.meta_var((i * S + ids[1]) * THREADS + tx)
            m = T.meta_var(first_row + item // BO)
            f = T.meta_var(item % BO)
            if item < NB * BO:
                if T.And(m < rows, tile * BO + f < OUT):
                    store(partial, peers, bias_buffer, residual_buffer, y, value, tile, m, item // BO, f)
        if clustered:                   # no block may leave while another still reads its partial sums
            T.ptx["barrier.cluster.arrive"]()
            T.ptx["barrier.cluster.wait"]()

    func = entry(body, N, K, OUT, dtype, out_dtype, bias, residual)
    return finish(func, name, dependent_launch, S)
