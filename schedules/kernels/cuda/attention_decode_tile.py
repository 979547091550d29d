"""What a warp of the decode attention kernels does with its 16 (or 32) keys of a tile: copy them into its ring and attend
to them for all query heads of a KV head, on tensor cores with the operands swapped (S' = K Q', O' = V' P').

Device code to inline; the kernels own the buffers and decide which tiles a warp gets.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda import pages_fp8
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import head_columns, row_chunks
from relaxpack.schedules.kernels.cuda.fragments import (
    COPY16,
    EXP2,
    LDMATRIX,
    LDMATRIX_T,
    LOG2_E,
    NEG_BIG,
    mma,
    pack,
    shuffle_xor,
)
from tvm.script import tirx as T


class DecodeTile:
    """`keys` of a warp's part of a tile. Buffers that the inlines work on: ring (warps, stages, 2, keys * row_chunks, unit)
    of the pages' dtype in shared memory; in registers query u32 (steps, columns / 8, 2), acc f32 (steps, columns / 8, 4),
    and top (in log2 units) and total f32 (columns / 8, 2)."""

    def __init__(self, spec: AttentionSpec, key_tiles: int, columns: int | None = None,
                 part_tiles: int | None = None) -> None:
        """`columns`: queries a warp attends for, those of a KV head by default. `part_tiles`: of the `key_tiles` that it
        attends to at once, so many are in one warp's part of the ring and the next in the part behind; all by default."""
        D, PS = spec.head_dim, spec.page_size
        self.spec, self.key_tiles, self.keys = spec, key_tiles, 16 * key_tiles
        self.part_tiles = part_tiles or key_tiles
        self.unit = 16 // spec.kv_item_bytes                         # elements of 16 bytes
        self.columns, self.row_chunks = columns or head_columns(spec), row_chunks(D, spec.kv_item_bytes)
        self.steps, self.chunks = D // 16, D // self.unit
        self.passes = self.keys * self.chunks // 32                  # copy instructions of a warp
        assert D % 16 == 0 and self.keys * self.chunks % 32 == 0
        # Page ids can be fetched a tile ahead where every copy instruction of a warp stays within one page.
        rows = [(32 * i // self.chunks, (32 * i + 31) // self.chunks) for i in range(self.passes)]
        self.ahead = (PS % self.keys == 0 or self.keys % PS == 0) and all(a // PS == b // PS for a, b in rows)
        self.pages = max(1, self.keys // PS) if self.ahead else self.passes

    def chunk(self, row: Any, column: Any) -> Any:
        """Place of 16 bytes in a warp's keys: spread over the banks by XOR where the row is a multiple of 128 bytes."""
        return row * self.row_chunks + (column ^ (row % 8) if self.chunks % 8 == 0 else column)

    def rows(self, warp: Any, m: int, row: Any) -> tuple[Any, Any]:
        """(part of the ring, row in it) of row `row` of key tile m, counted from the part of `warp`."""
        return warp + m // self.part_tiles, m % self.part_tiles * 16 + row

    def page_slot(self, i: int) -> int:
        """Which of the warp's page ids copy instruction i needs."""
        if not self.ahead:
            return i
        return 32 * i // self.chunks // self.spec.page_size if self.pages > 1 else 0

    def visible(self, key: Any, length: Any) -> Any:
        """Whether the window has the key, for a query at length - 1."""
        return T.bool(True) if self.spec.window is None else key >= length - self.spec.window

    # Which elements of head_dim a lane has. Words of e4m3 numbers hold four neighbours, which a step of `mma` takes in an
    # order of its own: any will do, as long as keys and queries, or values and outputs, have the same.

    def query_at(self, unit: Any, lane: Any) -> Any:
        """The first of the two elements of a query that register `unit` % 2 of step `unit` // 2 is loaded from."""
        return unit // 2 * 16 + lane % 4 * 4 + unit % 2 * 2 if self.spec.fp8 else unit * 8 + lane % 4 * 2

    def output_at(self, unit: Any, index: Any) -> Any:
        """The element of an output in row `index` of the 8 that registers 2 * (`unit` % 2) and the next of step `unit` // 2
        have."""
        return unit // 2 * 16 + index * 2 + unit % 2 if self.spec.fp8 else unit * 8 + index

    def arrange(self) -> Any:
        """Inline: queries as loaded → as `attend` takes them."""
        fp8, KS, NT, lift = self.spec.fp8, self.steps, self.columns // 8, pages_fp8.lift(self.spec.activation_dtype)

        @T.inline
        def arrange(query):
            if fp8:
                pair = T.alloc_buffer((2,), "uint32", scope="local")
                word: T.uint32
                for n in T.unroll(NT):
                    for k in T.unroll(KS):
                        word = query[k, n, 0]
                        lift(pair, 0, (word & T.uint32(0xFFFF)) | (query[k, n, 1] << T.uint32(16)))
                        lift(pair, 1, (word >> T.uint32(16)) | (query[k, n, 1] & T.uint32(0xFFFF0000)))
                        query[k, n, 0] = pair[0]
                        query[k, n, 1] = pair[1]

        return arrange

    def copy(self) -> Any:
        """Inline: keys and values from `base` on → stage `into`; those from `limit` on and outside the window are zero."""
        chunks, passes, size, unit = self.chunks, self.passes, self.spec.page_size, self.unit

        @T.inline
        def copy(ring, warp, into, lane, pages, layer, page, head, base, limit, length):
            for i in T.unroll(passes):
                r = T.meta_var((lane + 32 * i) // chunks)
                c = T.meta_var((lane + 32 * i) % chunks)
                live = T.meta_var(T.And(base + r < limit, self.visible(base + r, length)))
                bytes = T.meta_var(T.if_then_else(live, T.uint32(16), T.uint32(0)))
                for j in T.unroll(2):
                    T.ptx[COPY16](ring.ptr_to([warp, into, j, self.chunk(r, c), 0]),
                                  pages.ptr_to([layer, T.Cast("int64", page[self.page_slot(i)]), j,
                                                T.Cast("int64", head), T.Cast("int64", (base + r) % size), c * unit]),
                                  16, bytes)

        return copy

    def reset(self) -> Any:
        """Inline: nothing attended to yet."""
        KS, NT = self.steps, self.columns // 8

        @T.inline
        def reset(acc, top, total):
            for n in T.unroll(NT):
                for j in T.unroll(2):
                    top[n, j] = T.float32(NEG_BIG)
                    total[n, j] = T.float32(0)
                for k in T.unroll(KS):
                    for j in T.unroll(4):
                        acc[k, n, j] = T.float32(0)

        return reset

    def attend(self) -> Any:
        """Inline: the warp's keys of stage `index`, the first of which is key `base`, go into acc, top and total."""
        spec, KS, MT, NT = self.spec, self.steps, self.key_tiles, self.columns // 8
        act, FP8 = spec.activation_dtype, spec.fp8
        MMA, PACK, SCALE, take = mma(act), pack(act), spec.scale * LOG2_E, pages_fp8.take(act)
        LIFT = float(pages_fp8.LIFT[act]) if FP8 else 0.0
        if FP8:
            SCALE *= 2.0 ** (pages_fp8.LACK[act] - pages_fp8.LIFT[act])

        def lifted(peak: Any) -> Any:
            """What is subtracted from a score for its weight, which is larger by 2^LIFT."""
            return peak - T.float32(LIFT) if LIFT else peak

        @T.inline
        def multiply(c, i, n, a, b, j):
            T.ptx[MMA](c[i, n, 0], c[i, n, 1], c[i, n, 2], c[i, n, 3], a[0], a[1], a[2], a[3], b[j, n, 0], b[j, n, 1],
                       c[i, n, 0], c[i, n, 1], c[i, n, 2], c[i, n, 3])

        @T.inline
        def scores_fp8(ring, warp, index, lane, query, score, m, frag, wide):
            # two blocks of 16 elements, rows g and g + 8 of each
            for k in T.unroll(KS // 2):
                part, row = T.meta_var(self.rows(warp, m, lane % 16))
                T.ptx[LDMATRIX](frag[0], frag[1], frag[2], frag[3],
                                ring.ptr_to([part, index, 0, self.chunk(row, 2 * k + lane // 16), 0]))
                for j in T.unroll(2):
                    for i in T.unroll(2):
                        take(wide, i, 2 + i, frag[2 * j + i])
                    for n in T.unroll(NT):
                        multiply(score, m, n, wide, query, 2 * k + j)

        @T.inline
        def outputs_fp8(ring, warp, index, lane, prob, acc, m, frag, wide):
            # two blocks of 16 elements, keys 2t and 2t + 8 on of each; even elements are the upper eight rows
            for k in T.unroll(KS // 2):
                part, row = T.meta_var(self.rows(warp, m, lane % 16))
                T.ptx[LDMATRIX_T](frag[0], frag[1], frag[2], frag[3],
                                  ring.ptr_to([part, index, 1, self.chunk(row, 2 * k + lane // 16), 0]))
                for j in T.unroll(2):
                    for i in T.unroll(2):
                        take(wide, 2 * i, 2 * i + 1, frag[2 * j + i])
                    for n in T.unroll(NT):
                        multiply(acc, 2 * k + j, n, wide, prob, m)

        @T.inline
        def attend(ring, warp, index, lane, base, length, query, acc, top, total):
            score = T.alloc_buffer((MT, NT, 4), "float32", scope="local")
            prob = T.alloc_buffer((MT, NT, 2), "uint32", scope="local")
            frag = T.alloc_buffer((4,), "uint32", scope="local")
            factor: T.float32
            peak: T.float32
            if FP8:
                wide = T.alloc_buffer((4,), "uint32", scope="local")
            for m in T.unroll(MT):
                for n in T.unroll(NT):
                    for j in T.unroll(4):
                        score[m, n, j] = T.float32(0)
                if FP8:
                    scores_fp8(ring, warp, index, lane, query, score, m, frag, wide)
            for k in T.unroll(0 if FP8 else KS):
                for m in T.unroll(MT):                               # inside: sums of different keys do not wait
                    part, row = T.meta_var(self.rows(warp, m, lane % 16))
                    T.ptx[LDMATRIX](frag[0], frag[1], frag[2], frag[3],
                                    ring.ptr_to([part, index, 0, self.chunk(row, 2 * k + lane // 16), 0]))
                    for n in T.unroll(NT):
                        multiply(score, m, n, frag, query, k)
            for n in T.unroll(NT):
                for m in T.unroll(MT):
                    for j in T.unroll(4):
                        key = T.meta_var(base + m * 16 + lane // 4 + j // 2 * 8)
                        live = T.meta_var(T.And(key < length, self.visible(key, length)))
                        score[m, n, j] = T.if_then_else(live, score[m, n, j] * T.float32(SCALE), T.float32("-inf"))
                for j in T.unroll(2):
                    peak = T.max(score[0, n, j], score[0, n, j + 2])
                    for m in T.unroll(MT - 1):
                        peak = T.max(peak, T.max(score[m + 1, n, j], score[m + 1, n, j + 2]))
                    for i in T.unroll(3):
                        peak = T.max(peak, shuffle_xor(peak, 4 << i))
                    peak = T.max(peak, top[n, j])
                    T.ptx[EXP2](factor, top[n, j] - peak)
                    top[n, j] = peak
                    total[n, j] = total[n, j] * factor
                    for m in T.unroll(MT):
                        for i in T.unroll(2):
                            T.ptx[EXP2](score[m, n, 2 * i + j], score[m, n, 2 * i + j] - lifted(peak))
                            total[n, j] = total[n, j] + score[m, n, 2 * i + j]
                    for k in T.unroll(KS):
                        for i in T.unroll(2):
                            acc[k, n, 2 * i + j] = acc[k, n, 2 * i + j] * factor
                for m in T.unroll(MT):
                    for j in T.unroll(2):
                        T.ptx[PACK](prob[m, n, j], score[m, n, 2 * j + 1], score[m, n, 2 * j])
                        T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](prob[m, n, j], prob[m, n, j])
            for m in T.unroll(MT):
                if FP8:
                    outputs_fp8(ring, warp, index, lane, prob, acc, m, frag, wide)
                for k in T.unroll(0 if FP8 else KS):
                    part, row = T.meta_var(self.rows(warp, m, lane % 8 + lane // 16 * 8))
                    T.ptx[LDMATRIX_T](frag[0], frag[1], frag[2], frag[3],
                                      ring.ptr_to([part, index, 1, self.chunk(row, 2 * k + lane // 8 % 2), 0]))
                    for n in T.unroll(NT):
                        multiply(acc, k, n, frag, prob, m)

        return attend

    def settle(self) -> Any:
        """Inline: what was summed in acc and total → outputs and weights as they are."""
        fp8, act, KS, NT = self.spec.fp8, self.spec.activation_dtype, self.steps, self.columns // 8
        lift, lack = pages_fp8.LIFT[act], pages_fp8.LACK[act]

        @T.inline
        def settle(acc, total):
            if fp8:
                for n in T.unroll(NT):
                    for j in T.unroll(2):
                        total[n, j] = total[n, j] * T.float32(2.0 ** -lift)
                    for k in T.unroll(KS):
                        for j in T.unroll(4):
                            acc[k, n, j] = acc[k, n, j] * T.float32(2.0 ** (lack - lift))

        return settle


def tile_range(spec: AttentionSpec, tile_keys: int) -> tuple[Any, Any]:
    """first_tile(length), last_tile(length): the tiles with a visible key, as expressions over int32."""
    window = spec.window

    def first(length: Any) -> Any:
        return T.max(length - window, 0) // tile_keys if window is not None else T.int32(0)

    def last(length: Any) -> Any:
        return (length + (tile_keys - 1)) // tile_keys

    return first, last
