"""The products of `gemm_many`: four wgmma for each k tile of the ring, into the sums of the tile, or into sums of their own
that are added in float32 every few k tiles (`promote`). No kernel lives here."""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.gemm_few import WG_FENCE
from relaxpack.schedules.kernels.cuda.many_operands import E4M3Operands, FloatOperands
from relaxpack.schedules.kernels.cuda.many_tile import BK, BM, ManyTile
from tvm.script import tirx as T


@T.inline
def fence(sums, size):
    for i in T.unroll(size):
        T.cuda.func_call("wg_fence", sums[i], source_code=WG_FENCE)


class ManyProduct:
    """`multiply` a stage into `sums`, or `multiply_apart` into `apart`, `apart_sums` registers; `release(slot, condition)`
    gives a stage back to the ring. `inputs` and `weights` are the matrix descriptors of stage 0."""

    def __init__(self, tile: ManyTile, operands: FloatOperands | E4M3Operands, promote: int) -> None:
        PIECES = 2 if promote and tile.sums > 96 else 1         # parts of the tile that are promoted one after the other
        APART, promoted = tile.sums // PIECES, promote > 0      # sums of a part
        assert not promote or (tile.columns % (16 * PIECES) == 0 and (PIECES == 1 or promote == 1))
        self.apart_sums = APART if promoted else 1
        MMA, TAIL, weights_at = operands.mma(tile.columns // PIECES), operands.tail, operands.at
        A16, B16 = BM * BK * 2 // 16, tile.columns * BK * 2 // 16       # stage strides in descriptor units
        PART = tile.columns // PIECES

        def accumulators(sums: Any) -> list[Any]:
            return [sums[i] for i in range(APART)]

        @T.inline
        def multiply(sums, first, add, stage, inputs, weights):
            """This stage into the sums of the columns from `first` on; not `add`: over what is there."""
            T.ptx.wgmma.fence.sync.aligned()
            for k in T.unroll(BK // 16):
                T.ptx[MMA](*accumulators(sums),
                           inputs + T.Cast("uint64", stage * A16 + k * 2),
                           weights + T.Cast("uint64", stage * B16 + weights_at(k, first)),
                           T.Or(k > 0, add) if promoted else T.bool(True), *TAIL)
            T.ptx.wgmma.commit_group.sync.aligned()

        @T.inline
        def add_apart(c, apart, first):
            T.ptx.wgmma.wait_group.sync.aligned(0)
            fence(apart, APART)
            for i in T.unroll(APART):
                c[first + i] = c[first + i] + apart[i]

        @T.inline
        def multiply_apart(c, apart, kt, count, stage, previous, inputs, weights, release):
            """Stage `kt` of `count` into sums of their own, which are added after `promote` stages and at the end."""
            if promote == 1:
                for piece in T.unroll(PIECES):
                    multiply(apart, piece * PART, T.bool(False), stage, inputs, weights)
                    add_apart(c, apart, piece * APART)
                release(stage, T.bool(True))
            else:
                multiply(apart, 0, kt % promote > 0, stage, inputs, weights)
                if T.Or(kt % promote == promote - 1, kt == count - 1):
                    add_apart(c, apart, 0)
                    release(previous, kt % promote > 0)
                    release(stage, T.bool(True))
                else:
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    release(previous, kt % promote > 0)

        self.multiply, self.multiply_apart = multiply, multiply_apart
