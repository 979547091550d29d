"""What an x86 instruction set offers the CPU kernels: vector width, byte dot products, and vector functions that LLVM
would otherwise call one lane at a time. Three levels: AVX2 with FMA, AVX-512, and either with VNNI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relaxpack.errors import CompileError
from relaxpack.model_info import FP8
from relaxpack.target import TargetSpec

from .builder import T, const, hold, splat

Expr = Any


@dataclass(frozen=True)
class Isa:
    lanes: int   # float32 (and int32) lanes of one vector
    vnni: bool   # u8 x s8 dot product into int32 in one instruction

    @staticmethod
    def of(target: TargetSpec) -> Isa:
        """What the target's features give. Raises CompileError below AVX2, FMA and F16C."""
        have = set(target.features)
        if not {"avx2", "fma", "f16c"} <= have:
            raise CompileError(f"target {target.name}: the CPU kernels need AVX2, FMA and F16C, it has "
                               f"{', '.join(sorted(have)) or 'none of them'}; build for cpu:x86-64-v3 or newer")
        wide = {"avx512f", "avx512bw", "avx512vl"} <= have
        # The 256-bit VNNI intrinsic selects the AVX-512VL or the AVX-VNNI encoding, whichever the CPU has.
        return Isa(16 if wide else 8, "avx512vnni" in have if wide else "avxvnni" in have)

    # ---- bytes ----
    def dot(self, codes: Sequence[Expr], values: Sequence[Expr], start: Expr | None, largest: int,
            chains: int = 1) -> Expr:
        """int32 lanes: start + sum over pieces and over 4 neighbouring bytes of codes (u8) * values (s8).

        `chains`: VNNI adds into its result, and one row alone would wait for the latency of each instruction.

        `largest` bounds the codes: without VNNI products are summed in int16, whose range says how many pieces can
        be added before widening. Codes above 127 do not fit there at all; use `signed_dot`.
        """
        if self.vnni:
            name = f"llvm.x86.avx512.vpdpbusd.{self.lanes * 32}"
            sums = [start if start is not None else self.zero_int()] + [self.zero_int()] * (chains - 1)
            for i, (u, s) in enumerate(zip(codes, values, strict=True)):
                sums[i % chains] = self.pure(f"int32x{self.lanes}", name, sums[i % chains], u, s)
            total = sums[0]
            for other in sums[1:]:
                total = total + other
            return total
        assert largest <= 127, largest
        fit = max(1, 32767 // (2 * largest * 127))
        products = [self.pair_products(u, s) for u, s in zip(codes, values, strict=True)]
        total = start
        for first in range(0, len(products), fit):
            short = products[first]
            for p in products[first + 1:first + fit]:
                short = short + p
            wide = self.widen_pairs(short)
            total = wide if total is None else total + wide
        return total

    def signed_dot(self, codes: Sequence[Expr], values: Sequence[Expr]) -> Expr:
        """As `dot`, for s8 codes without VNNI: |code| * (value with the code's sign)."""
        zero = splat(T.int8(0), self.lanes * 4)
        total = None
        for c, s in zip(codes, values, strict=True):
            magnitude = T.reinterpret(f"uint8x{self.lanes * 4}", T.Select(c < zero, zero - c, c))
            wide = self.widen_pairs(self.pair_products(magnitude, T.Select(c < zero, zero - s, s)))
            total = wide if total is None else total + wide
        return total

    def pair_products(self, u: Expr, s: Expr) -> Expr:
        name = "llvm.x86.avx512.pmaddubs.w.512" if self.lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
        return self.pure(f"int16x{self.lanes * 2}", name, u, s)

    def widen_pairs(self, short: Expr) -> Expr:
        name = "llvm.x86.avx512.pmaddw.d.512" if self.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        return self.pure(f"int32x{self.lanes}", name, short, splat(T.int16(1), self.lanes * 2))

    def zero_int(self) -> Expr:
        return splat(T.int32(0), self.lanes)

    @staticmethod
    def pure(dtype: str, name: str, *args: Expr) -> Expr:
        return T.call_llvm_pure_intrin(dtype, name, *args)


def f32_type(lanes: int) -> str:
    return "float32" if lanes == 1 else f"float32x{lanes}"


def _suffix(lanes: int) -> str:
    return ".f32" if lanes == 1 else f".v{lanes}f32"


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    return T.fma(a, b, c)


def vmax(a: Expr, b: Expr, lanes: int) -> Expr:
    return T.call_llvm_pure_intrin(f32_type(lanes), "llvm.maxnum" + _suffix(lanes), a, b)


def vabs(a: Expr, lanes: int) -> Expr:
    return T.call_llvm_pure_intrin(f32_type(lanes), "llvm.fabs" + _suffix(lanes), a)


def nearest(a: Expr, lanes: int) -> Expr:
    """Round half to even."""
    return T.call_llvm_pure_intrin(f32_type(lanes), "llvm.nearbyint" + _suffix(lanes), a)


def _halves(x: Expr, lanes: int) -> tuple[Expr, Expr]:
    half = lanes // 2
    low, high = (T.Shuffle([x], [T.int32(i) for i in range(s, s + half)]) for s in (0, half))
    return low, high


def reduce_sum(x: Expr, lanes: int, dtype: str = "float32") -> Expr:
    """Sum of the lanes as a tree. (llvm.vector.reduce.fadd without reassociation is a serial chain.)"""
    while lanes > 1:
        low, high = _halves(hold(x, lanes, dtype), lanes)
        x, lanes = low + high, lanes // 2
    return x


def reduce_max(x: Expr, lanes: int) -> Expr:
    while lanes > 1:
        low, high = _halves(hold(x, lanes), lanes)
        lanes //= 2
        x = vmax(low, high, lanes)
    return x


_LN2_HI, _LN2_LO = 0.693359375, -2.12194440e-4
# exp(r) on |r| <= ln2/2 as 1 + r + r^2 * p(r): Taylor to degree 7, remainder below 1e-8.
_EXP = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)


def exp(x: Expr, lanes: int) -> Expr:
    """e^x with relative error below 2e-7; arguments below -87 give a number below 2e-38, above 88 are clamped."""
    i32 = "int32" if lanes == 1 else f"int32x{lanes}"
    x = hold(T.max(T.min(x, const(88.0, lanes)), const(-87.0, lanes)), lanes)
    n = hold(nearest(x * const(1.4426950408889634, lanes), lanes), lanes)
    r = hold(fma(n, const(-_LN2_LO, lanes), fma(n, const(-_LN2_HI, lanes), x)), lanes)
    p = const(_EXP[0], lanes)
    for c in _EXP[1:]:
        p = fma(p, r, const(c, lanes))
    p = fma(p, r * r, r + const(1.0, lanes))
    power = T.shift_left(T.Cast(i32, n) + splat(T.int32(127), lanes), splat(T.int32(23), lanes))
    return p * T.reinterpret(f32_type(lanes), power)


def silu(x: Expr, lanes: int) -> Expr:
    x = hold(x, lanes)
    return x / (const(1.0, lanes) + exp(const(0.0, lanes) - x, lanes))


def gelu(x: Expr, lanes: int) -> Expr:
    """With the tanh approximation: 0.5 x (1 + tanh y) = x / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)."""
    x = hold(x, lanes)
    y = x * (const(1.0, lanes) + const(0.044715, lanes) * x * x)
    return x / (const(1.0, lanes) + exp(const(-1.5957691216057308, lanes) * y, lanes))


def to_float(value: Expr, dtype: str, lanes: int) -> Expr:
    """A loaded vector of a float weight or KV dtype ("uint16" stands for bfloat16 bits, e4m3 codes are uint8) as float32."""
    if dtype == "float32":
        return value
    if dtype == "uint16":
        u32 = "uint32" if lanes == 1 else f"uint32x{lanes}"
        return T.reinterpret(f32_type(lanes), T.shift_left(T.Cast(u32, value), splat(T.uint32(16), lanes)))
    if dtype == FP8:
        return widen(value, lanes) * const(256.0, lanes)
    return T.Cast(f32_type(lanes), value)


def widen(codes: Expr, lanes: int) -> Expr:
    """float32 of e4m3 codes, divided by 256. Sign, exponent and mantissa keep their order in float16; subnormals too are
    what they should be, and the conversion to float32 takes them at full speed."""
    short = "int16" if lanes == 1 else f"int16x{lanes}"
    byte, half, single = (f"{dtype}{short.removeprefix('int16')}" for dtype in ("int8", "float16", "float32"))
    signed = T.Cast(short, T.reinterpret(byte, codes))       # the sign fills the upper byte
    bits = T.bitwise_and(T.shift_left(signed, splat(T.int16(7), lanes)), splat(T.int16(~0x4000), lanes))
    return T.Cast(single, T.reinterpret(half, bits))


def to_e4m3(value: Expr, lanes: int) -> Expr:
    """float32 → e4m3 codes (uint8): to nearest, ties to even; what is beyond 448 is 448, NaN 0x7F."""
    i32, u8 = ("int32", "uint8") if lanes == 1 else (f"int32x{lanes}", f"uint8x{lanes}")

    def integer(number: int) -> Expr:
        return splat(T.int32(number), lanes)

    value = hold(value, lanes)
    size = hold(vabs(value, lanes), lanes)
    size = hold(T.Select(size <= const(448.0, lanes), size, const(448.0, lanes)), lanes)
    bits = T.reinterpret(i32, size)
    odd = T.bitwise_and(T.shift_right(bits, integer(20)), integer(1))
    normal = T.shift_right(bits + odd + integer(0x7FFFF), integer(20)) - integer(120 << 3)
    # below 2^-6 steps are 2^-9, as they are of float32 numbers from 2^14 on
    subnormal = T.bitwise_and(T.reinterpret(i32, hold(size + const(16384.0, lanes), lanes)), integer(15))
    code = T.Select(size < const(2.0**-6, lanes), subnormal, normal)
    pattern = T.reinterpret(i32, value)
    sign = T.bitwise_and(T.shift_right(pattern, integer(24)), integer(0x80))
    number = T.bitwise_and(pattern, integer(0x7FFFFFFF)) <= integer(0x7F800000)      # `value == value` would be simplified
    return T.Cast(u8, T.Select(number, T.bitwise_or(code, sign), integer(0x7F)))


def prefetch(address: Expr) -> None:
    """Ask for a cache line that will be read once, in all levels."""
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, T.int32(0), T.int32(3), T.int32(1)))
