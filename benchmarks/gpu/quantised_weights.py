"""Weights of a quantised format from a seed, on the device: the packed buffers that the CUDA kernels read (packing.py) and
the plain numbers that they stand for. Codes are drawn where they lie, so nothing is packed; the plain weight is read off."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relaxpack.weight_format import WeightFormat

DEVIATION = 0.02                # of the plain numbers
FP8_DEVIATION = 64.0            # of fp8 codes, whose largest is 448


def make(fmt: WeightFormat, n: int, k: int, gated: bool, generator: torch.Generator) -> tuple[dict[str, Any], torch.Tensor]:
    """(buffers by suffix, float32 `[n, k]` in the order of the checkpoint, gate rows first). uint32 is int32 in torch.
    Raises ValueError for formats in groups of 16, and for sizes that the layout would pad."""
    if fmt.group_size == 16 or (fmt.bits == 8 and not fmt.signed and not fmt.e4m3):
        raise ValueError(f"no weights from a seed in {fmt.name}; known: q4_0, q4_1, q4_k, q4_128, q8_0, fp8, fp8_block")
    if n % 16 or k % 64:
        raise ValueError(f"weights from a seed are for multiples of 16 rows and 64 columns, got {n} x {k}")
    device = generator.device
    words = n * k * fmt.bits // 32
    if fmt.e4m3:
        codes = torch.randn(words * 4, generator=generator, device=device).mul_(FP8_DEVIATION).clamp_(-448, 448)
        codes = codes.to(torch.float8_e4m3fn).view(torch.int32)
    else:
        codes = torch.randint(-1 << 31, 1 << 31, (words,), generator=generator, device=device, dtype=torch.int64)
        codes = codes.to(torch.int32)
    spread = FP8_DEVIATION if fmt.e4m3 else 73.9 if fmt.bits == 8 else 4.61       # of codes as drawn
    count = n * fmt.groups(k)
    near = torch.rand(count, generator=generator, device=device) * 0.5 + 0.75
    scales = (near * (DEVIATION / spread)).to(getattr(torch, fmt.scale_dtype))
    buffers, plain = {"codes": codes, "scales": scales}, _numbers(fmt, codes, n, k)
    each = _groups(fmt, scales.float(), n, k)
    if fmt.zeros:
        zeros = torch.randint(6, 11, (count,), generator=generator, device=device, dtype=torch.int32)
        buffers["scales"] = scales.view(torch.int16).int() & 0xFFFF | zeros << 16
        plain = (plain - _groups(fmt, zeros.float(), n, k)) * each
    elif fmt.minimum == "stored":
        buffers["minimums"] = (scales.float() * -(near + 6.5)).to(scales.dtype)
        plain = plain * each + _groups(fmt, buffers["minimums"].float(), n, k)
    else:
        plain = (plain - (8 if fmt.minimum == "-8*scale" else 0)) * each
    return buffers, gate_first(plain) if gated else plain


def gate_first(packed: torch.Tensor) -> torch.Tensor:
    """Undo the interleaving of gate and up rows (blocks of 8) of the CUDA row layout."""
    n, k = packed.shape
    blocks = packed.reshape(n // 16, 2, 8, k)
    return torch.cat([blocks[:, 0].reshape(-1, k), blocks[:, 1].reshape(-1, k)])


def _numbers(fmt: WeightFormat, words: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The codes as float32 `[n, k]`: `pack_codes` backwards."""
    strips, chunks = n // 16, k // 64
    if fmt.bits == 4:                   # [strip, chunk, g, q, half, row]; value 2p at bits 4p, 2p + 1 at 16 + 4p
        shifts = torch.tensor([4 * (v // 2) + 16 * (v % 2) for v in range(8)], device=words.device, dtype=torch.int32)
        values = (words.view(strips, chunks, 8, 4, 2, 2, 1) >> shifts & 15).float()
        return values.permute(0, 5, 2, 1, 4, 3, 6).reshape(n, k)
    if fmt.e4m3:                        # [strip, chunk, row, g, q ^ g / 2 % 4, half, word]
        places = torch.from_numpy(np.arange(4) ^ np.arange(8)[:, None] // 2 % 4).to(words.device)
        words = words.view(strips, chunks, 2, 8, 4, 2, 2)
        words = words.gather(4, places[None, None, None, :, :, None, None].expand_as(words)).permute(0, 1, 5, 3, 4, 2, 6)
        values = words.contiguous().view(torch.float8_e4m3fn).float()
    else:                               # [strip, chunk, half, g, q, row, word]
        values = words.view(torch.int8).float()
    values = values.view(strips, chunks, 2, 8, 4, 2, 2, 4)[..., [0, 2, 1, 3]]     # bytes hold values 0, 2, 1, 3
    return values.permute(0, 5, 3, 1, 2, 4, 6, 7).reshape(n, k)


def _groups(fmt: WeightFormat, values: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Scales, zeros or minimums for every number, `[n, k]`: `_pack_groups` backwards."""
    width = fmt.groups(k) if fmt.long_groups else k // 64           # [strip, chunk or group, g, row, groups of a chunk]
    rows = values.view(n // 16, width, 8, 2, -1).permute(0, 3, 2, 1, 4).reshape(n, -1)
    return rows.repeat_interleave(k if rows.shape[1] == 1 else fmt.group_size, dim=1)[:, :k]
