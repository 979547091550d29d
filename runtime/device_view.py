"""Tensors over a part of another tensor's memory, with the address itself moved.

TVM's own views on a GPU keep the base address and set `byte_offset`, which compiled kernels refuse. These go through
DLPack (https://dmlc.github.io/dlpack/latest/c_api.html): a capsule that TVM imports like any foreign tensor. The base
must outlive the view; whoever makes a view keeps both.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm_ffi

_CODES = {"int32": (0, 32), "uint8": (1, 8), "float32": (2, 32)}  # DLDataTypeCode, bits


class _DLTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64))


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_alive: dict[int, tuple[Any, ...]] = {}  # address of a managed tensor → what it points into
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@_Deleter
def _release(address: int) -> None:
    _alive.pop(address, None)


# Tensors may be released while the interpreter shuts down: the callback must outlive this module's names.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_release))

ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Exporter:
    def __init__(self, address: int, device: tuple[int, int]) -> None:
        self._address, self._device = address, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: Any = None, **_options: Any) -> Any:
        return ctypes.pythonapi.PyCapsule_New(self._address, b"dltensor", None)


def view(base: Any, shape: Sequence[int], dtype: str, byte_offset: int) -> Any:
    """A contiguous tensor of `dtype` over the memory of `base` from `byte_offset` (a multiple of 64) on."""
    code, bits = _CODES[dtype]
    assert byte_offset % 64 == 0, byte_offset
    size = math.prod(shape) * bits // 8
    dims = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*(math.prod(shape[i + 1:]) for i in range(len(shape))))
    device = (base.device.dlpack_device_type(), base.device.index)
    tensor = _DLTensor(base.data_ptr() + byte_offset, *device, len(shape), code, bits, 1, dims, strides, 0)
    managed = _DLManagedTensor(tensor, None, ctypes.cast(_release, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _alive[address] = (managed, dims, strides, base, size)
    return tvm_ffi.from_dlpack(_Exporter(address, device), require_alignment=64)
