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
from relaxpack.schedules.kernels.cuda import attention_prefill_hopper as hopper
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, row_chunks
from relaxpack.schedules.kernels.cuda.fragments import (
    COMMIT,
    COPY16,
    EXP2,
    FULL_MASK,
    LDMATRIX,
    LDMATRIX_T,
    LOG2_E,
    NEG_BIG,
    SHORT,
    WAIT,
    check_dtypes,
    finish,
    mma,
    pack,
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
    return (tuning.rows + 4 * tuning.keys) * row_chunks(spec.head_dim) * 16


def default_tuning(spec: AttentionSpec, arch: str) -> PrefillTuning:
    # 32 rows a warp read each key half as often; on the newest cards ptxas needs the registers of the narrower one.
    wide = spec.head_dim > 128 or (spec.head_dim > 64 and arch in ("sm_100a", "sm_120"))
    for tuning in (PrefillTuning(8, 1, 64) if wide else PrefillTuning(4, 2, 32), PrefillTuning(8, 1, 32),
                   PrefillTuning(4, 1, 32), PrefillTuning(4, 1, 16)):
        if shared_bytes(spec, tuning) <= LIMITS[arch][0] * 1024:
            return tuning
    raise CompileError(f"prefill attention: head_dim {spec.head_dim} does not fit the shared memory of {arch}")


def _function(spec: AttentionSpec, tuning: PrefillTuning) -> Any:
    D, H, KV, PS, MP, L = (spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.page_size, spec.max_pages,
                           spec.num_layers)
    G, WARPS, MT, KEYS, ROWS = H // KV, tuning.warps, tuning.row_tiles, tuning.keys, tuning.rows
    act, kv = spec.activation_dtype, spec.kv_dtype
    THREADS, KS, NT, DT = WARPS * 32, D // 16, KEYS // 8, D // 8
    CHUNKS, ROW_CHUNKS = D // 8, row_chunks(D)
    SWIZZLE = CHUNKS % 8 == 0
    WINDOWED, WINDOW = spec.window is not None, spec.window or 0
    SCALE = spec.scale * LOG2_E
    MMA, PACK_P, PACK_Y = mma(kv), pack(kv), pack(act)
    Q_PASSES, KV_PASSES = -(-ROWS * CHUNKS // THREADS), -(-KEYS * CHUNKS // THREADS)
    assert D % 16 == 0 and KEYS % 16 == 0 and act == kv

    def chunk(row: Any, column: Any) -> Any:
        return row * ROW_CHUNKS + (column ^ (row % 8) if SWIZZLE else column)

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
        ring = pool.alloc((2, 2, KEYS * ROW_CHUNKS, 8), kv, align=128)
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
                r = T.meta_var((tx + THREADS * i) // CHUNKS)
                live = T.meta_var(T.And(first + r < end, first + r > position - WINDOW if WINDOWED else T.bool(True)))
                page[i] = 0
                if live:
                    page[i] = page_table[seq, (first + r) // PS]
            for i in T.unroll(KV_PASSES):
                r = T.meta_var((tx + THREADS * i) // CHUNKS)
                c = T.meta_var((tx + THREADS * i) % CHUNKS)
                live = T.meta_var(T.And(first + r < end, first + r > position - WINDOW if WINDOWED else T.bool(True)))
                if (tx + THREADS * i) < KEYS * CHUNKS:
                    bytes = T.meta_var(T.if_then_else(live, T.uint32(16), T.uint32(0)))
                    for j in T.unroll(2):
                        T.ptx[COPY16](ring.ptr_to([into, j, chunk(r, c), 0]),
                                      pages.ptr_to([layer, T.Cast("int64", page[i]), j, T.Cast("int64", head // G),
                                                    T.Cast("int64", (first + r) % PS), c * 8]), 16, bytes)

        @T.inline
        def scores(index):
            for m in T.unroll(MT):
                for n in T.unroll(NT):
                    for j in T.unroll(4):
                        score[m, n, j] = T.float32(0)
            for k in T.unroll(KS):
                for m in T.unroll(MT):
                    T.ptx[LDMATRIX](frag_a[m, 0], frag_a[m, 1], frag_a[m, 2], frag_a[m, 3], queries.ptr_to(
                        [chunk((warp * MT + m) * 16 + lane % 16, 2 * k + lane // 16), 0]))
                for n in T.unroll(NT // 2):
                    T.ptx[LDMATRIX](frag_b[0], frag_b[1], frag_b[2], frag_b[3], ring.ptr_to(
                        [index, 0, chunk(n * 16 + lane % 8 + lane // 16 * 8, 2 * k + lane // 8 % 2), 0]))
                    for m in T.unroll(MT):
                        for j in T.unroll(2):
                            multiply(score, m, 2 * n + j, frag_a[m, 0], frag_a[m, 1], frag_a[m, 2], frag_a[m, 3],
                                     frag_b[2 * j], frag_b[2 * j + 1])

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
                            T.ptx[EXP2](score[m, n, 2 * r + j], score[m, n, 2 * r + j] * T.float32(SCALE) - peak)
                            total[m, r] = total[m, r] + score[m, n, 2 * r + j]

        @T.inline
        def values(index):
            for k in T.unroll(NT // 2):
                for m in T.unroll(MT):
                    for j in T.unroll(4):
                        T.ptx[PACK_P](frag_a[m, j], score[m, 2 * k + j // 2, j % 2 * 2 + 1],
                                      score[m, 2 * k + j // 2, j % 2 * 2])
                for n in T.unroll(DT // 2):
                    T.ptx[LDMATRIX_T](frag_b[0], frag_b[1], frag_b[2], frag_b[3], ring.ptr_to(
                        [index, 1, chunk(k * 16 + lane % 16, 2 * n + lane // 16), 0]))
                    for m in T.unroll(MT):
                        for j in T.unroll(2):
                            multiply(acc, m, 2 * n + j, frag_a[m, 0], frag_a[m, 1], frag_a[m, 2], frag_a[m, 3],
                                     frag_b[2 * j], frag_b[2 * j + 1])

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
                    factor = T.float32(1) / total[m, r]
                    if row < rows:
                        for n in T.unroll(DT):
                            T.ptx[PACK_Y](word, acc[m, n, 2 * r + 1] * factor, acc[m, n, 2 * r] * factor)
                            T.ptx["st.global.b32"](
                                y.ptr_to([start + row, head * D + n * 8 + lane % 4 * 2]), word)

    return prefill_attention


def check_spec(spec: AttentionSpec) -> None:
    check_dtypes(spec.activation_dtype, spec.kv_dtype)
    if spec.activation_dtype != spec.kv_dtype:
        raise CompileError(f"prefill attention: activations {spec.activation_dtype} and pages {spec.kv_dtype} differ; "
                           "build with one dtype for both")
    if spec.head_dim % 16 or spec.num_heads % spec.num_kv_heads:
        raise CompileError(f"prefill attention: head_dim {spec.head_dim} must be a multiple of 16 and {spec.num_heads} "
                           f"heads a multiple of {spec.num_kv_heads} KV heads")


def prefill_attention(spec: AttentionSpec, arch: str = "sm_90a",
                      tuning: PrefillTuning | hopper.HopperTuning | None = None) -> Kernel:
    """q I[t, H*D], layer, pages, page_table i32[b, max_pages], query_start i32[b+1], lengths i32[b] → y I[t, H*D]."""
    check_spec(spec)
    few = None
    if tuning is None:
        use_hopper = arch == "sm_90a" and hopper.supported(spec)
        tuning = hopper.default_tuning(spec) if use_hopper else default_tuning(spec, arch)
        few = hopper.default_for_few(spec) if use_hopper else None
    name = (f"prefill_attention_{SHORT[spec.kv_dtype]}_h{spec.num_heads}x{spec.num_kv_heads}_d{spec.head_dim}"
            f"_p{spec.page_size}x{spec.max_pages}" + (f"_w{spec.window}" if spec.window else ""))
    on_hopper = isinstance(tuning, hopper.HopperTuning)
    func = finish(hopper.function(spec, tuning, few), early=True) if on_hopper else finish(_function(spec, tuning))
    stage = Stage(func, name,
                  inputs=("q", "layer", "pages", "page_table", "query_start", "lengths"), outputs=("y",))
    source = "rule:cuda.prefill_attention" + ("_hopper" if on_hopper else "")
    return Kernel((stage,), source=source)
