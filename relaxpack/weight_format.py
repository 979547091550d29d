"""How one parameter's numbers are stored: the vocabulary that checkpoints, passes, kernels and bundles share.

A quantised weight `[N, K]` is cut into groups of `group_size` along K. In its canonical form (`QuantizedTensor`)

    value[n, k] = scale[n, k // group_size] * codes[n, k] + minimum[n, k // group_size]

with `minimum` absent (0) for symmetric formats. The GGUF formats map onto this without loss:
Q4_0 codes 0..15 with minimum -8*scale; Q4_1 as is; Q4_K and Q5_K have float32 scale and minimum per 32 (super-block
scale x 6-bit sub-scale is exact in float32); Q5_0, Q6_K and Q8_0 are signed codes without minimum (Q6_K: group 16).
Source: ggml's documented block layouts. How canonical tensors are laid out for a kernel is the kernel's business.

`q4_128` has whole numbers in place of minimums: value = scale * (code - zero), zero 0..15, in groups of 128. So AWQ and GPTQ
checkpoints lose nothing (scale * zero would not fit a float16 minimum), and 16-bit registers hold code - zero exactly. With
symmetric weights every zero is 8. Groups of 32 or 64 with zeros are q4_k, whose float32 minimum holds -scale * zero exactly.

The fp8 formats hold float8 e4m3fn numbers (`E4M3` is what each code means) and float32 scales: `fp8` has one per row,
`fp8_block` one per row and 128 columns. A checkpoint's scale per tensor is `fp8` with equal scales, its blocks of 128 x 128
are `fp8_block` whose rows of one block have equal scales; neither loses anything. The last group of a row may be short in
these formats and in `q4_128`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WEIGHTS = ("as-is", "q4", "q4-128", "q8", "fp8", "f16", "bf16", "f32")  # what a build can be told to store
ACTIVATIONS = ("as-is", "float", "fp8")     # what a build can be told to round activations to in matmuls of fp8 weights
WHOLE_ROW = -1  # group size of formats with one scale a row
BLOCK = 128     # group size of fp8_block and q4_128
LARGEST_ZERO = 15


@dataclass(frozen=True)
class WeightFormat:
    """One storage format. `bits` is what the code takes in memory (4 or 8), not the nominal width: Q5 and Q6 codes
    are kept in 8 bits. Float formats have `group_size == 0`."""

    name: str
    bits: int
    group_size: int = 0
    scale_dtype: str = "float16"
    minimum: str = "none"  # "none" | "stored" | "-8*scale" | "-zero*scale"
    signed: bool = True

    @property
    def quantized(self) -> bool:
        return self.group_size != 0

    @property
    def e4m3(self) -> bool:
        """Codes are float8 e4m3fn numbers instead of integers."""
        return self.name in ("fp8", "fp8_block")

    @property
    def zeros(self) -> bool:
        """Whole numbers stand in place of minimums."""
        return self.minimum == "-zero*scale"

    @property
    def long_groups(self) -> bool:
        """Groups are whole rows or longer than the 64 columns that kernels take at a time; the last one may be short."""
        return self.group_size in (WHOLE_ROW, BLOCK)

    def groups(self, columns: int) -> int:
        """Scales of a row of `columns` numbers."""
        return 1 if self.group_size == WHOLE_ROW else -(-columns // self.group_size)

    @property
    def dtype(self) -> str:
        """dtype of a float format, e.g. "float16"."""
        assert not self.quantized, self.name
        return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[self.name]

    def bytes_per_weight(self) -> float:
        """Bytes a weight takes, its share of scales and minimums included, before padding."""
        if not self.quantized:
            return self.bits / 8
        if self.group_size == WHOLE_ROW:
            return self.bits / 8  # a scale a row is nothing beside the row
        scale = np.dtype(self.scale_dtype).itemsize
        return self.bits / 8 + scale * (2 if self.minimum == "stored" or self.zeros else 1) / self.group_size


FORMATS: dict[str, WeightFormat] = {f.name: f for f in (
    WeightFormat("f32", 32),
    WeightFormat("f16", 16),
    WeightFormat("bf16", 16),
    WeightFormat("q4_0", 4, 32, "float16", "-8*scale", signed=False),
    WeightFormat("q4_1", 4, 32, "float16", "stored", signed=False),
    WeightFormat("q4_k", 4, 32, "float32", "stored", signed=False),
    WeightFormat("q4_128", 4, BLOCK, "float16", "-zero*scale", signed=False),
    WeightFormat("q5_0", 8, 32, "float16", "none"),
    WeightFormat("q5_1", 8, 32, "float16", "stored", signed=False),
    WeightFormat("q5_k", 8, 32, "float32", "stored", signed=False),
    WeightFormat("q6_k", 8, 16, "float32", "none"),
    WeightFormat("q8_0", 8, 32, "float16", "none"),
    WeightFormat("fp8", 8, WHOLE_ROW, "float32", "none", signed=False),
    WeightFormat("fp8_block", 8, BLOCK, "float32", "none", signed=False),
)}


def _e4m3_values() -> np.ndarray:
    """1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinities, and only 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values = np.where(code & 128, -size, size).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    values.flags.writeable = False
    return values


E4M3 = _e4m3_values()   # float32[256]
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class QuantizedTensor:
    """Canonical quantised weight.

    codes: int8 (signed formats) or uint8, `[N, K]`, one code per byte; scales, minimums: `[N, K / group_size]` (rounded up)
    of `format.scale_dtype`; minimums is None unless `format.minimum == "stored"`, zeros (uint8, as many) unless
    `format.zeros`.
    """

    format: WeightFormat
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None = None
    zeros: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape  # type: ignore[return-value]

    def in_groups_of_32(self) -> QuantizedTensor:
        """The same numbers of a format with zeros as q4_k, whose float32 minimums hold -scale * zero exactly."""
        assert self.zeros is not None
        groups = -(-self.codes.shape[1] // 32)
        scales, zeros = (np.repeat(part.astype(np.float32), self.format.group_size // 32, axis=1)[:, :groups]
                         for part in (self.scales, self.zeros))
        return QuantizedTensor(FORMATS["q4_k"], self.codes, scales, -scales * zeros)

    def dequantize(self) -> np.ndarray:
        """float32 `[N, K]`: the reference every kernel is tested against."""
        n, k = self.codes.shape
        if self.format.long_groups:
            size = k if self.format.group_size == WHOLE_ROW else self.format.group_size
            scale = np.repeat(self.scales.astype(np.float32), size, axis=1)[:, :k]
            if self.zeros is None:
                return E4M3[self.codes] * scale
            return (self.codes.astype(np.float32) - np.repeat(self.zeros, size, axis=1)[:, :k]) * scale
        group = self.codes.reshape(n, -1, self.format.group_size).astype(np.float32)
        scale = self.scales.astype(np.float32)[..., None]
        value = group * scale
        if self.minimums is not None:
            value += self.minimums.astype(np.float32)[..., None]
        elif self.format.minimum == "-8*scale":
            value -= 8 * scale
        return value.reshape(n, k)
