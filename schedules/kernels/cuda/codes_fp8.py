"""How kernels take fp8 weights into registers: the float8 e4m3fn numbers themselves, exact in bfloat16 and float16, and
scales per row or per 128 columns. The layout is explained in packing.py; no kernels here.

Sign, exponent and mantissa of an e4m3 number, moved to where a wider type has them, are that number divided by a power of
two, subnormals included; one multiplication takes it back. From sm_89 on there is an instruction for float16.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes import AND_OR, SIGNS, Codes, twice
from relaxpack.schedules.kernels.cuda.codes_long import LongGroupCodes, ZeroCodes
from relaxpack.weight_format import WeightFormat
from tvm.script import tirx as T

# By how much codes in the upper bytes are shifted, the mask for exponent and mantissa there, and the factor's bits.
SHIFT = {"bfloat16": 4, "float16": 1}
MASK = {"bfloat16": 0x07F0, "float16": 0x3F80}
FACTOR = {"bfloat16": 0x7B80, "float16": 0x5C00}     # 2^120, 2^8
EVEN_BYTES = 0x4420                                  # prmt: bytes 0 and 2 side by side


def can_convert(arch: str) -> bool:
    """Whether `arch` has cvt.rn.f16x2.e4m3x2."""
    return int(arch.removeprefix("sm_").rstrip("a")) >= 89


def code_place(lane, row):
    """Index of the four words with a lane's codes of row `row` (0: g, 1: g + 8) in a piece: swizzled, see packing.py."""
    return (row * 32 + (lane ^ lane // 8 % 4)) * 4


class Fp8Codes(LongGroupCodes):
    """`Codes` for the fp8 formats. `convert`: use the instruction of sm_89 for float16."""

    def __init__(self, weight: WeightFormat, dtype: str, chunks: int, convert: bool) -> None:
        self.convert = convert and dtype == "float16"
        super().__init__(weight, dtype, chunks)

    def scale(self, registers, base, h, group):
        return T.cuda.uint_as_float(registers[base + h])

    def place(self, lane, e):
        return code_place(lane, e)

    def pair(self, registers, base, j, h, p):
        """Codes 2p, 2p+1 of row g + 8h in half j: in the upper byte of each half word, for the instruction in the lower."""
        word = registers[base + h * 4 + j * 2 + p // 2]
        return word >> T.Cast("uint32", p % 2 * 8) if self.convert else word << T.Cast("uint32", 8 - p % 2 * 8)

    def _decode(self):
        convert = self.convert
        fma = f"fma.rn.{'bf16' if self.dtype == 'bfloat16' else 'f16'}x2"
        shift, mask, factor = SHIFT[self.dtype], twice(MASK[self.dtype]), twice(FACTOR[self.dtype])

        @T.inline
        def decode(a, slot, spare, word, less):
            """Two codes as two numbers in a[slot]. a[spare] is clobbered."""
            if convert:
                T.ptx["prmt.b32"](a[spare], word, T.uint32(0), T.uint32(EVEN_BYTES))
                T.ptx["cvt.rn.f16x2.e4m3x2"](a[slot], T.Cast("uint16", a[spare] & T.uint32(0xFFFF)))
            else:
                a[spare] = word & T.uint32(SIGNS)
                T.ptx["lop3.b32"](a[slot], word >> T.uint32(shift), T.uint32(mask), a[spare], AND_OR)
                T.ptx[fma](a[slot], a[slot], T.uint32(factor), T.uint32(SIGNS))      # adds -0: keeps every sign

        return decode


def codes_of(weight: WeightFormat, dtype: str, chunks: int, convert: bool = False) -> Codes:
    """The device pieces for a weight format. `convert`: the GPU has `can_convert`'s instruction."""
    if weight.e4m3:
        return Fp8Codes(weight, dtype, chunks, convert)
    return (ZeroCodes if weight.zeros else Codes)(weight, dtype, chunks)
