"""Weights from files to a device: readers fill pinned chunks while the chunks before them are on their way.

Reading the file into pinned memory beats copying from a mapping, whose every page faults first; a copy from pageable
memory would be staged once more inside the driver. Nothing is interpreted: the bytes of a parameter are what they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.dist.params import TensorRegion
from relaxpack.errors import BundleError
from relaxpack.runtime import cuda_memory

CHUNK_BYTES = 16 << 20
CHUNKS = 4            # in flight: read, or on their way to the device
Progress = Callable[[int, int], None]       # (bytes that have arrived or will without waiting, bytes in all)
Source = TensorRegion | np.ndarray


@dataclass(frozen=True)
class Upload:
    """Device tensors in the order of their sources, and what it took to fill them."""

    tensors: list[Any]
    bytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class _Chunk:
    source: int
    start: int
    bytes: int


def upload(sources: Sequence[Source], device: Any, progress: Progress = lambda done, total: None,
           chunk_bytes: int = CHUNK_BYTES) -> Upload:
    """Fill a device tensor for each source. Raises BundleError where a file is shorter than its header says."""
    begin = time.perf_counter()
    sizes = [_size(source) for source in sources]
    tensors = [tvm.runtime.empty(source.shape, _dtype(source), device) for source in sources]
    total, done = sum(sizes), 0
    ring = [cuda_memory.PinnedArray((chunk_bytes,), np.uint8) for _ in range(CHUNKS)]
    events = [cuda_memory.Event() for _ in ring]
    files: dict[Path, int] = {}
    try:
        with ThreadPoolExecutor(min(CHUNKS, os.cpu_count() or 1), "relaxpack-upload") as pool:
            reading: list[tuple[_Chunk, int, Future[None]]] = []

            def send() -> int:
                chunk, slot, ready = reading.pop(0)
                ready.result()
                cuda_memory.upload(tensors[chunk.source], ring[slot], chunk.bytes, chunk.start)
                events[slot].record()
                return chunk.bytes

            for number, chunk in enumerate(_chunks(sizes, chunk_bytes)):
                slot = number % CHUNKS
                if len(reading) == CHUNKS:
                    done += send()
                    progress(done, total)
                events[slot].wait()
                fill = _reader(sources[chunk.source], files)
                reading.append((chunk, slot, pool.submit(fill, ring[slot].array[:chunk.bytes], chunk.start)))
            while reading:
                done += send()
                progress(done, total)
        cuda_memory.synchronize()
    finally:
        for descriptor in files.values():
            os.close(descriptor)
        for pinned in ring:
            pinned.close()
    return Upload(tensors, total, time.perf_counter() - begin)


def _chunks(sizes: Iterable[int], most: int) -> Iterator[_Chunk]:
    for source, size in enumerate(sizes):
        for start in range(0, size, most):
            yield _Chunk(source, start, min(most, size - start))


def _size(source: Source) -> int:
    return source.bytes if isinstance(source, TensorRegion) else source.nbytes


def _dtype(source: Source) -> str:
    return source.dtype if isinstance(source, TensorRegion) else source.dtype.name


def _reader(source: Source, files: dict[Path, int]) -> Callable[[np.ndarray, int], None]:
    """Fills an array of bytes with those of the source from a byte offset on. Opens each file once."""
    if isinstance(source, np.ndarray):
        raw = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

        def copy(target: np.ndarray, start: int) -> None:
            target[:] = raw[start:start + len(target)]
        return copy
    if source.file not in files:
        files[source.file] = os.open(source.file, os.O_RDONLY)
        os.posix_fadvise(files[source.file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return lambda target, start: _read(files[source.file], source, target, start)


def _read(descriptor: int, source: TensorRegion, target: np.ndarray, start: int) -> None:
    view, at = target.data, 0
    while at < len(view):
        count = os.preadv(descriptor, [view[at:]], source.offset + start + at)
        if count == 0:
            raise BundleError(f"{source.file} ends inside the parameter {source.name}; copy or build the bundle again")
        at += count
