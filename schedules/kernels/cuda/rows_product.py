"""What kernels for few rows and quantised weights share (gemm_rows_quant.py and its kin): rounds, x in the order of the
packed codes, and the product of one group of codes on mma.m16n8k16, scaled and added in float32. No kernel lives here."""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes import sixteen
from relaxpack.schedules.kernels.cuda.common import mma_name
from tvm.script import tirx as T

LOAD_X4, LOAD_X2 = "ld.global.v4.b32", "ld.global.v2.b32"


def register_sets(rounds: int, ahead: int) -> int:
    """Sets of registers for weights: that of the round which is multiplied, and those on their way."""
    return ahead + 1 if ahead < 2 else min(ahead + 1, rounds)


@T.inline
def begin_rounds(rounds, ahead, load):
    """Ask for the weights of the first rounds, which do not depend on the kernel before: one, or `ahead` of them."""
    for i in T.unroll(max(1, min(ahead, rounds))):
        load(i, i)


@T.inline
def run_rounds(rounds, ahead, load, load_x, multiply):
    """A warp's rounds of K: `load(round, set)` brings weights into a set of registers, `load_x(round)` x, `multiply(set)`
    uses both. `begin_rounds` came before, and the first round's x is there. `ahead`: for so many rounds the weights are on
    their way while one is multiplied."""
    if ahead > 0:
        sets = T.meta_var(register_sets(rounds, ahead))
        for r in T.serial(-(-rounds // sets)):
            for s in T.unroll(sets):
                if r * sets + s + ahead < rounds:
                    load(r * sets + s + ahead, (s + ahead) % sets)
                if r * sets + s < rounds:
                    if r * sets + s > 0:
                        load_x(r * sets + s)
                    multiply(s)
    else:
        for r in T.serial(rounds):
            if r > 0:
                load(r, 0)
                load_x(r)
            multiply(0)


class RowsProduct:
    """For weights in codes `F` (codes_fp8.codes_of) and 8 * `NT` rows of x. `u` is the place of a chunk of 64 values of K
    among those of x that lie in registers `v`, `j` its half, `d` a group in that half. `apart`: minimums_product.py adds
    minimums and takes away the 16 that 4-bit codes then have too much."""

    def __init__(self, F: Any, NT: int, dtype: str, K: int, exact: bool, apart: bool = False) -> None:
        MMA = mma_name(dtype)
        shifted = sixteen(dtype) if apart and F.weight.bits == 4 else None
        stored, wide, one, decode = F.stored, F.wide, F.one, F.decode

        @T.inline
        def load_x(v, x, u, chunk, first_row, rows, g, q, clear):
            """Lane (g, q)'s share of a chunk; `clear`: rows and columns that are not there become zero (else they stay)."""
            for n in T.unroll(NT):
                for j in T.unroll(2):
                    m = T.meta_var(first_row + n * 8 + g)
                    o = T.meta_var(((u * NT + n) * 2 + j) * 4)
                    if clear:
                        for e in T.unroll(4):
                            v[o + e] = T.uint32(0)
                    if wide:
                        k = T.meta_var(chunk * 64 + j * 32 + q * 8)
                        if T.And(m < rows, T.bool(True) if exact else k < K):
                            T.ptx[LOAD_X4](v[o], v[o + 1], v[o + 2], v[o + 3], x.ptr_to([m, k]))
                    else:
                        for p in T.unroll(2):
                            k = T.meta_var(chunk * 64 + j * 32 + p * 16 + q * 4)
                            if T.And(m < rows, T.bool(True) if exact else k < K):
                                T.ptx[LOAD_X2](v[o + p * 2], v[o + p * 2 + 1], x.ptr_to([m, k]))

        @T.inline
        def add_x(sums, v, u, j, d):
            """Where minimums are stored: sums of x over the group, by a matrix of ones."""
            if stored:
                for n in T.unroll(NT):
                    for e in T.unroll(4):
                        sums[n * 4 + e] = T.float32(0)
                    for p in T.unroll(F.steps):
                        w = T.meta_var(((u * NT + n) * 2 + j) * 4 + F.step(p, d) * 2)
                        T.ptx[MMA](sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3], T.uint32(one),
                                   T.uint32(one), T.uint32(one), T.uint32(one), v[w], v[w + 1],
                                   sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3])

        @T.inline
        def multiply(acc, s, part, a, sums, c, o, sc, mn, so, v, u, j, d):
            """Into strip `s` of `acc`; the chunk's codes from c[o], its scales and minimums from sc[so], mn[so]."""
            for p in T.unroll(F.steps):
                for e in T.unroll(4):               # e: row g + 8 * (e % 2), pair e // 2 of the step
                    if shifted is not None:
                        shifted(a, p * 4 + e, c[o + j * 2 + e % 2], F.step(p, d) * 2 + e // 2)
                    else:
                        decode(a, p * 4 + e, 8, F.pair(c, o, j, e % 2, F.step(p, d) * 2 + e // 2),
                               F.less(sc, so, e % 2))
            for n in T.unroll(NT):
                for e in T.unroll(4):
                    part[e] = T.float32(0)
                for p in T.unroll(F.steps):
                    w = T.meta_var(((u * NT + n) * 2 + j) * 4 + F.step(p, d) * 2)
                    T.ptx[MMA](part[0], part[1], part[2], part[3], a[p * 4], a[p * 4 + 1], a[p * 4 + 2], a[p * 4 + 3],
                               v[w], v[w + 1], part[0], part[1], part[2], part[3])
                for e in T.unroll(4):
                    i = T.meta_var((s * NT + n) * 4 + e)
                    acc[i] = acc[i] + part[e] * F.scale(sc, so, e // 2, j * F.groups + d)
                    if stored and not apart:
                        acc[i] = acc[i] + sums[n * 4 + e % 2] * F.scale(mn, so, e // 2, j * F.groups + d)

        self.load_x, self.add_x, self.multiply = load_x, add_x, multiply
