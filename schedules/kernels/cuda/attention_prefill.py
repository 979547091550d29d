"""Paged prefill attention for CUDA: many query tokens per sequence, packed and ragged, causal over a cached prefix.

A block owns a tile of query tokens of one sequence and one head, walks the keys it can see in tiles through the page
table with double-buffered cp.async, and keeps the softmax online in registers (mma.sync, every architecture from
sm_80). The number of tiles is bounded by t / rows + b, so the grid depends on the symbolic sizes alone. The floor is
4 * head_dim operations per visible (query, key) and head over the tensor-core rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, Kernel, Stage
from relaxpack.schedules.kernels.cuda import attention_prefill_hopper_tuning as hopper
from relaxpack.schedules.kernels.cuda import pages_fp8
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, row_chunks
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper import hopper_function
from relaxpack.schedules.kernels.cuda.fragments import (
    COMMIT,
    COPY16,
    EXP2,
    FULL_MASK,
    LDMATRIX,
    LDMATRIX_T,
    LOG2_E,
    NEG_BIG,
    WAIT,
    check_pages,
    finish,
    mma,
    pack,
    page_name,
    shuffle,
    shuffle_up,
    shuffle_xor,
)
from tvm.script import tirx as T


@dataclass(frozen=True)
class PrefillTuning:
    """The search space: `warps` warps of `row_tiles` x 16 query rows, `keys` keys a tile, two tiles in flight."""

    warps: int
    row_tiles: int
    keys: int

    @property
    def rows(self) -> int:
        return self.warps * self.row_tiles * 16


def shared_bytes(spec: AttentionSpec, tuning: PrefillTuning) -> int:
    return (tuning.rows * row_chunks(spec.head_dim)
            + 4 * tuning.keys * row_chunks(spec.head_dim, spec.kv_item_bytes)) * 16


def default_tuning(spec: AttentionSpec, arch: str) -> PrefillTuning:
    # 32 rows a warp read each key half as often; on the newest cards ptxas needs the registers of the narrower one.
    wide = spec.head_dim > 128 or (spec.head_dim > 64 and arch in ("sm_100a", "sm_120"))
    first = PrefillTuning(8, 1, 64) if wide else PrefillTuning(4, 2, 64 if spec.fp8 and spec.head_dim <= 64 else 32)
    for tuning in (first, PrefillTuning(8, 1, 32), PrefillTuning(4, 1, 32), PrefillTuning(4, 1, 16)):
        if shared_bytes(spec, tuning) <= LIMITS[arch][0] * 1024:
            return tuning
    raise CompileError(f"prefill attention: head_dim {spec.head_dim} does not fit the shared memory of {arch}")


def _function(spec: AttentionSpec, tuning: PrefillTuning) -> Any:
    D, H, KV, PS, MP, L = (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages,
                           spec.num_layers)
    G, WARPS, MT, KEYS, ROWS = H // KV, tuning.warps, tuning.row_tiles, tuning.keys, tuning.rows
    act, kv, FP8 = spec.activation_dtype, spec.page_dtype, spec.fp8
    THREADS, KS, NT, DT = WARPS * 32, D // 16, KEYS // 8, D // 8
    CHUNKS, ROW_CHUNKS, UNIT = D // 8, row_chunks(D), 16 // spec.kv_item_bytes
    KV_CHUNKS, KV_ROW = D // UNIT, row_chunks(D, spec.kv_item_bytes)         # 16-byte chunks of a row of keys
    WINDOWED, WINDOW = spec.window is not None, spec.window or 0
    SCALE = spec.scale * LOG2_E
    MMA, PACK_P, PACK_Y, take, lift = mma(act), pack(act), pack(act), pages_fp8.take(act), pages_fp8.lift(act)
    LIFT, LACK = (float(pages_fp8.LIFT[act]), float(pages_fp8.LACK[act])) if FP8 else (0.0, 0.0)
    SCALE *= 2.0 ** (LACK - LIFT)
    Q_PASSES, KV_PASSES = -(-ROWS * CHUNKS // THREADS), -(-KEYS * KV_CHUNKS // THREADS)
    assert D % 16 == 0 and KEYS % 16 == 0

    def chunk(row: Any, column: Any) -> Any:
        return row * ROW_CHUNKS + (column ^ (row % 8) if CHUNKS % 8 == 0 else column)

    def kv_chunk(row: Any, column: Any) -> Any:
        return row * KV_ROW + (column ^ (row % 8) if KV_CHUNKS % 8 == 0 else column)

    def lifted(peak: Any) -> Any:
        return peak - T.float32(LIFT) if LIFT else peak

    @T.prim_func
    def prefill_attention(q_h: T.handle, layer: T.int64, pages_h: T.handle, page_table_h: T.handle,
                          query_start_h: T.handle, lengths_h: T.handle, y_h: T.handle):
        t = T.int64()
        b = T.int64()
        p = T.int64()
        q = T.match_buffer(q_h, (t, H * D), act, align=16)
        pages = T.match_buffer(pages_h, (T.int64(L), p, 2, KV, PS, D), kv, align=16)
        page_table = T.match_buffer(page_table_h, (b, MP), "int32")
        query_start = T.match_buffer(query_start_h, (b + 1,), "int32")
        lengths = T.match_buffer(lengths_h, (b,), "int32")
        y = T.match_buffer(y_h, (t, H * D), act, align=16)
        T.device_entry()
        head, by = T.cta_id([H, T.Cast("int32", T.ceildiv(t, ROWS) + b)])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        queries = pool.alloc((ROWS * ROW_CHUNKS, 8), act, align=128)
        ring = pool.alloc((2, 2, KEYS * KV_ROW, UNIT), kv, align=128)
        pool.commit()
        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        sequences = T.meta_var(T.Cast("int32", b))
        acc = T.alloc_buffer((MT, DT, 4), "float32", scope="local")
        score = T.alloc_buffer((MT, NT, 4), "float32", scope="local")
        top = T.alloc_buffer((MT, 2), "float32", scope="local")
        total = T.alloc_buffer((MT, 2), "float32", scope="local")
        frag_a = T.alloc_buffer((MT, 4), "uint32", scope="local")
        frag_b = T.alloc_buffer((4,), "uint32", scope="local")
        if FP8:
            frag_q = T.alloc_buffer((2, MT, 4), "uint32", scope="local")
            wide = T.alloc_buffer((4,), "uint32", scope="local")
        page = T.alloc_buffer((KV_PASSES,), "int32", scope="local")
        word: T.uint32
        peak: T.float32
        factor: T.float32
        tile: T.int32
        base: T.int32
        count: T.int32
        sum: T.int32
        slot: T.int32
        found: T.int32
        seq: T.int32
        start: T.int32
        rows: T.int32
        length: T.int32
        position: T.int32
        key: T.int32
        end: T.int32
        stage: T.int32

        @T.inline
        def scan():
            # `count` becomes the tiles of sequence base + lane, `sum` their inclusive prefix within these 32
            count = 0
            if base + lane < sequences:
                count = (query_start[base + lane + 1] - query_start[base + lane] + (ROWS - 1)) // ROWS
            sum = count
            for i in T.unroll(5):
                slot = shuffle_up(sum, 1 << i)
                if lane >= (1 << i):
                    sum = sum + slot

        @T.inline
        def copy(first, into):
            # keys and values first .. first + KEYS - 1 → stage `into`; keys no query here can see become zeros
            for i in T.unroll(KV_PASSES):                  # all look-ups at once: a copy must not wait for one
                r = T.meta_var((tx + THREADS * i) // KV_CHUNKS)
                live = T.meta_var(T.And(first + r < end, first + r > position - WINDOW if WINDOWED else T.bool(True)))
                page[i] = 0
                if live:
                    page[i] = page_table[seq, (first + r) // PS]
            for i in T.unroll(KV_PASSES):
                r = T.meta_var((tx + THREADS * i) // KV_CHUNKS)
                c = T.meta_var((tx + THREADS * i) % KV_CHUNKS)
                live = T.meta_var(T.And(first + r < end, first + r > position - WINDOW if WINDOWED else T.bool(True)))
                if (tx + THREADS * i) < KEYS * KV_CHUNKS:
                    bytes = T.meta_var(T.if_then_else(live, T.uint32(16), T.uint32(0)))
                    for j in T.unroll(2):
                        T.ptx[COPY16](ring.ptr_to([into, j, kv_chunk(r, c), 0]),
                                      pages.ptr_to([layer, T.Cast("int64", page[i]), j, T.Cast("int64", head // G),
                                                    T.Cast("int64", (first + r) % PS), c * UNIT]), 16, bytes)

        @T.inline
        def scores(index):
            for m in T.unroll(MT):
                for n in T.unroll(NT):
                    for j in T.unroll(4):
                        score[m, n, j] = T.float32(0)
            if FP8:
                scores_fp8(index)
            else:
                for k in T.unroll(KS):
                    for m in T.unroll(MT):
                        T.ptx[LDMATRIX](frag_a[m, 0], frag_a[m, 1], frag_a[m, 2], frag_a[m, 3], queries.ptr_to(
                            [chunk((warp * MT + m) * 16 + lane % 16, 2 * k + lane // 16), 0]))
                    for n in T.unroll(NT // 2):
                        T.ptx[LDMATRIX](frag_b[0], frag_b[1], frag_b[2], frag_b[3], ring.ptr_to(
                            [index, 0, kv_chunk(n * 16 + lane % 8 + lane // 16 * 8, 2 * k + lane // 8 % 2), 0]))
                        for m in T.unroll(MT):
                            for j in T.unroll(2):
                                multiply(score, m, 2 * n + j, frag_a[m, 0], frag_a[m, 1], frag_a[m, 2], frag_a[m, 3],
                                         frag_b[2 * j], frag_b[2 * j + 1])

        @T.inline
        def scores_fp8(index):
            # 16 keys of two steps at once; within a step the elements are in the order in which `copy_queries` left them
            for k in T.unroll(KS // 2):
                for j in T.unroll(2):
                    for m in T.unroll(MT):
                        T.ptx[LDMATRIX](frag_q[j, m, 0], frag_q[j, m, 1], frag_q[j, m, 2], frag_q[j, m, 3], queries.ptr_to(
                            [chunk((warp * MT + m) * 16 + lane % 16, 2 * (2 * k + j) + lane // 16), 0]))
                for n in T.unroll(NT // 2):
                    T.ptx[LDMATRIX](frag_b[0], frag_b[1], frag_b[2], frag_b[3], ring.ptr_to(
                        [index, 0, kv_chunk(n * 16 + lane % 8 + lane // 16 * 8, 2 * k + lane // 8 % 2), 0]))
                    for j in T.unroll(2):
                        for i in T.unroll(2):
                            take(wide, 0, 1, frag_b[2 * i + j])
                            for m in T.unroll(MT):
                                multiply(score, m, 2 * n + i, frag_q[j, m, 0], frag_q[j, m, 1], frag_q[j, m, 2],
                                         frag_q[j, m, 3], wide[0], wide[1])

        @T.inline
        def multiply(c, m, n, a0, a1, a2, a3, b0, b1):
            T.ptx[MMA](c[m, n, 0], c[m, n, 1], c[m, n, 2], c[m, n, 3], a0, a1, a2, a3, b0, b1,
                       c[m, n, 0], c[m, n, 1], c[m, n, 2], c[m, n, 3])

        @T.inline
        def mask():
            for m in T.unroll(MT):
                for n in T.unroll(NT):
                    for j in T.unroll(4):
                        at = T.meta_var(position + (warp * MT + m) * 16 + lane // 4 + j // 2 * 8)
                        k = T.meta_var(key + n * 8 + lane % 4 * 2 + j % 2)
                        seen = T.meta_var(T.And(k <= at, k > at - WINDOW if WINDOWED else T.bool(True)))
                        score[m, n, j] = T.if_then_else(seen, score[m, n, j], T.float32("-inf"))

        @T.inline
        def softmax():
            for m in T.unroll(MT):
                for r in T.unroll(2):
                    peak = score[m, 0, 2 * r]
                    for n in T.unroll(NT):
                        for j in T.unroll(2):
                            peak = T.max(peak, score[m, n, 2 * r + j])
                    for i in T.unroll(2):
                        peak = T.max(peak, shuffle_xor(peak, 1 << i))
                    peak = T.max(peak * T.float32(SCALE), top[m, r])
                    T.ptx[EXP2](factor, top[m, r] - peak)
                    top[m, r] = peak
                    total[m, r] = total[m, r] * factor
                    for n in T.unroll(DT):
                        for j in T.unroll(2):
                            acc[m, n, 2 * r + j] = acc[m, n, 2 * r + j] * factor
                    for n in T.unroll(NT):
                        for j in T.unroll(2):
                            T.ptx[EXP2](score[m, n, 2 * r + j], score[m, n, 2 * r + j] * T.float32(SCALE) - lifted(peak))
                            total[m, r] = total[m, r] + score[m, n, 2 * r + j]

        @T.inline
        def values(index):
            for k in T.unroll(NT // 2):
                for m in T.unroll(MT):
                    for j in T.unroll(4):
                        T.ptx[PACK_P](frag_a[m, j], score[m, 2 * k + j // 2, j % 2 * 2 + 1],
                                      score[m, 2 * k + j // 2, j % 2 * 2])
                if FP8:
                    values_fp8(index, k)
                else:
                    for n in T.unroll(DT // 2):
                        T.ptx[LDMATRIX_T](frag_b[0], frag_b[1], frag_b[2], frag_b[3], ring.ptr_to(
                            [index, 1, kv_chunk(k * 16 + lane % 16, 2 * n + lane // 16), 0]))
                        for m in T.unroll(MT):
                            for j in T.unroll(2):
                                multiply(acc, m, 2 * n + j, frag_a[m, 0], frag_a[m, 1], frag_a[m, 2], frag_a[m, 3],
                                         frag_b[2 * j], frag_b[2 * j + 1])

        @T.inline
        def values_fp8(index, k):
            # a chunk is 16 elements, the even ones of which are one tile of outputs and the odd ones the next
            for n in T.unroll(DT // 4):
                T.ptx[LDMATRIX_T](frag_b[0], frag_b[1], frag_b[2], frag_b[3], ring.ptr_to(
                    [index, 1, kv_chunk(k * 16 + lane % 16, 2 * n + lane // 16), 0]))
                for j in T.unroll(2):
                    for i in T.unroll(2):
                        take(wide, i, 2 + i, frag_b[2 * j + i])
                    for i in T.unroll(2):
                        for m in T.unroll(MT):
                            multiply(acc, m, 4 * n + 2 * j + i, frag_a[m, 0], frag_a[m, 1], frag_a[m, 2], frag_a[m, 3],
                                     wide[2 * i], wide[2 * i + 1])

        @T.inline
        def store_fp8(m, r, row):
            for n in T.unroll(DT // 2):
                for e in T.unroll(2):
                    T.ptx[PACK_Y](wide[e], acc[m, 2 * n + 1, 2 * r + e] * factor, acc[m, 2 * n, 2 * r + e] * factor)
                T.ptx["st.global.v2.b32"](
                    y.ptr_to([start + row, head * D + n * 16 + lane % 4 * 4]), wide[0], wide[1])

        @T.inline
        def copy_queries(r, c):
            # 8 elements → the halves of two chunks: of each four, 0 and 2 go to the first and 1 and 3 to the second
            for e in T.unroll(4):
                wide[e] = T.uint32(0)
            if r < rows:
                T.ptx["ld.global.nc.v4.b32"](wide[0], wide[1], wide[2], wide[3],
                                             q.ptr_to([start + r, head * D + c * 8]))
            for e in T.unroll(2):
                lift(frag_b, e, (wide[2 * e] & T.uint32(0xFFFF)) | (wide[2 * e + 1] << T.uint32(16)))
                lift(frag_b, 2 + e, (wide[2 * e] >> T.uint32(16)) | (wide[2 * e + 1] & T.uint32(0xFFFF0000)))
            for e in T.unroll(2):
                T.ptx["st.shared.v2.b32"](queries.ptr_to([chunk(r, c // 2 * 2 + e), c % 2 * 4]),
                                          frag_b[2 * e], frag_b[2 * e + 1])

        # which tile of which sequence; later (longer) tiles start first
        tile = T.Cast("int32", T.ceildiv(t, ROWS) + b) - 1 - by
        base = 0
        found = 0
        while T.And(found == 0, base < sequences):
            scan()
            slot = shuffle(sum, 31)
            if tile < slot:
                seq = base + T.Cast("int32", T.popcount(
                    T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", sum <= tile))))
                tile = tile - shuffle(sum - count, seq - base)
                found = 1
            else:
                tile = tile - slot
                base = base + 32
        if found == 1:
            start = query_start[seq] + tile * ROWS
            rows = T.min(query_start[seq + 1] - start, ROWS)
            length = lengths[seq]
            position = length - (query_start[seq + 1] - start)      # of the first row of this tile
            end = position + rows                                   # no row here sees a key from `end` on
            key = T.max(position - (WINDOW - 1), 0) // KEYS * KEYS if WINDOWED else T.int32(0)
            for i in T.unroll(Q_PASSES):
                r = T.meta_var((tx + THREADS * i) // CHUNKS)
                c = T.meta_var((tx + THREADS * i) % CHUNKS)
                if (tx + THREADS * i) < ROWS * CHUNKS:
                    if FP8:
                        copy_queries(r, c)
                    else:
                        T.ptx[COPY16](queries.ptr_to([chunk(r, c), 0]),
                                      q.ptr_to([start + T.min(r, rows - 1), head * D + c * 8]), 16,
                                      T.if_then_else(r < rows, T.uint32(16), T.uint32(0)))
            copy(key, 0)
            T.ptx[COMMIT]()
            for m in T.unroll(MT):
                for r in T.unroll(2):
                    top[m, r] = T.float32(NEG_BIG)
                    total[m, r] = T.float32(0)
                for n in T.unroll(DT):
                    for j in T.unroll(4):
                        acc[m, n, j] = T.float32(0)
            stage = 0
            while key < end:
                T.ptx[WAIT](0)
                T.cuda.cta_sync()
                if key + KEYS < end:
                    copy(key + KEYS, stage ^ 1)
                T.ptx[COMMIT]()
                scores(stage)
                if T.Or(key + (KEYS - 1) > position, key <= end - 1 - WINDOW if WINDOWED else T.bool(False)):
                    mask()
                softmax()
                values(stage)
                stage = stage ^ 1
                key = key + KEYS
            for m in T.unroll(MT):
                for r in T.unroll(2):
                    row = T.meta_var((warp * MT + m) * 16 + r * 8 + lane // 4)
                    for i in T.unroll(2):
                        total[m, r] = total[m, r] + shuffle_xor(total[m, r], 1 << i)
                    factor = T.float32(1 if not FP8 else 2.0 ** LACK) / total[m, r]
                    if row < rows:
                        if FP8:
                            store_fp8(m, r, row)
                        else:
                            for n in T.unroll(DT):
                                T.ptx[PACK_Y](word, acc[m, n, 2 * r + 1] * factor, acc[m, n, 2 * r] * factor)
                                T.ptx["st.global.b32"](
                                    y.ptr_to([start + row, head * D + n * 8 + lane % 4 * 2]), word)

    return prefill_attention


def prefill_attention(spec: AttentionSpec, arch: str = "sm_90a",
                      tuning: PrefillTuning | hopper.HopperTuning | None = None) -> Kernel:
    """q I[t, H*D], layer, pages, page_table i32[b, max_pages], query_start i32[b+1], lengths i32[b] → y I[t, H*D]."""
    check_pages("prefill attention", spec)
    few = None
    if tuning is None:
        use_hopper = arch == "sm_90a" and hopper.supported(spec)
        tuning = hopper.default_tuning(spec) if use_hopper else default_tuning(spec, arch)
        few = hopper.default_for_few(spec) if use_hopper else None
    name = (f"prefill_attention_{page_name(spec)}_h{spec.num_heads}x{spec.num_kv_heads}_d{spec.head_dim}"
            f"_p{spec.page_size}x{spec.max_pages}" + (f"_w{spec.window}" if spec.window else ""))
    on_hopper = isinstance(tuning, hopper.HopperTuning)
    func = finish(hopper_function(spec, tuning, few), early=True) if on_hopper else finish(_function(spec, tuning))
    stage = Stage(func, name,
                  inputs=("q", "layer", "pages", "page_table", "query_start", "lengths"), outputs=("y",))
    source = "rule:cuda.prefill_attention" + ("_hopper" if on_hopper else "")
    return Kernel((stage,), source=source)
