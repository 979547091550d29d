"""How the attention kernels store e4m3 numbers and take them back into registers, two at a time in one 32-bit register of
the activations' dtype. Taking them back is exact in bfloat16 and float16.

A pair is made of bytes 0 and 2 (`even`) or 1 and 3 (`odd`) of a word, because sign, exponent and mantissa then only have to
be shifted to where the wider type has them; one multiplication by a power of two does the rest, subnormals included. No
kernels here.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_fp8 import FACTOR, MASK, SHIFT, SIGNS
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


def twice(value: int) -> int:
    return value << 16 | value


def even(dtype: str, word: Any) -> Any:
    """Bytes 0 and 2 of a word as two numbers divided by a power of two: `widen` ends it."""
    mask = T.uint32(twice(MASK[dtype]))
    return ((word << T.uint32(8 - SHIFT[dtype])) & mask) | ((word << T.uint32(8)) & T.uint32(SIGNS))


def odd(dtype: str, word: Any) -> Any:
    """Bytes 1 and 3."""
    return ((word >> T.uint32(SHIFT[dtype])) & T.uint32(twice(MASK[dtype]))) | (word & T.uint32(SIGNS))


def widen(dtype: str) -> Any:
    """Inline: to[at] = the numbers that `even` or `odd` gave."""
    fma, factor = f"fma.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}x2", twice(FACTOR[dtype])

    @T.inline
    def widen(to, at, pair):
        to[at] = pair
        T.ptx[fma](to[at], to[at], T.uint32(factor), T.uint32(SIGNS))        # adds -0: keeps every sign

    return widen
