"""The rules for leftovers, row-wise copies and sums: vectors on a CPU, a thread per element on a GPU (run in the emulator),
None for everything they do not know."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.schedules.rest import SOURCE, cpu_elementwise, cuda_elementwise, rest_rule
from relaxpack.target import TargetSpec
from tests.helpers import cuda_harness as harness
from tests.helpers.cuda_emulator import EmulatedModule
from tvm import te

emulated = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None or not harness.can_generate(),
    reason="needs g++ on x86-64 (the emulator) and libcudart (TVM's CUDA code generator)")


def take(width: int, sizes: tuple[int, int] | None = None) -> Any:
    rows, count = sizes or (tvm.tirx.Var("rows", "int64"), tvm.tirx.Var("count", "int64"))
    x, at = te.placeholder((rows, width), "float32", name="x"), te.placeholder((count,), "int32", name="at")
    return te.create_prim_func([x, at, te.compute((count, width), lambda i, j: x[at[i], j])])


def row_sum() -> Any:
    x = te.placeholder((8, 64), "float32", name="x")
    k = te.reduce_axis((0, 64))
    return te.create_prim_func([x, te.compute((8,), lambda i: te.sum(x[i, k], axis=k))])


@pytest.mark.parametrize("width", [64, 576])
def test_rows_are_copied_in_vectors(width: int) -> None:
    scheduled = cpu_elementwise(take(width))
    assert str(scheduled.attrs[SOURCE]) == "rule:cpu.elementwise" and "T.vectorized" in scheduled.script()
    module = tvm.compile(tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")}), target="llvm")
    x, at = np.random.default_rng(0).standard_normal((7, width)).astype(np.float32), np.array([3, 0, 6, 3], np.int32)
    out = tvm.runtime.tensor(np.full((4, width), np.nan, np.float32))
    module["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(at), out)
    np.testing.assert_array_equal(out.numpy(), x[at])


@pytest.mark.parametrize("func", [take(60), row_sum()], ids=["a width that is no multiple", "a sum"])
def test_it_declines(func: Any) -> None:
    assert cpu_elementwise(func) is None


def test_each_target_has_a_rule() -> None:
    assert rest_rule(TargetSpec("cpu", "x86-64-v3")) is cpu_elementwise
    assert callable(rest_rule(TargetSpec("cuda", "sm_90a")))


def next_token_ids() -> Any:
    """What `relax_models.ops.Graph.next_token_ids` writes."""
    from relaxpack.relax_models.ops import Graph
    from tvm import relax

    given, source = (relax.Var(name, relax.TensorType([3], "int32")) for name in ("given", "source"))
    drawn = relax.Var("drawn", relax.TensorType([4, 2], "int32"))
    builder = relax.BlockBuilder()
    with builder.function("step", [given, source, drawn]):
        with builder.dataflow():
            ids = builder.emit_output(Graph(builder).next_token_ids(given, source, drawn))
        builder.emit_func_output(ids)
    (func,) = [f for f in builder.get().functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    return func


@emulated
@pytest.mark.parametrize("width", [5, 320])
def test_rows_are_copied_by_threads(width: int) -> None:
    scheduled = cuda_elementwise(take(width, (7, 4)))
    assert str(scheduled.attrs[SOURCE]) == "rule:cuda.elementwise" and bool(scheduled.attrs["tirx.is_scheduled"])
    module = EmulatedModule(harness.generate_source({"rows": scheduled}, "sm_90a"))
    x, at = np.random.default_rng(0).standard_normal((7, width)).astype(np.float32), np.array([3, 0, 6, 3], np.int32)
    out = np.full((4, width), np.nan, np.float32)
    module.run("rows_kernel", (-(-4 * width // 256),), 256, x=x, at=at, compute=out)
    np.testing.assert_array_equal(out, x[at])


@emulated
def test_next_tokens_by_threads() -> None:
    scheduled = cuda_elementwise(next_token_ids())
    module = EmulatedModule(harness.generate_source({"ids": scheduled}, "sm_90a"))
    given, source = np.array([5, 6, 7], np.int32), np.array([-1, 3, 0], np.int32)
    drawn, out = np.array([[40, 7], [41, 7], [42, 7], [43, 7]], np.int32), np.full(3, -9, np.int32)
    module.run("ids_kernel", (1,), 256, given=given, source=source, drawn=drawn,
               next_token_ids=out)
    assert list(out) == [5, 43, 40]


def test_the_gpu_rule_declines_sums() -> None:
    assert cuda_elementwise(row_sum()) is None
