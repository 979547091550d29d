"""Opens a bundle's library and runs its functions. The only file of the runtime that loads TVM code; it knows neither
sequences nor pages, and works with a TVM that has no compiler library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import relaxpack.tvm_setup as tvm_setup
import tvm
import tvm_ffi
from relaxpack.errors import BundleError, EnvironmentProblem
from relaxpack.runtime import cuda_memory
from tvm.runtime.vm import VirtualMachine


def device_for(kind: str, index: int = 0) -> Any:
    """The TVM device of a target kind ("cpu" or "cuda")."""
    if kind == "cpu":
        return tvm.cpu(0)
    if not tvm_setup.load_cuda_runtime() or not tvm.cuda(index).exist:
        raise EnvironmentProblem("this bundle's target needs an NVIDIA GPU and its driver, and none is visible here; "
                                 "see `relaxpack doctor`")
    return tvm.cuda(index)


def as_tensor(array: np.ndarray) -> Any:
    """A CPU tensor over the array's own memory (no copy where it is writable and 64-byte aligned)."""
    if array.flags.writeable and array.flags.c_contiguous and array.ctypes.data % 64 == 0 and _plain(array):
        return tvm.runtime.from_dlpack(array)
    return tvm.runtime.tensor(np.ascontiguousarray(array))


def _plain(array: np.ndarray) -> bool:
    return array.dtype.kind in "iuf" and array.dtype.isbuiltin == 1


def as_array(tensor: Any) -> np.ndarray:
    """A NumPy view of a CPU tensor; keeps its memory alive."""
    return np.from_dlpack(tensor)


_RUN_OR_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"


@contextmanager
def _graphs_off() -> Iterator[None]:
    """Libraries opened inside run captured regions as plain calls: the same kernels, launched one by one."""
    invoke = tvm.get_global_func("vm.builtin.invoke_closure")
    original = tvm.get_global_func(_RUN_OR_CAPTURE)

    def run(vm: Any, closure: Any, arguments: Any, index: int, shape: Any = None) -> Any:
        return invoke(vm, closure, *arguments)

    tvm.register_global_func(_RUN_OR_CAPTURE, run, override=True)
    try:
        yield
    finally:
        tvm.register_global_func(_RUN_OR_CAPTURE, original, override=True)


class Library:
    """A loaded library with its parameters bound: `call(name, inputs)` runs an exported function. `graphs` False: what
    was built for capture runs eagerly (for debugging)."""

    def __init__(self, path: Path, device: Any, parameters: Iterable[Any], graphs: bool = True) -> None:
        try:
            module = tvm.runtime.load_module(str(path))
        except (RuntimeError, OSError, ValueError) as error:
            raise BundleError(f"{path}: TVM cannot load this library: {str(error).strip().splitlines()[-1]}") from error
        with nullcontext() if graphs else _graphs_off():
            self._vm = VirtualMachine(module, device)
        self._module, self._device = module, device
        self._parameters = tvm_ffi.convert(list(parameters))
        self._addresses = {p.data_ptr() for p in self._parameters}
        self._functions: dict[str, Any] = {}

    def call(self, name: str, inputs: list[Any]) -> Any:
        if name not in self._functions:
            self._functions[name] = self._vm[name]
        return self._functions[name](*inputs, self._parameters)

    def facts(self) -> str:
        """TVM's own description of the compiled code: names, constants, and what it checks of each input."""
        return str(self._module["stats"]())

    def instrument(self, observe: Any) -> None:
        """`observe(func, name, before_run, ret_value, *args)` is called around every kernel from now on."""
        self._vm.set_instrument(observe)

    def kernel(self, name: str) -> Any:
        """One kernel, to be called by itself."""
        (kernels,) = self._module.imports
        return kernels.get_function(name)

    def is_parameter(self, argument: Any) -> bool:
        return hasattr(argument, "data_ptr") and argument.data_ptr() in self._addresses

    def copy_of(self, tensor: Any) -> Any:
        return tvm.runtime.empty(tensor.shape, tensor.dtype, self._device).copyfrom(tensor)

    def time_kernel(self, name: str, arguments: Sequence[Any], repeats: int, flush_bytes: int,
                    flush: Callable[[], object] | None = None) -> float:
        """Seconds of the best of some runs of one kernel by the device's own clock. Before each, `flush` is called on a GPU
        if it is given, else `flush_bytes` are written, so that the kernel finds nothing in a cache of that size. The
        kernel does what it does: outputs are written."""
        if self._device.dlpack_device_type() != tvm.cpu().dlpack_device_type():
            if flush is None and flush_bytes:
                written = tvm.runtime.empty((flush_bytes,), "uint8", self._device)
                return time_on_stream(self.kernel(name), arguments, repeats,
                                      lambda: cuda_memory.fill_zero(written, flush_bytes))
            return time_on_stream(self.kernel(name), arguments, repeats, flush)
        (kernels,) = self._module.imports
        timer = kernels.time_evaluator(name, self._device, number=1, repeat=repeats, cache_flush_bytes=flush_bytes)
        return float(min(timer(*arguments).results))


def time_on_stream(kernel: Any, arguments: Sequence[Any], repeats: int, flush: Callable[[], object] | None) -> float:
    """Seconds of the best of some runs of a kernel between two events, less what the events cost with nothing between them.
    While the device flushes, the host queues the events and the launch, so that no launch latency lies between the
    events (TVM's evaluator waits before it launches)."""
    kernel(*arguments)                          # once before, for what happens only once
    span = cuda_memory.Span()

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats):
            if flush is not None:
                flush()
            span.begin()
            run()
            span.end()
            times.append(span.seconds())
        return min(times)

    nothing = best(lambda: None)
    return max(best(lambda: kernel(*arguments)) - nothing, 0.0)
