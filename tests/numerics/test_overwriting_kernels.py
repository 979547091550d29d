"""Kernels that say an output may take an input's bytes (`Stage.overwrites`): with the very same memory for both, the results
are those of separate memory, bit for bit. For every such kernel of both providers; the CUDA ones on the emulator.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.kernel_spec import NormSpec, Stage
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.schedules.kernels.cuda.norm import norm as cuda_norm
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import TargetSpec, parse_target
from tests.helpers import matmul_case as case

DECLARED = {True: (("residual", "total"), ("x", "y")), False: (("x", "y"),)}


def arrays(rng: np.random.Generator, rows: int, size: int, dtype: str, residual: bool) -> dict[str, np.ndarray]:
    given = {"x": case.random_array(rng, (rows, size), dtype)}
    if residual:
        given["residual"] = case.random_array(rng, (rows, size), dtype)
    return given | {"weight": rng.standard_normal(size).astype(np.float32)}


def outputs_of(given: dict[str, np.ndarray], residual: bool, shared: bool) -> dict[str, np.ndarray]:
    """Poisoned outputs, or with `shared` the inputs themselves."""
    return {new: given[old] if shared else case.poisoned(given[old].shape, given[old].dtype.name)
            for old, new in DECLARED[residual]}


def check_declared(stage: Stage, residual: bool) -> None:
    assert stage.overwrites == DECLARED[residual]
    assert not (stage.func.attrs or {}).get("tirx.noalias", False)      # else the compiler may reorder reads and writes


@pytest.mark.parametrize("residual", [True, False], ids=["add + norm", "norm"])
@pytest.mark.parametrize("size", [64, 576, 77])
def test_cpu(size: int, residual: bool) -> None:
    target = parse_target("cpu")
    (stage,) = CpuKernels(target).norm(NormSpec(size, 1e-5, "float32", residual)).stages
    check_declared(stage, residual)
    with target.to_tvm():
        module = tvm.compile(tvm.IRModule({"main": stage.func.with_attr("global_symbol", "main")}))
    for rows in (1, 3, 40):
        results = []
        for shared in (False, True):
            given = arrays(np.random.default_rng(rows), rows, size, "float32", residual)
            out = outputs_of(given, residual, shared)
            tensors = {id(a): tvm.runtime.tensor(a) for a in [*given.values(), *out.values()]}
            module["main"](*(tensors[id({**given, **out}[name])] for name in (*stage.inputs, *stage.outputs)))
            results.append([tensors[id(out[name])].numpy() for name in stage.outputs])
        for separate, over in zip(*results, strict=True):
            assert np.isfinite(separate).all()
            np.testing.assert_array_equal(over, separate)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to lower CUDA kernels")
@pytest.mark.parametrize("residual", [True, False], ids=["add + norm", "norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [64, 576, 2056])
def test_cuda(size: int, dtype: str, residual: bool) -> None:
    spec = NormSpec(size, 1e-5, dtype, residual)
    (stage,) = CudaKernels(TargetSpec("cuda", "sm_90a")).norm(spec).stages
    check_declared(stage, residual)
    threads = min(1024, -(-(size // 8) // 32) * 32)
    results: list[list[Any]] = []
    for shared in (False, True):
        given = arrays(np.random.default_rng(size), 3, size, dtype, residual)
        out = outputs_of(given, residual, shared)
        case.emulate(cuda_norm(spec), (3,), threads, t=3, **{("before" if n == "residual" else n): a
                                                              for n, a in {**given, **out}.items()})
        results.append([out[name].astype(np.float32) for name in stage.outputs])
    for separate, over in zip(*results, strict=True):
        assert np.isfinite(separate).all()
        np.testing.assert_array_equal(over, separate)
