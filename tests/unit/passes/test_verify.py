"""VerifyPhase: each rule, broken on purpose, is named with the phase and the function."""

from __future__ import annotations

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import CompileError
from relaxpack.passes.verify import VerifyPhase
from tests.helpers.ir import check_declines
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


@I.ir_module
class Transposed:
    @R.function
    def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((16, 8), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            wt = R.permute_dims(w)
            y = R.matmul(x, wt)
            R.output(y)
        return y


@I.ir_module
class Unpacked:
    @R.function
    def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((16, 8), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f32"), R.prim_value(0)),
                                  out_ty=R.Tensor((16, 8), "float32"))
            wt = R.permute_dims(u)
            y = R.matmul(x, wt)
            R.output(y)
        return y


@I.ir_module
class BareMatmul:
    @R.function
    def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8, 16), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y


@I.ir_module
class Converted:
    """An activation in another layout."""
    @R.function
    def step(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 16), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            turned = R.permute_dims(x)
            y = R.call_dps_packed("relaxpack.linear", (turned, w, R.str("f32"), R.prim_value(0)),
                                  out_ty=R.Tensor((8, 16), "float32"))
            R.output(y)
        return y


@I.ir_module
class Legalised:
    @T.prim_func(private=True, s_tir=True)
    def transpose(x: T.Buffer((T.int64(4), T.int64(8)), "float32"), y: T.Buffer((T.int64(8), T.int64(4)), "float32")):
        T.func_attr({"tirx.is_scheduled": True})
        for i in range(8):
            for j in range(4):
                y[i, j] = x[j, i]

    @R.function
    def step(x: R.Tensor((4, 8), "float32")):
        R.func_attr({"num_input": 1})
        cls = Legalised
        with R.dataflow():
            y = R.call_tir(cls.transpose, (x,), out_ty=R.Tensor((8, 4), "float32"))
            R.output(y)
        return y


@I.ir_module
class NotLowered:
    @R.function
    def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.call_dps_packed("relaxpack.rms_norm", (x, w), out_ty=R.Tensor((4, 8), "float32"))
            R.output(y)
        return y


@I.ir_module
class Disagreeing:
    @R.function
    def one(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.add(x, w)
            R.output(y)
        return y

    @R.function
    def two(x: R.Tensor(("t", 8), "float32"), v: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.add(x, v)
            R.output(y)
        return y


@pytest.mark.parametrize("phase, mod, complaint", [
    ("weights", Transposed, "step: a weight is transposed at run time"),
    ("lower", Transposed, "step: a weight is transposed at run time"),
    ("fuse", Unpacked, "step: a weight is unpacked on its own"),
    ("fuse", BareMatmul, "step: a matmul has no kernel"),
    ("fuse", Converted, "step: a layout is converted at run time"),
    ("lower", Legalised, "step: a layout is converted at run time"),
    ("lower", NotLowered, "step: relaxpack.rms_norm was not lowered"),
    ("graph", Disagreeing, "disagree about their parameters"),
    ("graph", tvm.IRModule({}), "disagree about their parameters"),
])
def test_a_broken_rule(phase: str, mod: tvm.IRModule, complaint: str):
    with pytest.raises(CompileError, match=complaint) as caught:
        VerifyPhase(phase)(mod)
    assert f"after phase {phase!r}" in str(caught.value)


@pytest.mark.parametrize("phase, mod", [("graph", Transposed), ("weights", Unpacked), ("weights", BareMatmul),
                                        ("weights", Converted), ("fuse", NotLowered)])
def test_what_a_phase_allows(phase: str, mod: tvm.IRModule):
    check_declines(mod, VerifyPhase(phase))


def test_a_module_that_is_not_well_formed():
    x, stranger = (relax.Var(name, relax.TensorType([4], "float32")) for name in ("x", "stranger"))
    builder = relax.BlockBuilder()
    with builder.function("step", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(x, x))
        builder.emit_func_output(out)
    good = builder.get()
    func = good["step"]
    bad = relax.Function([stranger], func.body, func.ret_ty, func.is_pure, func.attrs)
    with pytest.raises(CompileError, match="not well-formed"):
        VerifyPhase("graph")(tvm.IRModule({"step": bad}))
