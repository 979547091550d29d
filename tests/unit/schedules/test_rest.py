"""The CPU rule for leftovers: vectors for row-wise copies and sums, None for everything it does not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.schedules.rest import SOURCE, cpu_elementwise, rest_rule
from relaxpack.target import TargetSpec
from tvm import te


def take(width: int) -> Any:
    rows, count = tvm.tirx.Var("rows", "int64"), tvm.tirx.Var("count", "int64")
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
