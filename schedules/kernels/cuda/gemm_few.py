"""Hopper matmul for a few rows (2 to about 128): y[t, N] = x[t, K] W[N, K]^T, weights read once at memory speed.

The weights are the M side of wgmma (64 rows a warpgroup), the activation rows its N side, so 8 rows cost 8 columns. One
producer thread streams weights and activations through a ring of TMA stages that fills the shared memory; that many
bytes in flight is what reaches the bandwidth. Where N alone gives too few blocks, the `split` blocks of a cluster share
one strip of weight rows and cut K; their partial sums are added through distributed shared memory in a fixed order, so
the result does not depend on timing and no workspace or counter is needed.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import SHORT, block_ids, device, linear_func
from relaxpack.schedules.kernels.cuda.split_epilogue import SplitEpilogue
from tvm.script import tirx as T

BK = 64                        # values of K per stage: one 128-byte swizzle row
SW128 = 3                      # swizzle of the tensor maps and matrix descriptors
DESC = (1 << 62) | (64 << 32) | (1 << 16)       # K-major, 128-byte swizzle, 8-row groups 1024 bytes apart
TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
TMA_MULTICAST = TMA_LOAD.replace(".L2", ".multicast::cluster.L2")
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
WG_FENCE = """
__device__ __forceinline__ void wg_fence(float& r) { asm volatile("" : "+f"(r) :: "memory"); }
"""


def few_body(N: int, K: int, dtype: str, out_dtype: str, *, columns: int = 16, consumers: int = 1, split: int = 1,
             share: int = 1, blocks_per_sm: int = 2, bias: bool = False, residual: bool = False, glu: str | None = None,
             dependent_launch: bool = False):
    """Buffers as in gemm_rows. columns: rows of x per block (multiple of 8, at most 256); consumers: warpgroups, each 64
    weight rows; split: blocks along K (1 to 8); share: neighbouring strips that load each x tile together and multicast it.
    A cluster has split * share blocks, at most 8."""
    gated = glu is not None
    assert N % 8 == 0 and K % 8 == 0 and columns % 8 == 0 and 8 <= columns <= 256 and (not gated or N % 16 == 0)
    assert columns % (8 * share) == 0 and split * share <= 8
    BM, NB, NC, S = 64 * consumers, columns, consumers, split
    CL, XB = split * share, columns // share        # blocks of a cluster; rows of x that one block loads
    THREADS = NC * 128 + 32
    ACC = NB // 2                                   # float32 accumulators per thread
    KT, GROUPS = -(-K // BK), -(-N // (BM * share))
    stage_bytes = (BM + NB) * BK * 2
    budget = 227 * 1024 if blocks_per_sm == 1 else 228 * 1024 // blocks_per_sm - 1024
    E = SplitEpilogue(dtype, out_dtype, out_features=N // 2 if gated else N, rows=BM, columns=NB, split=S, threads=THREADS,
                      clustered=CL > 1, bias=bias, residual=residual, glu=glu)
    PITCH, end = E.pitch, E.finish
    stages = min((budget - 1024) // stage_bytes, 64, max(-(-KT // S), 2))
    assert stages >= 2 and NB * PITCH * 4 + 1024 <= budget, "the tile does not fit"
    MASK = sum(1 << member * split for member in range(share))      # blocks that share x with block 0
    MMA = f"wgmma.mma_async.sync.aligned.m64n{NB}k16.f32.{SHORT[dtype]}.{SHORT[dtype]}"
    clustered, shared = CL > 1, share > 1

    def accumulators(c):
        return [c[i] for i in range(ACC)]

    @T.inline
    def body(x, weight, bias_buffer, residual_buffer, y, t):
        w_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", w_map, dtype, 2, weight.data,
                      K, N, K * 2, BK, BM, 1, 1, 0, SW128, 3, 0)
        x_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", x_map, dtype, 2, x.data,
                      K, t, K * 2, BK, XB, 1, 1, 0, SW128, 3, 0)
        with device():
            ids = T.meta_var(block_ids(GROUPS * T.Cast("int32", T.ceildiv(t, NB)), CL))
            wid = T.warp_id([THREADS // 32])
            tx = T.thread_id([THREADS])
            lane = T.meta_var(tx % 32)
            part = T.meta_var(ids[1] % S)               # which piece of K
            member = T.meta_var(ids[1] // S)            # which of the strips that share x
            tile = T.meta_var(ids[0] % GROUPS * share + member)
            first_row = T.meta_var(ids[0] // GROUPS * NB)
            rows = T.meta_var(T.Cast("int32", t))
            start = T.meta_var(part * KT // S)
            pool = T.SMEMPool()
            full = pool.alloc((stages,), "uint64", align=8)
            empty = pool.alloc((stages,), "uint64", align=8)
            Ws = pool.alloc((stages, BM * BK), dtype, align=1024)
            Xs = pool.alloc((stages, NB * BK), dtype, align=1024)
            pool.move_base_to(1024)         # the partial sums reuse the ring when nothing reads it any more
            partial = pool.alloc((NB * PITCH,), "float32", align=16)
            pool.commit()
            count: T.int32
            count = (part + 1) * KT // S - start
            if tx == 0:
                for s in T.unroll(stages):
                    T.ptx.mbarrier.init.shared.b64(full.ptr_to([s]), T.uint32(1))
                    T.ptx.mbarrier.init.shared.b64(empty.ptr_to([s]), T.uint32(NC * 4 * share))
                T.ptx.fence.proxy.async_.shared__cta()
                if shared:
                    T.ptx["fence.mbarrier_init.release.cluster"]()
            if shared:
                T.cuda.cluster_sync()
            else:
                T.cuda.cta_sync()

            @T.inline
            def load_x(slot, chunk):
                if shared:
                    T.ptx[TMA_MULTICAST](Xs.ptr_to([slot, member * (XB * BK)]), T.address_of(x_map), chunk * BK,
                                         first_row + member * XB, full.ptr_to([slot]),
                                         T.Cast("uint16", T.shift_left(T.int32(MASK), part)), T.uint64(EVICT_LAST))
                else:
                    T.ptx[TMA_LOAD](Xs.ptr_to([slot, 0]), T.address_of(x_map), chunk * BK, first_row, full.ptr_to([slot]),
                                    T.uint64(EVICT_LAST))

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
                        load_x(i, start + i)
                    for j in T.serial(T.max(count - stages, 0)):
                        slot = T.meta_var(j % stages)
                        T.cuda.mbarrier_wait(empty.ptr_to([slot]), j // stages % 2)
                        T.ptx.mbarrier.arrive.expect_tx.shared.b64(full.ptr_to([slot]), T.uint32(stage_bytes))
                        T.ptx[TMA_LOAD](Ws.ptr_to([slot, 0]), T.address_of(w_map), (start + j + stages) * BK, tile * BM,
                                        full.ptr_to([slot]), T.uint64(EVICT_FIRST))
                        load_x(slot, start + j + stages)
                T.ptx["bar.sync"](T.uint32(1), T.uint32(THREADS))       # that of the consumers below
            else:
                c = T.alloc_buffer((ACC,), "float32", scope="local")
                wg = T.meta_var(wid // 4)
                weights: T.uint64
                inputs: T.uint64
                stage: T.int32
                phase: T.int32
                previous: T.int32
                sharer: T.uint32            # address of empty[0] in the sharing block `lane`
                if shared:
                    T.ptx["mapa.shared::cluster.u32"](sharer, T.cuda.cvta_generic_to_shared(empty.ptr_to([0])),
                                                      T.Cast("uint32", lane % share * S + part))
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
                    if shared:
                        T.ptx.mbarrier.arrive.shared__cluster.b64(sharer + T.Cast("uint32", previous * 8),
                                                                  pred=T.And(i > 0, lane < share))
                    else:
                        T.ptx.mbarrier.arrive.shared.b64(empty.ptr_to([previous]), pred=T.And(i > 0, lane == 0))
                    previous = stage
                    stage = stage + 1
                    if stage == stages:
                        stage = 0
                        phase = phase ^ 1
                T.ptx.wgmma.wait_group.sync.aligned(0)
                for i in T.unroll(ACC):
                    T.cuda.func_call("wg_fence", c[i], source_code=WG_FENCE)
                # The ring is done with. Of all threads: racecheck loses track of a barrier of a part of them.
                T.ptx["bar.sync"](T.uint32(1), T.uint32(THREADS))
                for i in T.unroll(ACC):
                    partial[(i // 4 * 8 + lane % 4 * 2 + i % 2) * PITCH
                            + wid * 16 + i % 4 // 2 * 8 + lane // 4] = c[i]
            end(partial, bias_buffer, residual_buffer, y, tile, part, member, first_row, rows, tx)

    return body


def gemm_few(N: int, K: int, dtype: str, out_dtype: str, *, name: str = "gemm_few", **options):
    """PrimFunc around few_body, which documents the options."""
    body = few_body(N, K, dtype, out_dtype, **options)
    cluster = options.get("split", 1) * options.get("share", 1)
    return linear_func(body, N, K, dtype, out_dtype, name, cluster=cluster, **options)
