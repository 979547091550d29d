"""Runs one kernel of the CPU provider at every instruction set of this machine, on two threads; outputs start as NaN."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import Kernel, LinearSpec
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.target import TargetSpec, host_cpu_features, parse_target
from tests.helpers.matmul_case import activation
from tests.helpers.tvm_threads import on_threads

_AVX2 = ("avx2", "fma", "f16c")
LEVELS = {
    "avx2": lambda: parse_target("cpu:x86-64-v3"),
    "avx2-vnni": lambda: TargetSpec("cpu", "alderlake", (*_AVX2, "avxvnni")),
    "avx512": lambda: parse_target("cpu:x86-64-v4"),
    "avx512-vnni": lambda: TargetSpec("cpu", "cascadelake", (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512vnni")),
}


@cache
def provider(level: str) -> CpuKernels:
    target = LEVELS[level]()
    missing = set(target.features) - set(host_cpu_features())
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    return CpuKernels(target)


@cache
def compiled(kernels: CpuKernels, kernel_id: int) -> tvm.runtime.Module:
    stage, = next(k for k in kernels._kernels.values() if id(k) == kernel_id).stages
    target = kernels.target.to_tvm()
    with target:
        return tvm.compile(tvm.IRModule({"f": stage.func.with_attr("global_symbol", "f")}), target)


def run(kernels: CpuKernels, kernel: Kernel, values: dict[str, object],
        outputs: dict[str, tuple[int, ...]]) -> list[np.ndarray]:
    """Compile the kernel's only stage and call it. Outputs are poisoned; arrays in `inplace` are updated in `values`."""
    stage, = kernel.stages
    module = compiled(kernels, id(kernel))
    args = [values[n] if n == "layer" else tvm.runtime.tensor(np.ascontiguousarray(values[n])) for n in stage.inputs]
    results = [tvm.runtime.tensor(np.full(outputs[n], np.nan, "float32")) for n in stage.outputs]
    on_threads(2, module["f"], *args, *results)
    for name in stage.inplace:
        values[name] = args[stage.inputs.index(name)].numpy()
    return [r.numpy() for r in results]


def finish(product: np.ndarray, spec: LinearSpec, bias: np.ndarray, residual: np.ndarray) -> np.ndarray:
    y = product + (bias if spec.bias else 0)
    if spec.gated:
        gate, up = np.split(y, 2, axis=1)
        y = activation(spec.glu, gate) * up
    return y + (residual if spec.residual else 0)
