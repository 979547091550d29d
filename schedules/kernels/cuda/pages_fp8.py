"""How the attention kernels store e4m3 numbers and take them back into registers, two at a time in one 32-bit register of
the activations' dtype. No kernels here.

Moving sign, exponent and mantissa to where the wider type has them divides a number by a power of two, exactly, subnormals
included (tensor cores take them). Nothing is multiplied back there: queries and weights are larger by as much as float32
sums need not to underflow, and what is left of the factor goes into the scale of the scores and, once, into the outputs.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from tvm.script import tirx as T

_PACK = """
__device__ __forceinline__ unsigned int e4m3_of(float x) {
  unsigned int sign = __float_as_uint(x) >> 24 & 0x80u, size = __float_as_uint(x) & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fu;
  if (size >= 0x43e00000u) return sign | 0x7eu;
  if (size < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) & 15u);
  return sign | (((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - 960u);
}
__device__ __forceinline__ unsigned int pack_e4m3(float high, float low) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3_of(high) << 8 | e4m3_of(low);
#endif
}
"""


def pack_e4m3(high: Any, low: Any) -> Any:
    """Two f32 → two e4m3 numbers in the lower half of a u32, rounded to even, at most 448 in size."""
    return T.cuda.func_call("pack_e4m3", high, low, source_code=_PACK, return_type="uint32")


# powers of two: what numbers taken back lack, and by what queries and weights are larger meanwhile
LACK = {"bfloat16": 120, "float16": 8}
LIFT = {"bfloat16": 100, "float16": 0}
_SHIFTED = {"bfloat16": 4, "float16": 7}         # the code is the lower byte of a half word, its sign fills the upper one
_KEPT = {"bfloat16": 0x87F0, "float16": 0xBF80}
_EVEN, _ODD = 0xA280, 0xB391                     # prmt: bytes 0, 2 or 1, 3, each below a byte of its sign
_FIRST, _SECOND = 0x9180, 0xB3A2                 # bytes 0, 1 or 2, 3


def _move(dtype: str) -> Any:
    """Inline: to[at] = two bytes of a word, chosen by `selector`, as numbers that lack 2^LACK."""
    shift, kept = _SHIFTED[dtype], _KEPT[dtype] << 16 | _KEPT[dtype]

    @T.inline
    def move(to, at, word, selector):
        T.ptx["prmt.b32"](to[at], word, T.uint32(0), T.uint32(selector))
        to[at] = (to[at] << T.uint32(shift)) & T.uint32(kept)

    return move


def take(dtype: str) -> Any:
    """Inline: to[even] = bytes 0 and 2 of a word as numbers that lack 2^LACK, to[odd] = bytes 1 and 3."""
    move = _move(dtype)

    @T.inline
    def take(to, even, odd, word):
        move(to, even, word, _EVEN)
        move(to, odd, word, _ODD)

    return take


def widen(dtype: str) -> Any:
    """Inline: to[at] = bytes 0 and 1 of a word as the numbers they are, to[at + 1] = bytes 2 and 3."""
    move, bf16 = _move(dtype), dtype == "bfloat16"
    bits = (LACK[dtype] + 127) << 7 if bf16 else (LACK[dtype] + 15) << 10

    @T.inline
    def widen(to, at, word):
        move(to, at, word, _FIRST)
        move(to, at + 1, word, _SECOND)
        for i in T.unroll(2):                        # adding -0 keeps every sign
            T.ptx["fma.rn.bf16x2" if bf16 else "fma.rn.f16x2"](
                to[at + i], to[at + i], T.uint32(bits << 16 | bits), T.uint32(0x80008000))

    return widen


def lift(dtype: str) -> Any:
    """Inline: to[at] = a pair of queries times 2^LIFT; adding -0 keeps every sign."""
    factor = (LIFT[dtype] + 127) << 7

    @T.inline
    def lift(to, at, pair):
        if LIFT[dtype] == 0:
            to[at] = pair
        else:
            T.ptx["fma.rn.bf16x2"](to[at], pair, T.uint32(factor << 16 | factor), T.uint32(0x80008000))

    return lift
