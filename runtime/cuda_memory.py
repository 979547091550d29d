"""The few CUDA runtime calls that TVM does not offer: pinned host memory, asynchronous copies, filling, free memory.

Works on libcudart through ctypes, on the stream that TVM launches on. Nothing here knows models.
"""

from __future__ import annotations

import ctypes
import glob
import sys
from typing import Any

import numpy as np

from relaxpack.errors import EnvironmentProblem

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
QUEUED_BYTES = 64 << 10        # that the driver takes from pageable memory without waiting for the stream
_library: ctypes.CDLL | None = None


def cudart() -> ctypes.CDLL:
    """The CUDA runtime library, opened once. Raises EnvironmentProblem where it is not installed."""
    global _library
    if _library is None:
        names = ["libcudart.so.13"]
        for folder in sys.path:
            names += glob.glob(f"{folder}/nvidia/*/lib/libcudart.so.13")
        for name in names:
            try:
                _library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
                break
            except OSError:
                continue
        else:
            raise EnvironmentProblem("libcudart.so.13 was not found: pip install nvidia-cuda-runtime")
        _library.cudaGetErrorString.restype = ctypes.c_char_p
    return _library


def check(code: int, what: str) -> None:
    if code:
        text = cudart().cudaGetErrorString(code).decode()
        raise EnvironmentProblem(f"CUDA: {what} failed: {text}")


def synchronize() -> None:
    check(cudart().cudaDeviceSynchronize(), "waiting for the device")


def free_and_total() -> tuple[int, int]:
    """Bytes free and in all on the current device, as the driver reports them."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check(cudart().cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "asking for free memory")
    return free.value, total.value


class PinnedArray:
    """Page-locked host memory as a NumPy array; copies from and to it overlap with kernels."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        pointer = ctypes.c_void_p()
        check(cudart().cudaMallocHost(ctypes.byref(pointer), ctypes.c_size_t(self.bytes)), "page-locking memory")
        self.pointer = int(pointer.value or 0)
        raw = (ctypes.c_uint8 * self.bytes).from_address(self.pointer)
        self.array: np.ndarray = np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)

    def close(self) -> None:
        if self.pointer:
            cudart().cudaFreeHost(ctypes.c_void_p(self.pointer))
            self.pointer = 0


class QueuedArray:
    """Ordinary host memory of at most QUEUED_BYTES. A copy from it takes its bytes at once, into the queue of commands: it
    may be written again right away, and no copy engine has to start between two kernels."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.array = np.zeros(shape, dtype)
        self.pointer = self.array.ctypes.data
        assert self.array.nbytes <= QUEUED_BYTES


def _copy(destination: int, source: int, size: int, kind: int, what: str) -> None:
    check(cudart().cudaMemcpyAsync(ctypes.c_void_p(destination), ctypes.c_void_p(source), ctypes.c_size_t(size),
                                     kind, ctypes.c_void_p(0)), what)


def upload(tensor: Any, host: PinnedArray | QueuedArray, size: int, offset: int = 0, at: int = 0) -> None:
    """Start copying `size` bytes of host memory, from byte `at` on, to a device tensor, to byte `offset` of it on."""
    _copy(tensor.data_ptr() + offset, host.pointer + at, size, _TO_DEVICE, "copying to the device")


def download(pinned: PinnedArray, tensor: Any, size: int, offset: int = 0, at: int = 0) -> None:
    """Start copying `size` bytes of a device tensor, from byte `offset` on, to pinned memory, to byte `at` of it on."""
    _copy(pinned.pointer + at, tensor.data_ptr() + offset, size, _TO_HOST, "copying from the device")


def copy_tensor(destination: Any, source: Any, size: int, offset: int = 0) -> None:
    """Start copying the first `size` bytes of one device tensor to another, to byte `offset` of it on."""
    _copy(destination.data_ptr() + offset, source.data_ptr(), size, _ON_DEVICE, "copying on the device")


def copy_within(tensor: Any, source: int, destination: int, size: int, stride: int, count: int) -> None:
    """Copy `count` rows of `size` bytes from byte offset `source` to `destination` of one tensor, `stride` apart."""
    base = tensor.data_ptr()
    check(cudart().cudaMemcpy2DAsync(
        ctypes.c_void_p(base + destination), ctypes.c_size_t(stride), ctypes.c_void_p(base + source),
        ctypes.c_size_t(stride), ctypes.c_size_t(size), ctypes.c_size_t(count), _ON_DEVICE, ctypes.c_void_p(0)),
        "copying pages")


def fill_zero(tensor: Any, size: int) -> None:
    check(cudart().cudaMemsetAsync(ctypes.c_void_p(tensor.data_ptr()), 0, ctypes.c_size_t(size), ctypes.c_void_p(0)),
           "clearing memory")


class Span:
    """Two points of the stream and the device's time between them."""

    def __init__(self) -> None:
        self._marks = (ctypes.c_void_p(), ctypes.c_void_p())
        for mark in self._marks:
            check(cudart().cudaEventCreate(ctypes.byref(mark)), "creating an event")

    def begin(self) -> None:
        check(cudart().cudaEventRecord(self._marks[0], ctypes.c_void_p(0)), "recording an event")

    def end(self) -> None:
        check(cudart().cudaEventRecord(self._marks[1], ctypes.c_void_p(0)), "recording an event")

    def seconds(self) -> float:
        """Waits for the end."""
        check(cudart().cudaEventSynchronize(self._marks[1]), "waiting for an event")
        milliseconds = ctypes.c_float()
        check(cudart().cudaEventElapsedTime(ctypes.byref(milliseconds), *self._marks), "reading the device's clock")
        return milliseconds.value / 1e3


class Event:
    """Marks a point of the stream; `wait` blocks the host until the device has passed it."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        # 2: no timing, which makes waiting cheaper
        check(cudart().cudaEventCreateWithFlags(ctypes.byref(handle), 2), "creating an event")
        self._handle = handle

    def record(self) -> None:
        check(cudart().cudaEventRecord(self._handle, ctypes.c_void_p(0)), "recording an event")

    def wait(self) -> None:
        check(cudart().cudaEventSynchronize(self._handle), "waiting for an event")
