"""ScheduleRest, DropUnusedKernels and SpecializeBuckets."""

from __future__ import annotations

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.schedule_rest import SOURCE, DropUnusedKernels, ScheduleRest
from relaxpack.passes.specialize_buckets import SpecializeBuckets, bucket_of, decode_buckets
from tests.helpers.ir import check_declines, check_pass
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


@I.ir_module
class Two:
    """One kernel that is scheduled already, one that is not, and one that nobody calls."""
    @T.prim_func(private=True, s_tir=True)
    def ours(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        T.func_attr({"tirx.is_scheduled": True})
        for i in range(8):
            y[i] = x[i]

    @T.prim_func(private=True, s_tir=True)
    def left(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        for i in range(8):
            y[i] = -x[i]

    @T.prim_func(private=True, s_tir=True)
    def unused(x: T.Buffer((T.int64(8),), "float32"), y: T.Buffer((T.int64(8),), "float32")):
        T.func_attr({"tirx.is_scheduled": True})
        for i in range(8):
            y[i] = x[i] * x[i]

    @R.function
    def decode(x: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 1})
        cls = Two
        with R.dataflow():
            a = R.call_tir(cls.ours, (x,), out_ty=R.Tensor((8,), "float32"))
            y = R.call_tir(cls.left, (a,), out_ty=R.Tensor((8,), "float32"))
            dead = R.call_tir(cls.ours, (y,), out_ty=R.Tensor((8,), "float32"))
            R.output(y)
        return y


def sources(mod: tvm.IRModule) -> dict[str, str | None]:
    return {gv.name_hint: (str(f.attrs[SOURCE]) if f.attrs and SOURCE in f.attrs else None)
            for gv, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}


@pytest.mark.parametrize("rule, source", [
    (None, "fallback"), (lambda func: None, "fallback"),
    (lambda func: func.with_attr("tirx.is_scheduled", True), "dlight")])
def test_what_has_no_schedule_gets_one_and_is_counted(rule, source: str):
    before = tvm.ir.load_json(tvm.ir.save_json(Two))
    after = ScheduleRest(rule)(Two)
    assert sources(after) == {"ours": None, "left": source, "unused": None}
    assert bool(after["left"].attrs.get("tirx.is_scheduled", False)) is (source == "dlight")
    tvm.ir.assert_structural_equal(Two, before)


def test_unused_kernels_and_dead_bindings_disappear():
    after = DropUnusedKernels(Two)
    assert set(sources(after)) == {"ours", "left"}
    assert [b.var.name for b in after["decode"].body.blocks[0].bindings] == ["a", "y"]


def test_used_kernels_stay():
    check_declines(DropUnusedKernels(Two), DropUnusedKernels)


def test_a_function_for_each_bucket():
    @I.ir_module
    class Before:
        @R.function
        def decode(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1, "tir_var_upper_bound": {"t": 2}})
            with R.dataflow():
                y = R.add(x, w)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def decode(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1, "tir_var_upper_bound": {"t": 2}})
            with R.dataflow():
                y = R.add(x, w)
                R.output(y)
            return y

        @R.function
        def decode_1(x: R.Tensor((1, 8), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1, "tir_var_upper_bound": {"t": 2}, "relaxpack.bucket": 1})
            with R.dataflow():
                y = R.add(x, w)
                R.output(y)
            return y

        @R.function
        def decode_2(x: R.Tensor((2, 8), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1, "tir_var_upper_bound": {"t": 2}, "relaxpack.bucket": 2})
            with R.dataflow():
                y = R.add(x, w)
                R.output(y)
            return y

    after = check_pass(Before, SpecializeBuckets("decode", "t", (1, 2)), Expected)
    assert {gv.name_hint: bucket_of(f) for gv, f in after.functions_items()} == {
        "decode": None, "decode_1": 1, "decode_2": 2}


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 32, 33, 64, 65, 100, 128, 256])
def test_the_largest_batch_is_always_a_bucket(most: int):
    buckets = decode_buckets(most)
    assert buckets[-1] == most and buckets[0] == 1 and list(buckets) == sorted(set(buckets))
