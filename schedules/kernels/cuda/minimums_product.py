"""What minimums add to a product, and what codes multiplied as 16 + c have too much, for a stage of four groups of 32 values
of K at once (gemm_few_bulk.py): y += m S with the float32 sums S of x over each group, both on tensor cores. No kernel here.

mma.m16n8k16 with x as its first operand (rows g and g + 8 are two halves of row g, as they lie in registers) and a matrix
with ones in the columns of the group (each group has two) as its second leaves the sum over group q of row g in lane (g, q),
which is where mma in tf32 wants its second operand. tf32 has 11 bits, so a float32 is taken as the sum of two, and the
product is good to some 21 bits.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_scaled import CHUNKS, SHARED2
from relaxpack.schedules.kernels.cuda.common import mma_name
from relaxpack.schedules.kernels.cuda.fragments import low
from tvm.script import tirx as T

MMA8, MMA4 = (f"mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32" for k in (8, 4))
UPPER = 0xFFFFE000          # the bits of a float32 that tf32 has


class MinimumsProduct:
    """For stored minimums of weights in `codes` and 8 * `NT` rows of x, in registers as RowsProduct.load_x has them.
    Registers: `sums` (4 NT) of a stage, `split` (2 NT), `f` and `m` (4 each)."""

    def __init__(self, codes: Any, NT: int, dtype: str) -> None:
        assert codes.wide and codes.stored and CHUNKS == 2
        MMA, one, f32, words = mma_name(dtype), codes.one, codes.f32, codes.scale_words
        excess = 16 if codes.weight.bits == 4 else 0

        @T.inline
        def clear(sums):
            for i in T.unroll(NT * 4):
                sums[i] = T.float32(0)

        @T.inline
        def add_x(sums, keep, v, u, j, g):
            """Half j of chunk u of the stage."""
            keep[0] = T.if_then_else(g // 2 == u * 2 + j, T.uint32(one), T.uint32(0))
            for n in T.unroll(NT):
                i = T.meta_var(n * 4)
                w = T.meta_var((n * 2 + j) * 4)
                T.ptx[MMA](sums[i], sums[i + 1], sums[i + 2], sums[i + 3], v[w], v[w + 1], v[w + 2], v[w + 3],
                           keep[0], keep[0], sums[i], sums[i + 1], sums[i + 2], sums[i + 3])

        @T.inline
        def halve(pair, i, value):
            """A float32 as the sum of two numbers of tf32."""
            pair[i] = T.cuda.float_as_uint(value) & T.uint32(UPPER)
            pair[i + 1] = T.cuda.float_as_uint(value - T.cuda.uint_as_float(pair[i]))

        @T.inline
        def halve_sums(split, sums):
            for n in T.unroll(NT):
                halve(split, n * 2, sums[n * 4] + sums[n * 4 + 2])

        @T.inline
        def load(f, o, word, buffer, stage, strip, g, q):
            """Into f[o], f[o + 1]: of rows g and g + 8 of a strip, what group q of the stage has in `buffer`."""
            first = T.meta_var((strip * CHUNKS + q // 2) * (8 * words) + g * words)
            if f32:
                for h in T.unroll(2):
                    f[o + h] = T.cuda.uint_as_float(buffer[stage, first + h * 2 + q % 2])
            else:
                T.ptx[SHARED2](word[0], word[1], buffer.ptr_to([stage, first]))
                for h in T.unroll(2):
                    f[o + h] = low("float16", word[h] >> T.Cast("uint32", q % 2 * 16))

        @T.inline
        def add(acc, r, f, m, split, scales, minimums, stage, strip, g, q):
            """Into strip r of `acc`; `strip` counts in the block."""
            load(f, 0, m, minimums, stage, strip, g, q)
            if excess > 0:
                load(f, 2, m, scales, stage, strip, g, q)
                for h in T.unroll(2):
                    f[h] = f[h] - f[h + 2] * T.float32(excess)
            for h in T.unroll(2):
                halve(m, h * 2, f[h])
            for n in T.unroll(NT):          # both parts of m times the upper of S, and the upper of m times the lower of S
                i = T.meta_var((r * NT + n) * 4)
                T.ptx[MMA8](acc[i], acc[i + 1], acc[i + 2], acc[i + 3], m[0], m[2], m[1], m[3], split[n * 2], split[n * 2],
                            acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
                T.ptx[MMA4](acc[i], acc[i + 1], acc[i + 2], acc[i + 3], m[0], m[2], split[n * 2 + 1],
                            acc[i], acc[i + 1], acc[i + 2], acc[i + 3])

        self.clear, self.add_x, self.halve_sums, self.add = clear, add_x, halve_sums, add
