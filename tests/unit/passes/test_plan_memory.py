"""PlanMemory: storages are shared in time and over functions, dying inputs are overwritten where a kernel allows it."""

from __future__ import annotations

import json
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.memory_plan import OVERWRITES, PLAN, VerifyMemoryPlan, arena_bytes
from relaxpack.passes.plan_memory import PlanMemory
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


def plans(mod: tvm.IRModule, planner: Any) -> dict[str, Any]:
    with tvm.target.Target("llvm"):
        before = tvm.transform.Sequential([
            relax.transform.LegalizeOps(), relax.transform.ToNonDataflow(), relax.transform.RemovePurityChecking(),
            relax.transform.CallTIRRewrite()])(mod)
        return json.loads(str(VerifyMemoryPlan(planner(before)).attrs[PLAN]))


@I.ir_module
class Two:
    """A long function over many rows and a short one over few."""
    @R.function
    def many(x: R.Tensor(("t", 64), "float32")) -> R.Tensor(("t", 64), "float32"):
        t = T.int64()
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {"t": 8}})
        with R.dataflow():
            a = R.negative(x)
            b = R.negative(a)
            c = R.add(a, b)
            d = R.negative(c)
            y = R.negative(d)
            R.output(y)
        return y

    @R.function
    def few(x: R.Tensor((2, 64), "float32")) -> R.Tensor((2, 64), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}})
        with R.dataflow():
            a = R.negative(x)
            y = R.negative(a)
            R.output(y)
        return y


def test_functions_share_storages():
    found = plans(Two, PlanMemory())
    # a, b and c are alive together in the sum; d takes a's or b's place. `few` lives in what is there.
    assert found["many"]["storages"] == [2048] * 3 and found["many"]["live_bytes"] == 3 * 2048
    assert found["few"]["storages"] == [2048] and found["few"]["live_bytes"] == 512
    assert arena_bytes(found) == 3 * 2048
    assert [len(f["unplanned"]) for f in found.values()] == [1, 1]       # results are the caller's
    assert found["few"]["result_bytes"] == 512


def test_not_larger_than_tvms_plan():
    ours, theirs = plans(Two, PlanMemory()), plans(Two, relax.transform.StaticPlanBlockMemory())
    assert arena_bytes(ours) <= arena_bytes(theirs)


@I.ir_module
class Residual:
    """Two of `y = f(x, residual)`, in which `total` may stand where `residual` stood."""
    @T.prim_func(private=True, s_tir=True)
    def add(x: T.Buffer((T.int64(64),), "float32"), r: T.Buffer((T.int64(64),), "float32"),
            total: T.Buffer((T.int64(64),), "float32")):
        T.func_attr({"relaxpack.overwrites": [[1, 2]]})
        for i in range(64):
            total[i] = x[i] + r[i]

    @T.prim_func(private=True, s_tir=True)
    def copy(x: T.Buffer((T.int64(64),), "float32"), y: T.Buffer((T.int64(64),), "float32")):
        for i in range(64):
            y[i] = x[i]

    @R.function
    def step(x: R.Tensor((64,), "float32")) -> R.Tensor((64,), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}, "relax.force_pure": True})
        cls = Residual
        r = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _0 = cls.copy(x, r)
        a = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _1 = cls.copy(r, a)
        total = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _2 = cls.add(a, r, total)
        y = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _3 = cls.copy(total, y)
        return y


def test_a_dying_input_is_overwritten():
    plan = json.loads(str(VerifyMemoryPlan(PlanMemory()(Residual)).attrs[PLAN]))["step"]
    assert plan["storages"] == [256, 256] and plan["live_bytes"] == 512
    assert {t["name"]: t["overwrites"] for t in plan["tensors"]} == {"r": None, "a": None, "total": "r"}
    assert OVERWRITES == "relaxpack.overwrites"


def test_without_overwriting_it_needs_a_third():
    plan = json.loads(str(VerifyMemoryPlan(PlanMemory(overwrite=False)(Residual)).attrs[PLAN]))["step"]
    assert plan["storages"] == [256] * 3


def test_the_module_is_not_changed():
    kept = tvm.ir.load_json(tvm.ir.save_json(Residual))
    after = PlanMemory()(Residual)
    tvm.ir.assert_structural_equal(Residual, kept)
    assert relax.analysis.check_well_formed(after)


@I.ir_module
class Captured:
    """A bucket's function: the result leaves through the identity copy, so it is planned, and lives to the end."""
    @T.prim_func(private=True, s_tir=True)
    def copy(x: T.Buffer((T.int64(64),), "float32"), y: T.Buffer((T.int64(64),), "float32")):
        for i in range(64):
            y[i] = x[i]

    @R.function
    def step(x: R.Tensor((64,), "float32")) -> R.Tensor((64,), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}, "relax.force_pure": True, "relaxpack.bucket": 1})
        cls = Captured
        a = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _0 = cls.copy(x, a)
        b = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _1 = cls.copy(a, b)
        view = R.reshape(a, R.shape([64]))
        c = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _2 = cls.copy(view, c)
        y = R.call_pure_packed("vm.builtin.copy", b, ty_args=R.Tensor((64,), "float32"))
        return y


def test_results_of_captured_functions_are_planned_and_live_to_the_end():
    plan = json.loads(str(VerifyMemoryPlan(PlanMemory()(Captured)).attrs[PLAN]))["step"]
    assert plan["captured"] and plan["unplanned"] == []
    tensors = {t["name"]: t for t in plan["tensors"]}
    # `a` is read through its view after `b` is written; `c` may not take the place of the result.
    assert len({tensors[name]["storage"] for name in "abc"}) == 3 and plan["live_bytes"] == 768


@I.ir_module
class Nested:
    """`a` is read through a tuple inside a tuple, after `b` was written."""
    @T.prim_func(private=True, s_tir=True)
    def copy(x: T.Buffer((T.int64(64),), "float32"), y: T.Buffer((T.int64(64),), "float32")):
        for i in range(64):
            y[i] = x[i]

    @R.function
    def step(x: R.Tensor((64,), "float32")) -> R.Tensor((64,), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}, "relax.force_pure": True})
        cls = Nested
        a = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _0 = cls.copy(x, a)
        both = ((x, a), x)
        b = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _1 = cls.copy(x, b)
        c = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _2 = cls.copy(b, c)
        inner = both[0]
        kept = inner[1]
        y = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _3 = cls.copy(kept, y)
        return y


def test_tuples_in_tuples_keep_their_tensors_alive():
    plan = json.loads(str(VerifyMemoryPlan(PlanMemory()(Nested)).attrs[PLAN]))["step"]
    storages = {t["name"]: t["storage"] for t in plan["tensors"]}
    assert len({storages[name] for name in "abc"}) == 3 and plan["storages"] == [256] * 3
