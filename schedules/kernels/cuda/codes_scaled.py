"""How packed weights become 16-bit numbers of the activations' type in registers, scales included: what wgmma takes when it
multiplies weights from registers. The codes lie in shared memory in the order of packing.py; no kernels here.

A code is an exact small number c. Where scale s and minimum m are exact in the 16-bit type, c s + m is rounded once. Else
s is split into a high and a low number of that type and c s = c high + c low: with c low (nearly) exact that rounds once
too, to u |w| (1 + 2^-8) at most, u = 2^-8 for bfloat16 and 2^-11 for float16. A minimum is first moved to the middle of the
codes, so that what is left of it is small; it costs at most 2 u |m + middle s| more.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes import AND_OR, BASE, ONE, twice
from relaxpack.schedules.kernels.cuda.codes_fp8 import codes_of
from relaxpack.schedules.kernels.cuda.fragments import SHORT, low, pack
from relaxpack.weight_format import WHOLE_ROW, WeightFormat
from tvm.script import tirx as T

MINUS_ZERO = 0x80008000
SHARED4, SHARED2 = "ld.shared.v4.b32", "ld.shared.v2.b32"
FIRST_TWICE, SECOND_TWICE = 0x1010, 0x3232      # prmt: one half of a register in both halves
CHUNKS = 2                                      # chunks of 64 that come together


class ScaledCodes:
    """Facts and device pieces for a weight format. Of 16 rows and CHUNKS chunks there are `code_words` words of codes and
    `scale_words` words of scales (as many of minimums); `whole_row` formats have none, their sums are scaled at the end."""

    def __init__(self, weight: WeightFormat, dtype: str, convert: bool) -> None:
        self.weight, self.dtype = weight, dtype
        self.codes = codes_of(weight, dtype, 0, convert)
        self.whole_row = weight.group_size == WHOLE_ROW
        self.code_words = weight.bits * 32 * CHUNKS
        self.lane_words = self.codes.scale_words        # scales of a lane and chunk
        self.scale_words = 0 if self.whole_row else 16 if weight.long_groups else CHUNKS * 8 * self.lane_words
        self.stored = weight.minimum == "stored"
        self.exact = dtype == "float16" and weight.scale_dtype == "float16"
        self.groups = 1 if weight.long_groups else self.codes.groups * 2       # of a row in a chunk
        self.middle = (8 if weight.bits == 4 else 16) if self.stored and not self.exact else 0
        self.load, self.scales, self.decode = self._load(), self._scales(), self._decode()

    def scale_columns(self, chunks: int) -> int:
        """Words of scales of one strip of 16 rows in memory."""
        return -(-chunks // 2) * 16 if self.weight.long_groups else chunks * 8 * self.lane_words

    def _load(self):
        bits, lane_words, long_groups, whole_row, stored = (self.weight.bits, self.lane_words, self.weight.long_groups,
                                                            self.whole_row, self.stored)
        place = self.codes.place

        @T.inline
        def load_scales(registers, o, buffer, stage, first):
            for e in T.unroll(-(-lane_words // 4)):
                if lane_words == 2:
                    T.ptx[SHARED2](registers[o], registers[o + 1], buffer.ptr_to([stage, first]))
                else:
                    T.ptx[SHARED4](registers[o + e * 4], registers[o + e * 4 + 1], registers[o + e * 4 + 2],
                                   registers[o + e * 4 + 3], buffer.ptr_to([stage, first + e * 4]))

        @T.inline
        def load(c, o, sc, mn, so, codes, scales, minimums, stage, strips, strip, u, lane):
            """Codes, scales and minimums of chunk u of a stage into registers c[o ..], sc[so ..], mn[so ..]; `strip` counts
            in the block's `strips`. Without `mn`, minimums stay where they are."""
            if bits == 4:
                T.ptx[SHARED4](c[o], c[o + 1], c[o + 2], c[o + 3],
                               codes.ptr_to([stage, (strip * CHUNKS + u) * 128 + lane * 4]))
            else:
                for e in T.unroll(2):
                    T.ptx[SHARED4](c[o + e * 4], c[o + e * 4 + 1], c[o + e * 4 + 2], c[o + e * 4 + 3],
                                   codes.ptr_to([stage, (u * strips + strip) * 256 + place(lane, e)]))
            if not whole_row:
                first = T.meta_var(strip * 16 + lane // 4 * 2 if long_groups else
                                   (strip * CHUNKS + u) * (8 * lane_words) + lane // 4 * lane_words)
                load_scales(sc, so, scales, stage, first)
                if stored and mn is not None:
                    load_scales(mn, so, minimums, stage, first)

        return load

    def _scales(self):
        F, groups, exact, stored, zeros, middle = (self.codes, self.groups, self.exact, self.stored, self.weight.zeros,
                                                   self.middle)
        PACK, dtype = pack(self.dtype), self.dtype

        def value(word):
            return T.cuda.uint_as_float(word & T.uint32(0xFFFF0000)) if dtype == "bfloat16" else low(dtype, word)

        @T.inline
        def double(registers, target, words, index):
            T.ptx["prmt.b32"](registers[target], words[index // 2], T.uint32(0),
                              T.uint32(FIRST_TWICE) + T.Cast("uint32", index % 2 * (SECOND_TWICE - FIRST_TWICE)))

        @T.inline
        def scales(upper, lower, least, f, sc, mn):
            """Of row h and group d: both halves of upper[h * groups + d], lower[...] and least[...]; with zeros the last is
            what `number` adds."""
            for h in T.unroll(2):
                for d in T.unroll(groups):
                    i = T.meta_var(h * groups + d)
                    if zeros:
                        least[i] = F.less(sc, 0, h)
                    if exact:
                        double(upper, i, sc, i * 2 if zeros else i)
                        if stored:
                            double(least, i, mn, i)
                    else:
                        f[0] = F.scale(sc, 0, h, d)
                        T.ptx[PACK](upper[i], f[0], f[0])
                        if stored:
                            f[1] = F.scale(mn, 0, h, d) + f[0] * T.float32(middle)
                            T.ptx[PACK](least[i], f[1], f[1])
                        f[0] = f[0] - value(upper[i])
                        T.ptx[PACK](lower[i], f[0], f[0])

        return scales

    def _decode(self):
        F, groups, exact, stored, whole_row, bits = (self.codes, self.groups, self.exact, self.stored, self.whole_row,
                                                     self.weight.bits)
        e4m3, zeros, wide, middle = self.weight.e4m3, self.weight.zeros, self.codes.wide, self.middle
        fma = f"fma.rn.{SHORT[self.dtype]}x2"
        base, one = twice(BASE[self.dtype]), ONE[self.dtype]
        minus = twice(BASE[self.dtype] + (middle if middle else 8 if self.weight.minimum == "-8*scale" else 0)) | MINUS_ZERO
        plain = F.decode

        @T.inline
        def number(a, slot, spare, word, less):
            """Two codes, less the middle where there is one."""
            if e4m3 or zeros:
                plain(a, slot, spare, word, less)
            elif bits == 4:
                T.ptx["lop3.b32"](a[slot], word, T.uint32(0x000F000F), T.uint32(base), AND_OR)
                T.ptx[fma](a[slot], a[slot], T.uint32(one), T.uint32(minus))
            elif stored:                                # codes below 128
                T.ptx["lop3.b32"](a[slot], word, T.uint32(0x007F007F), T.uint32(base), AND_OR)
                T.ptx[fma](a[slot], a[slot], T.uint32(one), T.uint32(minus))
            else:
                plain(a, slot, spare, word, less)

        @T.inline
        def decode(a, o, spare, c, upper, lower, least):
            """A chunk's 16 registers of wgmma's A side into a[o ..]: step j * 2 + p, row e % 2, pair e // 2. a[spare] is
            clobbered."""
            for j in T.unroll(2):
                for p in T.unroll(2):
                    for e in T.unroll(4):
                        slot = T.meta_var(o + (j * 2 + p) * 4 + e)
                        i = T.meta_var(e % 2 * groups + (0 if groups == 1 else j if wide else j * 2 + p))
                        number(a, slot, spare, F.pair(c, 0, j, e % 2, p * 2 + e // 2), least[i])
                        if not whole_row:
                            if exact and stored:
                                T.ptx[fma](a[slot], a[slot], upper[i], least[i])
                            elif exact:
                                T.ptx[fma](a[slot], a[slot], upper[i], T.uint32(MINUS_ZERO))
                            else:
                                if stored:
                                    T.ptx[fma](a[spare], a[slot], lower[i], least[i])
                                else:
                                    T.ptx[fma](a[spare], a[slot], lower[i], T.uint32(MINUS_ZERO))
                                T.ptx[fma](a[slot], a[slot], upper[i], a[spare])

        return decode
