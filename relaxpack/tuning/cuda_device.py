"""`Gpu`: what timing on a GPU needs and TVM does not offer: buffers filled on the device, graphs of many calls, events, and
the clocks. Works on libcudart and NVML through ctypes, without a compiler and without torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import relaxpack.tvm_setup as tvm_setup
import tvm
import tvm_ffi
from relaxpack.errors import EnvironmentProblem
from relaxpack.runtime.cuda_memory import check, copy_tensor, cudart, synchronize
from relaxpack.tuning.cuda_cases import Repeated, dtype_of
from relaxpack.tuning_record import Facts

_THREAD_LOCAL = 1            # cudaStreamCaptureModeThreadLocal
_SHORT_MS = 2.0              # a launch is 1 % of that at most
_SM, _MEMORY = 1, 2          # nvmlClockType_t
_L2_BYTES = 38               # cudaDevAttrL2CacheSize
Call = Callable[[], object]


class Gpu:
    def __init__(self) -> None:
        if not tvm_setup.load_cuda_runtime():
            raise EnvironmentProblem("TVM's CUDA runtime library does not load: is there a driver, and libcudart.so.13?")
        self.device = tvm.cuda(0)
        self._stream = ctypes.c_void_p()
        check(cudart().cudaStreamCreateWithFlags(ctypes.byref(self._stream), 1), "making a stream")
        self._begin, self._end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (self._begin, self._end):
            check(cudart().cudaEventCreate(ctypes.byref(event)), "making an event")

    def load(self, path: str) -> Any:
        return tvm.runtime.load_module(path)

    def l2_bytes(self) -> int:
        value = ctypes.c_int()
        check(cudart().cudaDeviceGetAttribute(ctypes.byref(value), _L2_BYTES, 0), "asking for the L2 cache")
        return value.value

    def place(self, value: Any) -> Any:
        """An array, on the device; numbers stay what they are."""
        if isinstance(value, Repeated):
            return self._filled(value)
        return tvm.runtime.tensor(np.ascontiguousarray(value), self.device) if isinstance(value, np.ndarray) else value

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return tvm.runtime.empty(tuple(shape), dtype, self.device)

    def clone(self, tensor: Any) -> Any:
        other = tvm.runtime.empty(tuple(int(d) for d in tensor.shape), str(tensor.dtype), self.device)
        copy_tensor(other, tensor, _bytes(tensor))
        return other

    def numpy(self, tensor: Any) -> np.ndarray:
        self.synchronize()
        array: np.ndarray = tensor.numpy()
        return array

    def write(self, tensor: Any, array: np.ndarray) -> None:
        tensor.copyfrom(array)

    def synchronize(self) -> None:
        synchronize()

    def captured(self, calls: Sequence[Call]) -> Callable[[], float]:
        """`calls` as one graph; the answer replays it and says how many microseconds one of them took. The first one has run
        before, so that nothing is loaded while capturing. A short graph runs twice and the second time counts: while it runs
        the first time, the host gets ahead, and the time holds no launch."""
        calls[0]()
        self.synchronize()
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        check(cudart().cudaStreamBeginCapture(self._stream, _THREAD_LOCAL), "beginning a graph")
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), self._stream.value):
            for call in calls:
                call()
        check(cudart().cudaStreamEndCapture(self._stream, ctypes.byref(graph)), "ending a graph")
        check(cudart().cudaGraphInstantiate(ctypes.byref(ready), graph, ctypes.c_ulonglong(0)), "making a graph")

        short = True

        def replay() -> float:
            nonlocal short
            took = ctypes.c_float()
            if short:
                check(cudart().cudaGraphLaunch(ready, self._stream), "starting a graph")
            check(cudart().cudaEventRecord(self._begin, self._stream), "starting a clock")
            check(cudart().cudaGraphLaunch(ready, self._stream), "starting a graph")
            check(cudart().cudaEventRecord(self._end, self._stream), "stopping a clock")
            check(cudart().cudaEventSynchronize(self._end), "running a graph")
            check(cudart().cudaEventElapsedTime(ctypes.byref(took), self._begin, self._end), "reading a clock")
            short = took.value < _SHORT_MS
            return took.value * 1e3 / len(calls)

        return replay

    def clocks(self) -> Facts:
        """MHz of the multiprocessors and of the memory and the temperature just now, where NVML says."""
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return {}
        handle, value, facts = ctypes.c_void_p(), ctypes.c_uint(), dict[str, Any]()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
            return {}
        clock, temperature = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetTemperature
        for name, ask, which in (("sm_mhz", clock, _SM), ("memory_mhz", clock, _MEMORY), ("celsius", temperature, 0)):
            if not ask(handle, which, ctypes.byref(value)):
                facts[name] = value.value
        return facts

    def _filled(self, wanted: Repeated) -> Any:
        tensor = tvm.runtime.empty(wanted.shape, str(np.dtype(wanted.block.dtype)), self.device)
        size = wanted.nbytes
        block = np.ascontiguousarray(wanted.block).reshape(-1)[:size // wanted.block.itemsize]
        first = tvm.runtime.tensor(block, self.device)
        done = min(block.nbytes, size)
        copy_tensor(tensor, first, done)
        whole = done
        while done < size:                                     # a whole number of blocks doubles
            more = min(done // whole * whole, size - done)
            copy_tensor(tensor, tensor, more, done)
            done += more
        self.synchronize()
        return tensor


def _bytes(tensor: Any) -> int:
    return int(np.prod([int(d) for d in tensor.shape])) * dtype_of(str(tensor.dtype)).itemsize
