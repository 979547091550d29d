"""Bias and gate of `gemm_many`, on the sums in registers. No kernel lives here."""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.fragments import EXP2, LOG2_E
from relaxpack.schedules.kernels.cuda.many_tile import ManyTile
from tvm.script import tirx as T

GELU = 2 * (2 / 3.141592653589793) ** 0.5 * LOG2_E


def bias_of(tile: ManyTile, N: int, whole: bool) -> Any:
    """`add_bias(c, bias, column, lane)`: to the sums of a block's columns from `column` of N on; `whole`: there are no
    columns behind the last of the weight."""
    OWN = tile.own_sums

    @T.inline
    def add_bias(c, bias, column, lane):
        for i in T.unroll(OWN // 4):
            n = T.meta_var(column + i * 8 + lane % 4 * 2)
            if T.bool(True) if whole else n < N:
                for e in T.unroll(4):
                    c[i * 4 + e] = c[i * 4 + e] + bias[n + e % 2]

    return add_bias


def gate_of(tile: ManyTile, glu: str | None) -> Any:
    """`multiply_gate(c, extra)`: blocks of 8 gates and their 8 partners become 8 products in the first half of the sums."""
    OWN = tile.own_sums

    def exponent(gate):
        """log2 of exp(-gate), or for "geglu" of exp(-2 y) with y = sqrt(2 / pi) (gate + 0.044715 gate^3)."""
        if glu == "swiglu":
            return gate * T.float32(-LOG2_E)
        return gate * (gate * gate * T.float32(-0.044715 * GELU) - T.float32(GELU))

    @T.inline
    def multiply_gate(c, extra):
        """gate / (1 + 2^exponent) * up, two with one reciprocal: half of an epilogue is waiting for ex2, rcp. The bound
        keeps the product of both denominators finite; the gate is below 1e-16 there."""
        for i in T.unroll(OWN // 8):
            for h in T.unroll(2):
                o = T.meta_var(i * 8 + h * 2)
                for e in T.unroll(2):
                    T.ptx[EXP2](extra[e], T.min(exponent(c[o + e]), T.float32(60)))
                    extra[e] = extra[e] + T.float32(1)
                T.ptx["rcp.approx.ftz.f32"](extra[2], extra[0] * extra[1])
                for e in T.unroll(2):
                    c[i * 4 + h * 2 + e] = c[o + e] * c[o + 4 + e] * (extra[2] * extra[1 - e])

    return multiply_gate
