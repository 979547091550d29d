"""How the residual reaches the sums of `gemm_many`: by TMA through the ring of stages, behind the last k tile of a tile, so
that it is there when the sums are; or, where K is split or y is float32, by the threads that add it. No kernel here."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.fragments import LDMATRIX, high, low
from relaxpack.schedules.kernels.cuda.many_operands import TMA_LOAD
from relaxpack.schedules.kernels.cuda.many_tile import BK, BM, BOX_SWIZZLE, ManyTile
from tvm.script import tirx as T


def swizzle(chunk, lane, box: int):
    """Where the 16-byte chunk of row lane % 16 lies in a box of so many columns."""
    return chunk ^ {64: lane % 8, 32: lane // 2 % 4, 16: lane // 4 % 2}[box]


class RingResidual:
    """`load` by the producer, `add` by the consumers, each walking through `stages` stages of the ring."""

    def __init__(self, tile: ManyTile, dtype: str) -> None:
        EB, BOXES, OUT, GATES = tile.box, tile.boxes, tile.out_features, tile.gates
        BOX = BM * EB                                           # elements of a box
        IN_A, IN_STAGE = BM * BK // BOX, BM * BK // BOX + tile.columns * BK // BOX     # boxes that fit x's part, the stage
        RT = -(-BOXES // IN_STAGE)

        @T.inline
        def encode(r_map, residual, t):
            T.call_packed("runtime.cuTensorMapEncodeTiled", r_map, dtype, 2, residual.data,
                          OUT, t, OUT * 2, EB, T.min(t, BM), 1, 1, 0, BOX_SWIZZLE[EB], 2, 0)

        @T.inline
        def load(As, Bs, full, empty, stage, phase, r_map, loaded, row0, column0, advance):
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

        @T.inline
        def add(c, word, As, Bs, full, stage, phase, wid, lane, release, advance):
            for r in T.unroll(RT):
                T.cuda.mbarrier_wait(full.ptr_to([stage]), phase)
                for m in T.unroll(IN_STAGE):
                    if r * IN_STAGE + m < BOXES:
                        for j in T.unroll(EB // 16):
                            at = T.meta_var((wid * 16 + lane % 16) * EB + swizzle(j * 2 + lane // 16, lane, EB) * 8)
                            o = T.meta_var((r * IN_STAGE + m) * (EB // 2) + j * 8)
                            if m < IN_A:
                                T.ptx[LDMATRIX](word[0], word[1], word[2], word[3], As.ptr_to([stage, m * BOX + at]))
                            else:
                                T.ptx[LDMATRIX](word[0], word[1], word[2], word[3],
                                                Bs.ptr_to([stage, (m - IN_A) * BOX + at]))
                            for e in T.unroll(4):
                                c[o + e * 2] = c[o + e * 2] + low(dtype, word[e])
                                c[o + e * 2 + 1] = c[o + e * 2 + 1] + high(dtype, word[e])
                release(stage, T.bool(True))
                advance()

        self.encode, self.load, self.add = encode, load, add


class FetchedResidual:
    """Of 8 columns from 8 * i of a block's part of the tile: `fetch` asks for a thread's share, `words[at]` and the next,
    `add` adds it."""

    def __init__(self, tile: ManyTile, dtype: str) -> None:
        OUT = tile.out_features

        @T.inline
        def fetch(words, residual, i, at, row0, first_column, rows, wid, lane):
            for h in T.unroll(2):
                row = T.meta_var(row0 + wid * 16 + lane // 4 + h * 8)
                n = T.meta_var(first_column + i * 8 + lane % 4 * 2)
                if T.And(row < rows, n < OUT):
                    T.ptx["ld.global.b32"](words[at + h], residual.ptr_to([row, n]))

        @T.inline
        def add(c, words, i, at):
            for h in T.unroll(2):
                o = T.meta_var(i * 4 + h * 2)
                c[o] = c[o] + low(dtype, words[at + h])
                c[o + 1] = c[o + 1] + high(dtype, words[at + h])

        self.fetch, self.add = fetch, add
