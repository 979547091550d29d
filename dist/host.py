"""What this machine is, as far as bundles care: CPU features and GPUs. Asks the operating system and the CUDA driver,
never TVM.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache

from relaxpack.target import host_cpu_features

_CUDA_SUCCESS = 0
_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR (cuda.h)


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]  # compute capability, e.g. (9, 0)
    memory_bytes: int


@dataclass(frozen=True)
class CudaDriver:
    """`version` is the newest CUDA the driver serves, e.g. (13, 0). Without a usable driver it is None and
    `problem` says why."""

    version: tuple[int, int] | None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Host:
    machine: str                        # platform.machine(), e.g. "x86_64"
    cpu_features: tuple[str, ...]       # out of relaxpack.target.CPU_FEATURES
    gpus: tuple[Gpu, ...] = ()

    def described(self, features: bool) -> str:
        """For a person; the CPU's features are many, and only matter where code for a CPU does not run."""
        gpus = ", ".join(f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
                         for gpu in self.gpus)
        cpu = f" with {' '.join(self.cpu_features) or 'none of the known features'}" if features else ""
        return f"{self.machine} CPU{cpu}; {gpus or 'no NVIDIA GPU'}"


def detect_host() -> Host:
    return Host(platform.machine(), host_cpu_features(), cuda_driver().gpus)


@cache
def cuda_driver() -> CudaDriver:
    """Ask libcuda once per process. Never raises; creates no context, so it takes no GPU memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return CudaDriver(None, problem="libcuda.so.1 is not installed")
    try:
        return _ask(cuda)
    except (AttributeError, OSError) as error:  # a stub that lacks functions
        return CudaDriver(None, problem=f"libcuda.so.1 is not usable: {error}")


def _ask(cuda: ctypes.CDLL) -> CudaDriver:
    code = cuda.cuInit(0)
    if code != _CUDA_SUCCESS:
        return CudaDriver(None, problem=f"cuInit failed with code {code} (100: no GPU is visible to this process)")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = number.value // 1000, number.value % 1000 // 10
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return CudaDriver(version, problem="cuDeviceGetCount failed")
    gpus = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        memory, name = ctypes.c_size_t(), ctypes.create_string_buffer(100)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _ATTRIBUTE_MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _ATTRIBUTE_MINOR, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        gpus.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value), memory.value))
    return CudaDriver(version, tuple(gpus))
