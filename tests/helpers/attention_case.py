"""Random paged-attention problems and their float64 answers, for the CUDA kernel tests.

A case owns shuffled pages (page 0 is scratch and holds NaN, as does everything beyond a sequence's length), a page
table and lengths. Floats travel as uint16 bit patterns because NumPy has no bfloat16, e4m3 numbers as uint8.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from relaxpack.kernel_spec import AttentionSpec
from relaxpack.model_info import FP8
from relaxpack.weight_format import E4M3


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """float → uint16 (uint8) patterns, round to nearest even."""
    if dtype == FP8:
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """uint16 (uint8) patterns → float64."""
    if dtype == FP8:
        return E4M3[bits].astype(np.float64)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


NAN_BITS = {"bfloat16": 0x7FC0, "float16": 0x7E00, FP8: 0x7F}


@dataclass
class Case:
    spec: AttentionSpec
    layer: int
    q: np.ndarray               # uint16 [t, H*D]
    pages: np.ndarray           # uint16 or uint8 [L, p, 2, KV, PS, D]
    page_table: np.ndarray      # int32 [b, max_pages]
    query_start: np.ndarray     # int32 [b+1]
    lengths: np.ndarray         # int32 [b]

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]


def make_case(spec: AttentionSpec, lengths: list[int], queries: list[int] | None = None, seed: int = 0,
              magnitude: float = 1.0) -> Case:
    """`queries` is the number of query tokens of each sequence (default one each, i.e. decode)."""
    rng = np.random.default_rng(seed)
    queries = queries or [1] * len(lengths)
    per_row = [-(-n // spec.page_size) for n in lengths]
    assert max(per_row, default=0) <= spec.max_pages
    free = rng.permutation(np.arange(1, 1 + sum(per_row) + 2))
    pages = np.full((spec.num_layers, len(free) + 1, 2, spec.num_kv_heads, spec.page_size, spec.head_dim),
                    NAN_BITS[spec.kv_dtype], np.uint8 if spec.fp8 else np.uint16)
    table = np.zeros((len(lengths), spec.max_pages), np.int32)
    layer, used = spec.num_layers - 1, 0
    for s, length in enumerate(lengths):
        for j in range(per_row[s]):
            page = table[s, j] = free[used]
            used += 1
            live = min(spec.page_size, length - j * spec.page_size)
            values = rng.standard_normal((2, spec.num_kv_heads, live, spec.head_dim)) * magnitude
            pages[layer, page, :, :, :live] = to_bits(values, spec.kv_dtype)
    start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = to_bits(rng.standard_normal((start[-1], spec.num_heads * spec.head_dim)) * magnitude, spec.activation_dtype)
    return Case(spec, layer, q, pages, table, start, np.array(lengths, np.int32))


def reference(case: Case) -> np.ndarray:
    """float64 [t, H*D]."""
    spec = case.spec
    q = from_bits(case.q, spec.activation_dtype).reshape(-1, spec.num_heads, spec.head_dim)
    out = np.zeros_like(q)
    group = spec.num_heads // spec.num_kv_heads
    for s, length in enumerate(case.lengths):
        first, last = case.query_start[s], case.query_start[s + 1]
        ids = case.page_table[s, : -(-int(length) // spec.page_size)]
        kv = from_bits(case.pages[case.layer, ids], spec.kv_dtype)              # [n, 2, KV, PS, D]
        kv = kv.transpose(1, 2, 0, 3, 4).reshape(2, spec.num_kv_heads, -1, spec.head_dim)[:, :, :length]
        for i in range(first, last):
            position = int(length) - (last - first) + (i - first)
            low = 0 if spec.window is None else max(0, position - spec.window + 1)
            if position < low:
                continue
            for h in range(spec.num_heads):
                k, v = kv[:, h // group, low:position + 1]
                score = k @ q[i, h] * spec.scale
                weight = np.exp(score - score.max())
                out[i, h] = weight @ v / weight.sum()
    return out.reshape(len(q), -1)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm of the truth; NaN counts as infinite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
