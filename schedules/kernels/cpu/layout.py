"""How the CPU kernels want weights: panels of 32 output rows, so that one lane of a vector is one row.

A panel is two halves of 16 rows (where `gate_up`: 16 gate rows and the 16 up rows of the same columns); rows beyond N are
zero. One layout serves decode, prefill and the embedding gather, at every instruction set.
Float formats: `dtype[N/32, K, 32]`. Quantised: `uint8[N/32, K/group, 2, record]`, a record = the codes of 16 rows and
one group, 16 scales, 16 minimums (where stored). Codes are unsigned (code + OFFSETS); 4 neighbours along K of one row
stand in 4 bytes: 8 bits: byte [k/4][row][k%4]; 4 bits: byte [k/8][row][k%4] with k%8 < 4 in the low nibble.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import WeightLayout
from relaxpack.weight_format import FORMATS, QuantizedTensor, WeightFormat

PANEL, HALF = 32, 16
# Signed codes become unsigned by adding this; value = scale * (u - offset). Q4_0's codes are unsigned already, its
# minimum of -8 * scale is the same thing.
OFFSETS = {"q4_0": 8, "q5_0": 16, "q6_k": 32, "q8_0": 128}
# Formats that are packed as another one, without loss; groups of 128 would be long for activations in int8.
STORED_AS = {"q4_128": "q4_k"}
# The largest unsigned code: bounds sums of products in int16.
LARGEST = {"q4_0": 15, "q4_1": 15, "q4_k": 15, "q5_0": 31, "q5_1": 31, "q5_k": 31, "q6_k": 63, "q8_0": 255}


@dataclass(frozen=True)
class Record:
    """Byte offsets inside one record (16 rows x one group)."""

    format: WeightFormat

    @property
    def code_bytes(self) -> int:
        return HALF * self.format.group_size * self.format.bits // 8

    @property
    def scale_bytes(self) -> int:
        return HALF * np.dtype(self.format.scale_dtype).itemsize

    @property
    def has_minimum(self) -> bool:
        return self.format.minimum == "stored"

    @property
    def size(self) -> int:
        return self.code_bytes + self.scale_bytes * (2 if self.has_minimum else 1)

    @property
    def offset(self) -> int:
        return OFFSETS.get(self.format.name, 0)


def float_storage(weight: WeightFormat) -> str:
    """dtype of the packed buffer; bfloat16 travels as its bits because numpy has no such type."""
    return {"f32": "float32", "f16": "float16", "bf16": "uint16"}[weight.name]


def panels(out_features: int, gated: bool) -> int:
    return -(-(out_features // 2) // HALF) if gated else -(-out_features // PANEL)


def stored_as(weight: WeightFormat) -> WeightFormat:
    return FORMATS[STORED_AS.get(weight.name, weight.name)]


def weight_layout(weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
    """One buffer of panels of 32 rows. Raises CompileError for shapes and formats without a kernel."""
    weight = stored_as(weight)
    name = f"cpu.{weight.name}.panel32" + (".gate_up" if gated else "")
    if gated and out_features % 2:
        raise CompileError(f"gate and up rows together must be even, got {out_features}")
    count = panels(out_features, gated)
    if not weight.quantized:
        return WeightLayout(name, (("", (count, in_features, PANEL), float_storage(weight)),))
    if weight.name not in LARGEST:
        raise CompileError(f"weight format {weight.name} has no CPU kernel; known: {', '.join(FORMATS)}")
    if in_features % weight.group_size:
        raise CompileError(f"weight format {weight.name}: {in_features} input features are not a multiple of its "
                           f"group of {weight.group_size}; build with --weights f16")
    shape = (count, in_features // weight.group_size, 2, Record(weight).size)
    return WeightLayout(name, (("", shape, "uint8"),))


def panel_rows(a: np.ndarray, gate_up: bool) -> np.ndarray:
    """`[N, ...]` → `[panels, 2, 16, ...]`, zero rows at the end."""
    def padded(part: np.ndarray, multiple: int) -> np.ndarray:
        short = -len(part) % multiple
        return np.pad(part, [(0, short)] + [(0, 0)] * (part.ndim - 1)) if short else part

    if not gate_up:
        return padded(a, PANEL).reshape(-1, 2, HALF, *a.shape[1:])
    gate, up = (padded(part, HALF).reshape(-1, HALF, *a.shape[1:]) for part in np.split(a, 2))
    return np.stack([gate, up], axis=1)


def bfloat16_bits(weight: np.ndarray) -> np.ndarray:
    """uint16 bits; float32 is rounded to nearest even."""
    if weight.dtype == np.uint16:
        return weight
    if weight.dtype.name == "bfloat16":
        return weight.view(np.uint16)
    bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def pack(layout: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
    """See KernelProvider.pack."""
    (suffix, shape, dtype), = layout.buffers
    _, name, _, *rest = layout.name.split(".")
    gate_up = bool(rest)
    if not FORMATS[name].quantized:
        assert isinstance(weight, np.ndarray), f"{layout.name}: got {type(weight).__name__}"
        stored = bfloat16_bits(weight) if dtype == "uint16" else weight.astype(dtype)
        rows = panel_rows(stored, gate_up)                                       # [P, 2, 16, K]
        packed = rows.transpose(0, 3, 1, 2).reshape(shape)
    else:
        assert isinstance(weight, QuantizedTensor), f"{layout.name}: got {type(weight).__name__}"
        weight = weight.in_groups_of_32() if weight.zeros is not None else weight
        assert weight.format.name == name, f"{layout.name}: wrong format"
        packed = _pack_quantized(weight, gate_up)
    assert packed.shape == shape, (packed.shape, shape)
    return {suffix: np.ascontiguousarray(packed)}


def _pack_quantized(weight: QuantizedTensor, gate_up: bool) -> np.ndarray:
    record, group = Record(weight.format), weight.format.group_size
    codes = weight.codes
    if weight.format.signed:
        shifted = codes.astype(np.int16) + record.offset
        largest = LARGEST[weight.format.name]
        if shifted.min() < 0 or shifted.max() > largest:
            raise CompileError(f"{weight.format.name} codes must lie in {-record.offset}..{largest - record.offset}, "
                               f"got {codes.min()}..{codes.max()}")
        codes = shifted.astype(np.uint8)
    rows = panel_rows(codes, gate_up)                                            # [P, 2, 16, K]
    count, groups = len(rows), codes.shape[1] // group
    if weight.format.bits == 4:
        parts = rows.reshape(count, 2, HALF, groups, group // 8, 2, 4)
        data = parts[..., 0, :] | (parts[..., 1, :] << 4)
    else:
        data = rows.reshape(count, 2, HALF, groups, group // 4, 4)
    data = data.transpose(0, 3, 1, 4, 2, 5).reshape(count, groups, 2, record.code_bytes)
    pieces = [data]
    for extra in (weight.scales, weight.minimums if record.has_minimum else None):
        if extra is not None:
            lane = panel_rows(extra.astype(weight.format.scale_dtype), gate_up)  # [P, 2, 16, groups]
            pieces.append(np.ascontiguousarray(lane.transpose(0, 3, 1, 2)).view(np.uint8))
    return np.concatenate(pieces, axis=-1)
