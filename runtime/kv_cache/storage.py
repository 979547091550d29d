"""The tensor that holds all pages, and how many pages fit. Who uses a page is not known here."""

from __future__ import annotations

import os

import numpy as np

from relaxpack.errors import EnvironmentProblem, UsageError
from relaxpack.model_info import ModelInfo, kv_item_bytes, page_dtype

# A CPU shares its memory with everything else; a GPU serves one model, and what is left out is for graphs and libraries.
HOST_SHARE, DEVICE_SHARE = 0.5, 0.95


def page_shape(info: ModelInfo) -> tuple[int, ...]:
    """Shape of one page: [layers, 2, kv_heads, page_size, head_dim]."""
    return (info.num_layers, 2, info.num_kv_heads, info.page_size, info.head_dim)


def page_bytes(info: ModelInfo) -> int:
    return int(np.prod(page_shape(info))) * kv_item_bytes(info.kv_dtype)


def choose_num_pages(info: ModelInfo, free_bytes: int, wanted: int | None = None, share: float = HOST_SHARE) -> int:
    """Pages to allocate, scratch page included: `wanted`, or what `max_batch` full sequences need, cut to a share of
    the free memory. Raises where not even one full sequence fits."""
    fits = int(free_bytes * share) // page_bytes(info)
    least = info.max_pages_per_sequence + 1
    if wanted is not None:
        if wanted < 2:
            raise UsageError(f"number of pages {wanted}: at least 2 are needed (one is scratch)")
        return wanted
    if fits < least:
        raise EnvironmentProblem(
            f"not enough memory for the KV cache: one sequence of {info.max_context} tokens needs "
            f"{least * page_bytes(info) / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free; build with a smaller "
            "--max-context or give a number of pages")
    return min(fits, info.max_batch * info.max_pages_per_sequence + 1)


def free_host_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocate_host_pages(info: ModelInfo, num_pages: int) -> np.ndarray:
    """Zeroed pages [layers, num_pages, 2, kv_heads, page_size, head_dim], 64-byte aligned. Memory is taken
    when touched."""
    layers, *rest = page_shape(info)
    dtype = np.dtype(page_dtype(info.kv_dtype))
    count = layers * num_pages * int(np.prod(rest))
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + count * dtype.itemsize].view(dtype).reshape(layers, num_pages, *rest)
