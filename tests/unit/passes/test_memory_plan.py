"""VerifyMemoryPlan: reads plans back, and catches planted faults: shared bytes, a tensor outside its storage."""

from __future__ import annotations

import json

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.passes.memory_plan import PLAN, PlannedTensor, VerifyMemoryPlan, check_no_overlap, upper_bound
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


@I.ir_module
class Chain:
    """y = -(-(-(-x))): four intermediates of which at most two live at once."""
    @R.function
    def step(x: R.Tensor(("t", 8), "float32")) -> R.Tensor(("t", 8), "float32"):
        t = T.int64()
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {"t": 4}})
        with R.dataflow():
            a = R.negative(x)
            b = R.negative(a)
            c = R.negative(b)
            d = R.negative(c)
            y = R.negative(d)
            R.output(y)
        return y


def planned(mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.transform.Sequential([
        relax.transform.LegalizeOps(), relax.transform.ToNonDataflow(), relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(), relax.transform.StaticPlanBlockMemory()])(mod)


def test_the_plan_of_a_chain():
    with tvm.target.Target("llvm"):
        after = VerifyMemoryPlan(planned(Chain))
    plan = json.loads(str(after.attrs[PLAN]))["step"]
    assert plan["storages"] == [128, 128] and plan["bytes"] == 256    # 4 x 8 float32, taken in turns
    assert [t["storage"] for t in plan["tensors"]] == [0, 1, 0, 1]
    assert all(t["size"] == 128 and t["offset"] == 0 for t in plan["tensors"])
    assert all(a["last"] <= c["first"] for a, c in zip(plan["tensors"], plan["tensors"][2:], strict=False))
    assert len(plan["unplanned"]) == 1                                # the result is the caller's




@I.ir_module
class Overlap:
    """`a` is read after `b` was written to the same bytes."""
    @T.prim_func(private=True, s_tir=True)
    def copy(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        for i in range(8):
            y[i] = x[i]

    @T.prim_func(private=True, s_tir=True)
    def add(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32"),
            z: T.Buffer((T.int64(8),), "float32")):
        for i in range(8):
            z[i] = x[i] + y[i]

    @R.function
    def step(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}, "relax.force_pure": True})
        cls = Overlap
        s = R.memory.alloc_storage(R.shape([48]), R.prim_value(0), R.str("global"), R.dtype("uint8"))
        a = R.memory.alloc_tensor(s, R.prim_value(0), R.shape([8]), R.dtype("float32"))
        _0 = cls.copy(x, a)
        b = R.memory.alloc_tensor(s, R.prim_value(16), R.shape([8]), R.dtype("float32"))
        _1 = cls.copy(x, b)
        y = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _2 = cls.add(a, b, y)
        return y


@I.ir_module
class TakenInTurns:
    """The same storage, but `a` is dead before `b` is written."""
    @T.prim_func(private=True, s_tir=True)
    def copy(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        for i in range(8):
            y[i] = x[i]

    @R.function
    def step(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}, "relax.force_pure": True})
        cls = TakenInTurns
        s = R.memory.alloc_storage(R.shape([48]), R.prim_value(0), R.str("global"), R.dtype("uint8"))
        a = R.memory.alloc_tensor(s, R.prim_value(0), R.shape([8]), R.dtype("float32"))
        _0 = cls.copy(x, a)
        _1 = cls.copy(a, x)
        b = R.memory.alloc_tensor(s, R.prim_value(16), R.shape([8]), R.dtype("float32"))
        _2 = cls.copy(x, b)
        y = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _3 = cls.copy(b, y)
        return y


@I.ir_module
class KeptAliveByAView:
    """`a` itself is not read after `b` is written, but its reshape is."""
    @T.prim_func(private=True, s_tir=True)
    def copy(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        for i in range(8):
            y[i] = x[i]

    @T.prim_func(private=True, s_tir=True)
    def copy2(x: T.Buffer((T.int64(2), T.int64(4)), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        for i in range(8):
            y[i] = x[i // 4, i % 4]

    @R.function
    def step(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}, "relax.force_pure": True})
        cls = KeptAliveByAView
        s = R.memory.alloc_storage(R.shape([48]), R.prim_value(0), R.str("global"), R.dtype("uint8"))
        a = R.memory.alloc_tensor(s, R.prim_value(0), R.shape([8]), R.dtype("float32"))
        _0 = cls.copy(x, a)
        view = R.reshape(a, R.shape([2, 4]))
        pair = (view, x)
        b = R.memory.alloc_tensor(s, R.prim_value(16), R.shape([8]), R.dtype("float32"))
        _1 = cls.copy(x, b)
        y = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        seen = pair[0]
        _2 = cls.copy2(seen, y)
        return y


@I.ir_module
class Outside:
    @T.prim_func(private=True, s_tir=True)
    def copy(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        for i in range(8):
            y[i] = x[i]

    @R.function
    def step(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {}, "relax.force_pure": True})
        cls = Outside
        s = R.memory.alloc_storage(R.shape([32]), R.prim_value(0), R.str("global"), R.dtype("uint8"))
        a = R.memory.alloc_tensor(s, R.prim_value(4), R.shape([8]), R.dtype("float32"))
        _0 = cls.copy(x, a)
        y = R.builtin.alloc_tensor(R.shape([8]), R.dtype("float32"), R.prim_value(0), R.str("global"))
        _1 = cls.copy(a, y)
        return y


def test_a_planted_overlap_is_caught():
    with pytest.raises(CompileError, match=r"step: a \(alive .*\) and b \(.*\) share bytes of storage 0"):
        VerifyMemoryPlan(Overlap)


def test_bytes_may_be_taken_in_turns():
    plan = json.loads(str(VerifyMemoryPlan(TakenInTurns).attrs[PLAN]))["step"]
    assert [(t["name"], t["offset"], t["size"]) for t in plan["tensors"]] == [("a", 0, 32), ("b", 16, 32)]


def test_a_view_keeps_its_tensor_alive():
    with pytest.raises(CompileError, match=r"a \(alive .*\) and b \(.*\) share bytes"):
        VerifyMemoryPlan(KeptAliveByAView)


def test_a_tensor_outside_its_storage_is_caught():
    with pytest.raises(CompileError, match="a needs 36 bytes of storage 0, which has 32"):
        VerifyMemoryPlan(Outside)


def test_the_module_is_not_changed():
    kept = tvm.ir.load_json(tvm.ir.save_json(TakenInTurns))
    after = VerifyMemoryPlan(TakenInTurns)
    tvm.ir.assert_structural_equal(TakenInTurns, kept)
    tvm.ir.assert_structural_equal(after.without_attr(PLAN), kept)


def planned_tensor(name: str, offset: int, size: int, first: int, last: int, storage: int = 0) -> PlannedTensor:
    return PlannedTensor("f", name, storage, offset, size, first, last)


@pytest.mark.parametrize("other, good", [
    (planned_tensor("b", 0, 64, 5, 9), True),              # allocated after the last read of `a`
    (planned_tensor("b", 0, 64, 6, 9), True),
    (planned_tensor("b", 64, 64, 2, 3), True),             # neighbours
    (planned_tensor("b", 0, 64, 2, 3, storage=1), True),
    (planned_tensor("b", 63, 2, 4, 9), False),
    (planned_tensor("b", 0, 64, 1, 2), False),
    (planned_tensor("b", 16, 16, 4, 4), False),
])
def test_which_pairs_may_share(other: PlannedTensor, good: bool):
    tensors = [planned_tensor("a", 0, 64, 1, 5), other]
    for order in (tensors, tensors[::-1]):
        if good:
            check_no_overlap(order, [128, 128])
        else:
            with pytest.raises(CompileError, match="share bytes"):
                check_no_overlap(order, [128, 128])


def test_upper_bounds_of_shape_expressions():
    t, b = (tvm.tirx.Var(name, "int64") for name in "tb")
    assert upper_bound(7, {}) == 7
    assert upper_bound(t * 3 + b, {"t": 5, "b": 2}) == 17
    assert upper_bound(tvm.tirx.floordiv(t + 15, 16), {"t": 17}) == 2
