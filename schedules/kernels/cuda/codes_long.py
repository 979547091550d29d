"""Weight formats whose scales reach over whole rows or 128 columns: where a scale lies, how a lane loads those of its two
rows, and 4-bit codes with zeros. The layout is explained in packing.py; no kernels here.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes import BASE, LOAD2, LOAD_CODES, SIGNS, Codes, twice
from relaxpack.schedules.kernels.cuda.fragments import low
from relaxpack.weight_format import WHOLE_ROW, WeightFormat
from tvm.script import tirx as T


def scale_place(weight: WeightFormat, chunks: int, strip, chunk, g, row):
    """Index of the scale of row `row` (0: g, 1: g + 8) of a strip in a chunk of 64."""
    if weight.group_size == WHOLE_ROW:
        return (strip * 8 + g) * 2 + row
    return ((strip * (-(-chunks // 2)) + chunk // 2) * 8 + g) * 2 + row


class LongGroupCodes(Codes):
    """A lane has two words of scales in a piece, those of rows g and g + 8."""

    def _arrange(self) -> None:
        self.wide, self.steps, self.groups = True, 2, 1
        self.stored, self.f32 = False, True
        self.scales = self.scale_words = 2

    def first_scale(self, strip, chunk, g):
        return scale_place(self.weight, self.chunks, strip, chunk, g, 0)

    def _load(self):
        chunks, words, place, first_scale = self.chunks, self.words, self.place, self.first_scale

        @T.inline
        def load_scales(registers, base, buffer, first):
            T.ptx[LOAD2](registers[base], registers[base + 1], buffer.ptr_to([first]))

        self.load_scales = load_scales

        @T.inline
        def load(c, o, sc, mn, so, codes, scales, minimums, strip, chunk, lane, there):
            """Codes of a piece into c[o..], its two scales into sc[so..]; zeros unless `there`."""
            piece = T.meta_var(strip * chunks + chunk)
            if there:
                for e in T.unroll(words // 4):
                    T.ptx[LOAD_CODES](c[o + e * 4], c[o + e * 4 + 1], c[o + e * 4 + 2], c[o + e * 4 + 3],
                                      codes.ptr_to([piece * (words * 32) + place(lane, e)]))
                load_scales(sc, so, scales, first_scale(strip, chunk, lane // 4))
            else:
                for e in T.unroll(words):
                    c[o + e] = T.uint32(0)
                sc[so] = T.uint32(0)
                sc[so + 1] = T.uint32(0)

        return load


class ZeroCodes(LongGroupCodes):
    """4-bit codes c as c - zero, which is exact. A word of scales holds the float16 scale and, above it, the zero."""

    def scale(self, registers, base, h, group):
        return low("float16", registers[base + h])

    def zero(self, registers, base, h, more):
        return T.Cast("float32", T.Cast("int32", registers[base + h] >> T.uint32(16)) + more)

    def less(self, registers, base, h):
        """The lowest mantissa bit of BASE has weight 1: zeros are added to its bits."""
        return (registers[base + h] >> T.uint32(16)) * T.uint32(0x10001) + T.uint32(twice(BASE[self.dtype]) | SIGNS)
