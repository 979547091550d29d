"""Whole pages of the KV cache between a device and the host, for a prefix cache that outlives the process.

A page lies in the device's tensor as one piece per layer. 16-bit numbers and e4m3 ones travel as their bits, so that they
need no type of their own on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxpack.model_info import ModelInfo, kv_item_bytes
from relaxpack.runtime import cuda_memory
from relaxpack.runtime.kv_cache.storage import page_bytes, page_shape

_AT_ONCE = 16       # pages in page-locked memory


class PageTransfer:
    """`pages`: the device's tensor [layers, num_pages, 2, kv_heads, page_size, head_dim]."""

    def __init__(self, pages: Any, info: ModelInfo, num_pages: int) -> None:
        self._pages, self._num_pages = pages, num_pages
        self._shape = page_shape(info)
        self._piece = page_bytes(info) // info.num_layers
        self._dtype = np.dtype("float32" if info.kv_dtype == "float32" else f"uint{8 * kv_item_bytes(info.kv_dtype)}")

    def read(self, page_ids: Sequence[int]) -> np.ndarray:
        """Copies of pages, [n, layers, 2, kv_heads, page_size, head_dim]."""
        result = np.empty((len(page_ids), *self._shape), self._dtype)
        pinned = self._pinned()
        for first in range(0, len(page_ids), _AT_ONCE):
            part = page_ids[first:first + _AT_ONCE]
            for at, offset in self._pieces(part):
                cuda_memory.download(pinned, self._pages, self._piece, offset, at)
            cuda_memory.synchronize()
            result[first:first + len(part)] = pinned.array[:len(part)]
        pinned.close()
        return result

    def write(self, page_ids: Sequence[int], pages: np.ndarray) -> None:
        """Put copies that `read` gave, [n, layers, 2, kv_heads, page_size, head_dim], into these pages."""
        pinned = self._pinned()
        for first in range(0, len(page_ids), _AT_ONCE):
            part = page_ids[first:first + _AT_ONCE]
            pinned.array[:len(part)] = pages[first:first + len(part)]
            for at, offset in self._pieces(part):
                cuda_memory.upload(self._pages, pinned, self._piece, offset, at)
            cuda_memory.synchronize()       # before the memory is written again
        pinned.close()

    def _pinned(self) -> cuda_memory.PinnedArray:
        return cuda_memory.PinnedArray((_AT_ONCE, *self._shape), self._dtype)

    def _pieces(self, page_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(byte in page-locked memory, byte in the device's tensor) of each layer of each page."""
        layers, piece = self._shape[0], self._piece
        return [((place * layers + layer) * piece, (layer * self._num_pages + page_id) * piece)
                for place, page_id in enumerate(page_ids) for layer in range(layers)]
