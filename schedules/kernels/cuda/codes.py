"""How kernels take packed 4-bit and 8-bit weights into registers: loads of a lane's codes and scales, and the exact small
integers that the tensor cores multiply. The layout is explained in packing.py; no kernels here."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.fragments import low
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

LOAD_CODES = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32"
LOAD4, LOAD2 = "ld.global.nc.v4.b32", "ld.global.nc.v2.b32"
AND_OR = 0xEA                   # truth table of a & b | c
# Bit patterns: a power of two whose lowest mantissa bits have weight 1 (128, 1024), and 1.0.
BASE = {"bfloat16": 0x4300, "float16": 0x6400}
SIGNS = 0x80008000
# 16, whose mantissa's four highest bits then have weights 8 to 1, and the place of the lowest of these bits.
SIXTEEN = {"bfloat16": 0x4180, "float16": 0x4C00}
TOP = {"bfloat16": 3, "float16": 6}
ONE = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}


def twice(half: int) -> int:
    return half * 0x10001


def sixteen(dtype: str):
    """Of a word of 4-bit codes, number 2p and 2p + 1 as 16 + c into a[slot]: the lowest exponent at which four bits are the
    whole mantissa."""
    base, top = twice(SIXTEEN[dtype]), TOP[dtype]

    @T.inline
    def decode(a, slot, word, p):
        a[slot] = (word << T.Cast("uint32", T.max(top - p * 4, 0))) >> T.Cast("uint32", T.max(p * 4 - top, 0))
        T.ptx["lop3.b32"](a[slot], a[slot], T.uint32(twice(15 << top)), T.uint32(base), AND_OR)

    return decode


class Codes:
    """Facts and device pieces for one weight format and activation dtype. `chunks` is the number of 64-value chunks of a
    packed row. Registers of a piece (16 rows x 64 values): `words` of codes, `scale_words` of scales per lane."""

    def __init__(self, weight: WeightFormat, dtype: str, chunks: int) -> None:
        self.weight, self.dtype, self.chunks = weight, dtype, chunks
        self.words, self.one = weight.bits, ONE[dtype]
        self._arrange()
        self.load = self._load()
        self.decode = self._decode()

    def _arrange(self) -> None:
        """Groups and scales of a piece."""
        weight = self.weight
        assert weight.group_size in (16, 32) and weight.bits in (4, 8)
        self.wide = weight.group_size == 32                 # one group per half chunk, else two
        self.steps, self.groups = (2, 1) if self.wide else (1, 2)   # steps of 16 per group, groups per half chunk
        self.stored, self.f32 = weight.minimum == "stored", weight.scale_dtype == "float32"
        self.scales = 4 if self.wide else 8                 # rows g, g + 8 x groups of a chunk
        self.scale_words = self.scales if self.f32 else self.scales // 2

    def scale(self, registers, base, h, group):
        """Scale of row g + 8h in `group` of the chunk, as float32; its registers start at `base`."""
        index = h * (self.scales // 2) + group
        if self.f32:
            return T.cuda.uint_as_float(registers[base + index])
        return low("float16", registers[base + index // 2] >> T.Cast("uint32", index % 2 * 16))

    def place(self, lane, e):
        """Index of the e-th four words of a lane's codes in a piece."""
        return (e * 32 + lane) * 4

    def pair(self, registers, base, j, h, p):
        """Register with codes 2p, 2p+1 of row g + 8h in half j at the bottom of each half word."""
        if self.weight.bits == 4:
            return registers[base + j * 2 + h] >> T.Cast("uint32", p * 4)
        return registers[base + j * 4 + h * 2 + p // 2] >> T.Cast("uint32", p % 2 * 8)

    def less(self, registers, base, h):
        """What `decode` adds to the 4-bit codes of row g + 8h under the exponent of BASE: what that exponent and the format
        take away."""
        return T.uint32(twice(BASE[self.dtype] + (8 if self.weight.minimum == "-8*scale" else 0)) | SIGNS)

    def zero(self, registers, base, h, more):
        """What the format takes away of the 4-bit codes of row g + 8h, and `more`, as float32."""
        return T.float32(more + (8 if self.weight.minimum == "-8*scale" else 0))

    def first_scale(self, strip, chunk, g):
        """Index of a lane's first scale in a chunk."""
        return ((strip * self.chunks + chunk) * 8 + g) * self.scales

    def step(self, p, d):
        """Which of the two steps of 16 in a half chunk."""
        return p if self.wide else d

    def _load(self):
        words, scale_words, scales_per_lane, f32 = self.words, self.scale_words, self.scales, self.f32

        @T.inline
        def load_scales(registers, base, buffer, first):
            if f32:
                for e in T.unroll(scale_words // 4):
                    T.ptx[LOAD4](registers[base + e * 4], registers[base + e * 4 + 1], registers[base + e * 4 + 2],
                                 registers[base + e * 4 + 3], buffer.ptr_to([first + e * 4]))
            elif scale_words == 2:
                T.ptx[LOAD2](registers[base], registers[base + 1], buffer.ptr_to([first]))
            else:
                T.ptx[LOAD4](registers[base], registers[base + 1], registers[base + 2], registers[base + 3],
                             buffer.ptr_to([first]))

        stored, chunks, place, self.load_scales = self.stored, self.chunks, self.place, load_scales

        @T.inline
        def load(c, o, sc, mn, so, codes, scales, minimums, strip, chunk, lane, there):
            """Codes of a piece into c[o..], its scales into sc[so..], minimums into mn[so..]; zeros unless `there`."""
            piece = T.meta_var(strip * chunks + chunk)
            if there:
                for e in T.unroll(words // 4):
                    T.ptx[LOAD_CODES](c[o + e * 4], c[o + e * 4 + 1], c[o + e * 4 + 2], c[o + e * 4 + 3],
                                      codes.ptr_to([piece * (words * 32) + place(lane, e)]))
                load_scales(sc, so, scales, (piece * 8 + lane // 4) * scales_per_lane)
                if stored:
                    load_scales(mn, so, minimums, (piece * 8 + lane // 4) * scales_per_lane)
            else:
                for e in T.unroll(words):
                    c[o + e] = T.uint32(0)
                for e in T.unroll(scale_words):
                    sc[so + e] = T.uint32(0)
                    if stored:
                        mn[so + e] = T.uint32(0)

        return load

    def _decode(self):
        dtype, bits, one = self.dtype, self.weight.bits, self.one
        fma = f"fma.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}x2"
        base = twice(BASE[dtype])
        minus_base = base | SIGNS

        @T.inline
        def decode(a, slot, spare, word, less):
            """Two codes as two numbers in a[slot]: put them under the exponent of BASE, add `less`. One instruction masks
            and sets. a[spare] is clobbered."""
            if bits == 4:
                T.ptx["lop3.b32"](a[slot], word, T.uint32(0x000F000F), T.uint32(base), AND_OR)
                T.ptx[fma](a[slot], a[slot], T.uint32(one), less)
            else:
                T.ptx["lop3.b32"](a[slot], word, T.uint32(0x007F007F), T.uint32(base), AND_OR)
                T.ptx["lop3.b32"](a[spare], word, T.uint32(0x00800080), T.uint32(minus_base), AND_OR)
                T.ptx[fma](a[slot], a[slot], T.uint32(one), a[spare])

        return decode
