"""Kernels that call a library: the buffers reach the packed function, the numbers come back, a captured step holds the
call, and nothing is called unless somebody chose it. The library here is NumPy.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.one_target import _libraries
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import Kernel, LinearSpec
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime.library import cublaslt
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.schedules.cuda_compile import compile_module
from relaxpack.schedules.kernels.cuda import library as library_kernels
from relaxpack.schedules.kernels.cuda.library import library_linear, why_not
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import TargetSpec
from relaxpack.weight_format import FORMATS
from tests.helpers import captured_model
from tests.helpers.plain_kernels import PlainKernels

SPEC = LinearSpec(24, 64, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=4)
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


def array(address: ctypes.c_void_p, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """A view of what a kernel hands over."""
    raw = (ctypes.c_uint8 * (shape[0] * shape[1] * _DTYPES[dtype].itemsize)).from_address(address.value)
    return np.frombuffer(raw, _DTYPES[dtype]).reshape(shape)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """NumPy under the names of cuBLASLt's functions; what was called."""
    seen: list[str] = []

    def product(x: Any, w: Any, t: int, n: int, k: int, dtype: str) -> np.ndarray:
        return array(x, (t, k), dtype).astype(np.float64) @ array(w, (n, k), dtype).astype(np.float64).T

    def matmul(x: Any, w: Any, y: Any, t: int, n: int, k: int, dtype: str, out_dtype: str,
               algorithm: int = 0) -> None:
        seen.append(f"matmul{algorithm or ''}")
        array(y, (t, n), out_dtype)[:] = product(x, w, t, n, k, dtype).astype(_DTYPES[out_dtype])

    def matmul_add(x: Any, w: Any, residual: Any, y: Any, t: int, n: int, k: int, dtype: str, out_dtype: str) -> None:
        seen.append("matmul_add")
        total = product(x, w, t, n, k, dtype) + array(residual, (t, n), dtype).astype(np.float64)
        array(y, (t, n), out_dtype)[:] = total.astype(_DTYPES[out_dtype])

    tvm.register_global_func(cublaslt.MATMUL, matmul, override=True)
    tvm.register_global_func(cublaslt.MATMUL_ADD, matmul_add, override=True)
    yield seen
    for name in (cublaslt.MATMUL, cublaslt.MATMUL_ADD):
        tvm.register_global_func(name, _nothing, override=True)


def _nothing(*arguments: Any) -> None:
    raise AssertionError("the library was called outside of its test")


def raw(values: np.ndarray) -> Any:
    """A TVM tensor of any of the dtypes."""
    if values.dtype.name != "bfloat16":
        return tvm.runtime.tensor(values)
    tensor = tvm.runtime.empty(values.shape, "bfloat16", tvm.cpu())
    tensor._create_view(values.shape, "uint16").copyfrom(values.view(np.uint16))
    return tensor


@pytest.mark.parametrize("dtype, out, residual", [("bfloat16", "bfloat16", False), ("bfloat16", "float32", False),
                                                  ("float16", "float16", True), ("bfloat16", "bfloat16", True)])
def test_buffers_reach_the_library_and_numbers_come_back(calls: list[str], dtype: str, out: str, residual: bool,
                                                         rng: np.random.Generator) -> None:
    spec = replace(SPEC, weight=FORMATS["bf16" if dtype == "bfloat16" else "f16"], activation_dtype=dtype, out_dtype=out,
                   residual=residual)
    (stage,) = library_linear(spec, "cublaslt").stages
    module = tvm.IRModule({stage.name: stage.func.with_attr("global_symbol", stage.name)})
    run = tvm.compile(module, tvm.target.Target({"kind": "llvm"}))[stage.name]
    x, w, r = (rng.standard_normal(shape).astype(_DTYPES[dtype]) for shape in ((3, 64), (24, 64), (3, 24)))
    poisoned = raw(np.full((3, 24), np.nan, _DTYPES[out]))
    inputs = [raw(x), raw(w), *([raw(r)] if residual else [])]
    run(*inputs, poisoned)
    expected = x.astype(np.float64) @ w.astype(np.float64).T + (r.astype(np.float64) if residual else 0)
    found = array(ctypes.c_void_p(poisoned.data_ptr()), (3, 24), out)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2e-2, atol=5e-2)
    assert calls == ["matmul_add" if residual else "matmul"]


def test_the_place_in_the_librarys_ranking_reaches_it(calls: list[str], rng: np.random.Generator) -> None:
    stages = [library_linear(SPEC, "cublaslt", place).stages[0] for place in (0, 3)]
    run = tvm.compile(tvm.IRModule({stage.name: stage.func.with_attr("global_symbol", stage.name) for stage in stages}),
                      tvm.target.Target({"kind": "llvm"}))
    dtype = _DTYPES["bfloat16"]
    arguments = [raw(rng.standard_normal(shape).astype(dtype)) for shape in ((3, 64), (24, 64), (3, 24))]
    for stage in stages:
        run[stage.name](*arguments)
    assert calls == ["matmul", "matmul3"] and stages[1].name == f"{stages[0].name}_a3"


@pytest.mark.parametrize("change, words", [
    ({"bias": True}, "not called for a bias"), ({"glu": "swiglu"}, "not called for a gated linear unit"),
    ({"weight": FORMATS["q4_1"]}, "plain weights of the activations' dtype, not q4_1"),
    ({"weight": FORMATS["f16"]}, "not f16"),
    ({"residual": True, "out_dtype": "float32"}, "no bfloat16 residual to float32")])
def test_what_the_library_does_not_compute(change: dict[str, Any], words: str) -> None:
    spec = replace(SPEC, **change)
    assert words in (why_not(spec, "cublaslt") or "")
    with pytest.raises(CompileError, match="linear 24x64: cublaslt"):
        library_linear(spec, "cublaslt")
    assert "unknown to this relaxpack" in (why_not(SPEC, "mkl") or "")


def test_only_what_was_chosen_is_called() -> None:
    target = TargetSpec("cuda", "sm_90a")
    assert CudaKernels(target).linear(SPEC).source.startswith("rule:"), "off by default"
    chosen = CudaKernels(target, lambda spec: "cublaslt" if spec.max_rows == 4 else None)
    assert chosen.linear(SPEC).source == "library:cublaslt"
    assert chosen.linear(replace(SPEC, max_rows=8)).source.startswith("rule:")
    assert chosen.linear(SPEC) is chosen.linear(SPEC)


def test_a_manifest_names_the_library() -> None:
    kernels = [{"name": "a", "source": "library:cublaslt"}, {"name": "b", "source": "rule:cuda.norm"},
               {"name": "c", "source": "library:cublaslt"}]
    assert _libraries(SimpleNamespace(explanation={"kernels": kernels})) == {  # type: ignore[arg-type]
        "cublaslt": {"kernels": 2}}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_call_lowers_for_a_gpu_beside_kernels() -> None:
    """It is a function of the host: no kernel is generated for it."""
    from relaxpack.kernel_spec import NormSpec

    kernels = CudaKernels(TargetSpec("cuda", "sm_90a"), lambda spec: "cublaslt")
    stages = [*kernels.linear(SPEC).stages, *kernels.norm(NormSpec(64, 1e-5, "bfloat16", False)).stages]
    module = tvm.IRModule({s.name: s.func.with_attr("global_symbol", s.name) for s in stages})
    executable = compile_module(module, TargetSpec("cuda", "sm_90a"))
    (device,) = [m for m in _modules(executable) if m.kind == "cuda"]
    source = device.inspect_source()
    assert "cublaslt" not in source and "rms_norm" in source
    host = next(m for m in _modules(executable) if m.kind == "llvm")
    assert cublaslt.MATMUL in host.inspect_source("ll")


def _modules(executable: Any) -> list[Any]:
    found, todo = [], [getattr(executable, "mod", executable)]
    while todo:
        found.append(module := todo.pop())
        todo += list(module.imports)
    return found


class _SomeByLibrary(PlainKernels):
    """Every projection that the library can do, in float32 as all that is plain; the attention's input projection not."""

    def linear(self, spec: LinearSpec) -> Kernel:
        if spec.bias or spec.gated or spec.residual or spec.out_features == 64:
            return super().linear(spec)
        func = library_kernels._call(cublaslt.MATMUL, spec.out_features, spec.in_features, "float32", "float32", False)
        (stage,) = library_linear(SPEC, "cublaslt").stages
        name = f"cublaslt_{spec.out_features}x{spec.in_features}"
        return Kernel((replace(stage, func=func, name=name),), "library:cublaslt")

    def folds_norm(self, spec: LinearSpec) -> bool:
        return False


def test_a_captured_step_holds_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    limits, buckets = BuildLimits(64, max_batch=2, prefill_chunk=8, page_size=4), {"decode": (1, 2), "prefill": (4,)}
    captured_model.host_memory(monkeypatch)
    plain = captured_model.build(tmp_path, limits, buckets)
    expected = _steps(captured_model.runner(plain)[0])
    monkeypatch.setattr(captured_model, "PlainKernels", _SomeByLibrary)
    (tmp_path / "library").mkdir()
    model = captured_model.build(tmp_path / "library", limits, buckets)
    runner, log = captured_model.runner(model)
    for one, other in zip(expected, _steps(runner), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert set(calls) == {"matmul"} and len(calls) % 5 == 0        # two in each of two layers, and the head
    for function in ("decode_1", "decode_2", "prefill_4"):
        text = model.final[function].script()
        assert text.count("vm.builtin.cuda_graph.run_or_capture") == 1 and "cls.cublaslt_" not in text, function
    assert log.count("capture") == 3


def _steps(runner: Any) -> list[np.ndarray]:
    rows = [runner.forward(StepPlan((SequenceStep([3, 1, 4], 0, [1, 2], [2]),)))]
    rows.append(runner.forward(StepPlan((SequenceStep([5], 3, [1, 2], [0]),))))
    rows.append(runner.forward(StepPlan((SequenceStep([6], 4, [1, 2], [0]), SequenceStep([7], 0, [3], [0])))))
    return rows
