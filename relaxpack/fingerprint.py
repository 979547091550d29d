"""The two halves of a tuning record's key that are not the work itself: what the machine is and what compiles for it.
Both are flat mappings of plain facts; a record is used only where both are equal, fact by fact.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache

from relaxpack.dist.host import cuda_driver
from relaxpack.errors import EnvironmentProblem
from relaxpack.kernel_generations import OTHERS, for_workload
from relaxpack.target import TargetSpec
from relaxpack.tuning_record import Facts, TuningRecord

_SM_COUNT, _L2_BYTES = 16, 38    # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _L2_CACHE_SIZE (cuda.h)


def target_fingerprint(target: TargetSpec, gpu: int = 0, *, must_be_here: bool = True) -> Facts:
    """Facts of a CPU target, or of the GPU number `gpu` of this machine. What another GPU is cannot be known here: raises
    EnvironmentProblem, or answers with facts that no record has, so that a look-up finds nothing and can say why."""
    if target.kind == "cpu":
        return {"kind": "cpu", "arch": target.arch, "features": tuple(sorted(target.features)), "threads": target.threads}
    try:
        return {"kind": "cuda", "arch": target.arch, **_gpu_facts(target.arch, gpu)}
    except EnvironmentProblem:
        if must_be_here:
            raise
        return {"kind": "cuda", "arch": target.arch, "name": None, "sm_count": None, "l2_bytes": None, "memory_gib": None}


def compiler_fingerprint(kind: str) -> Facts:
    """`kind` is that of the target, "cpu" or "cuda". A record has them `for_workload`. Imports TVM."""
    facts: dict[str, str | int] = {"apache-tvm": importlib.metadata.version("apache-tvm"),
                                   "kernels": OTHERS[kind]}
    if kind == "cuda":
        return facts | {"cuda": _cuda_version()}
    import relaxpack.tvm_setup  # noqa: F401
    import tvm

    return facts | {"llvm": int(tvm.get_global_func("target.llvm_version_major")())}


def difference(here: Facts, there: Facts) -> str:
    """The facts in which two fingerprints differ, in words: "threads 2 here, 4 there"; "" where they are equal."""
    return ", ".join(_difference(name, here, there) for name in sorted(here.keys() | there.keys())
                     if here.get(name) != there.get(name))


def _difference(name: str, here: Facts, there: Facts) -> str:
    own, other = here.get(name), there.get(name)
    if own and other and isinstance(own, tuple) and isinstance(other, tuple):      # of long lists only what is not in both
        only = {"here": [one for one in own if one not in other], "there": [one for one in other if one not in own]}
        return f"{name} " + ", ".join(f"{' '.join(map(str, ones))} only {where}" for where, ones in only.items() if ones)
    return f"{name} {_shown(here, name)} here, {_shown(there, name)} there"


def other_compiler(record: TuningRecord) -> str:
    """How a record's compiler visibly differs from the one here, or "". Cheap: it asks neither TVM nor nvcc, so what it
    does not see (LLVM, CUDA) is left to the comparison of whole fingerprints."""
    facts = record.compiler
    own = for_workload({"apache-tvm": importlib.metadata.version("apache-tvm"),
                        "kernels": OTHERS["cuda" if "cuda" in facts else "cpu"]}, record.workload)
    return difference(own, {name: fact for name, fact in facts.items() if name in own})


def described(facts: Facts) -> str:
    """One short line for people: "cpu:znver5, 2 threads"."""
    name = f"{facts.get('kind', '')}:{facts.get('arch', '')}".strip(":")
    if facts.get("kind") == "cpu":
        return f"{name}, {facts.get('threads')} threads"
    if facts.get("kind") == "cuda":
        return f"{name}, {facts.get('name') or 'GPU'}, {facts.get('sm_count')} SMs"
    return ", ".join(f"{name} {_shown(facts, name)}" for name in facts)


def _shown(facts: Facts, name: str) -> str:
    value = facts.get(name, "nothing")
    if value is None or value == ():
        return "unknown" if value is None else "none"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _gpu_facts(arch: str, index: int) -> Mapping[str, str | int]:
    driver = cuda_driver()
    if index >= len(driver.gpus):
        raise EnvironmentProblem(f"records of {arch} are looked up by the facts of its GPU, and this machine has no GPU "
                                 f"{index}: {driver.problem or 'the driver shows none'}")
    gpu = driver.gpus[index]
    own = "sm_{}{}".format(*gpu.capability)
    if arch.rstrip("a") != own:
        raise EnvironmentProblem(f"the GPU here is {gpu.name} ({own}), not {arch}")
    cuda, device, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    numbers = []
    for attribute in (_SM_COUNT, _L2_BYTES):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        numbers.append(value.value)
    # The driver's total varies by some MiB between its versions.
    return {"name": gpu.name, "sm_count": numbers[0], "l2_bytes": numbers[1], "memory_gib": round(gpu.memory_bytes / 2**30)}


@cache
def _cuda_version() -> str:
    """Major and minor number of what compiles CUDA C++ here: nvcc where there is one, else NVRTC's wheel."""
    if nvcc := shutil.which("nvcc"):
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        if found := re.search(r"release (\d+\.\d+)", said):
            return found.group(1)
    try:
        return ".".join(importlib.metadata.version("nvidia-cuda-nvrtc").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentProblem("no CUDA compiler: install the CUDA toolkit, or pip install 'relaxpack[cuda]'") from None
