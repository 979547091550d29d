"""FuseUnpackMatmul: unpack + matmul (+ bias, SwiGLU, cast) becomes one placeholder; everything else stays."""

from __future__ import annotations

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.fuse_unpack_matmul import FuseUnpackMatmul
from relaxpack.passes.rewrite import placeholder
from relaxpack.recipe import FromCheckpoint
from tests.helpers.ir import check_declines, check_pass, named
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


def test_linear():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), codes: R.Tensor((16, 4), "uint8"),
                 scales: R.Tensor((16, 1), "float16")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                w = R.call_dps_packed("relaxpack.unpack", (codes, scales, R.str("q4_1"), R.prim_value(0)),
                                      out_ty=R.Tensor((16, 8), "float32"))
                wt = R.permute_dims(w)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), codes: R.Tensor((16, 4), "uint8"),
                 scales: R.Tensor((16, 1), "float16")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear", (x, codes, scales, R.str("q4_1"), R.prim_value(0)),
                                      out_ty=R.Tensor((t, 16), "float32"))
                R.output(y)
            return y

    check_pass(Before, FuseUnpackMatmul, Expected)


def test_linear_with_a_bias_that_turns_float32():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float16"), w: R.Tensor((16, 8), "float16"), b: R.Tensor((16,), "float16")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f16"), R.prim_value(0)),
                                      out_ty=R.Tensor((16, 8), "float16"))
                wt = R.permute_dims(u)
                a = R.matmul(x, wt)
                y = R.add(a, b)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float16"), w: R.Tensor((16, 8), "float16"), b: R.Tensor((16,), "float16"),
                 b32: R.Tensor((16,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear+bias", (x, w, b32, R.str("f16"), R.prim_value(0)),
                                      out_ty=R.Tensor((t, 16), "float16"))
                R.output(y)
            return y

    check_pass(Before, FuseUnpackMatmul, named(Expected, {"b32": "b"}), {"b": FromCheckpoint("b")})


def test_swiglu():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((32, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((32, 8), "float32"))
                wt = R.permute_dims(u)
                a = R.matmul(x, wt)
                halves = R.split(a, 2, axis=1)
                g = halves[0]
                s = R.nn.silu(g)
                v = halves[1]
                y = R.multiply(s, v)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((32, 8), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear+swiglu", (x, w, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((t, 16), "float32"))
                R.output(y)
            return y

    check_pass(Before, FuseUnpackMatmul, Expected)


def test_geglu():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((32, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((32, 8), "float32"))
                wt = R.permute_dims(u)
                a = R.matmul(x, wt)
                halves = R.split(a, 2, axis=1)
                g = halves[0]
                s = R.nn.gelu_tanh(g)
                v = halves[1]
                y = R.multiply(s, v)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((32, 8), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear+geglu", (x, w, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((t, 16), "float32"))
                R.output(y)
            return y

    check_pass(Before, FuseUnpackMatmul, Expected)


def test_declines_a_gate_with_the_exact_gelu():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((32, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((32, 8), "float32"))
                wt = R.permute_dims(u)
                a = R.matmul(x, wt)
                halves = R.split(a, 2, axis=1)
                g = halves[0]
                s = R.nn.gelu(g)
                v = halves[1]
                y = R.multiply(s, v)
                R.output(y)
            return y

    check_declines(Before, FuseUnpackMatmul)


def test_logits_are_cast_inside_the_kernel():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float16"), w: R.Tensor((16, 8), "float16")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f16"), R.prim_value(0)),
                                      out_ty=R.Tensor((16, 8), "float16"))
                wt = R.permute_dims(u)
                a = R.matmul(x, wt)
                y = R.astype(a, "float32")
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float16"), w: R.Tensor((16, 8), "float16")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear", (x, w, R.str("f16"), R.prim_value(0)),
                                      out_ty=R.Tensor((t, 16), "float32"))
                R.output(y)
            return y

    check_pass(Before, FuseUnpackMatmul, Expected)


def test_embedding():
    @I.ir_module
    class Before:
        @R.function
        def step(ids: R.Tensor(("t",), "int32"), w: R.Tensor((32, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((32, 8), "float32"))
                y = R.take(u, ids, axis=0, mode="clip")
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(ids: R.Tensor(("t",), "int32"), w: R.Tensor((32, 8), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.embedding", (ids, w, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((t, 8), "float32"))
                R.output(y)
            return y

    check_pass(Before, FuseUnpackMatmul, Expected)


def scaled_embedding(factor):
    builder, t = relax.BlockBuilder(), tvm.tirx.Var("t", "int64")
    ids, w = relax.Var("ids", relax.TensorType([t], "int32")), relax.Var("w", relax.TensorType([32, 8], "bfloat16"))
    with builder.function("step", [ids, w], attrs={"num_input": 1}):
        with builder.dataflow():
            u = builder.emit(placeholder("relaxpack.unpack", [w, tvm.ir.StringImm("bf16"), relax.prim_value(0)], w.ty))
            x = builder.emit(relax.op.take(u, ids, axis=0, mode="clip"))
            y = builder.emit_output(relax.op.multiply(x, relax.const(factor, "bfloat16")))
        builder.emit_func_output(y)
    return builder.get()


def test_scaled_embedding():
    """The factor as the constant's dtype rounds it: 55.4 is 55.5 in bfloat16."""
    builder, t = relax.BlockBuilder(), tvm.tirx.Var("t", "int64")
    ids, w = relax.Var("ids", relax.TensorType([t], "int32")), relax.Var("w", relax.TensorType([32, 8], "bfloat16"))
    with builder.function("step", [ids, w], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit_output(placeholder(
                "relaxpack.embedding", [ids, w, tvm.ir.StringImm("bf16"), relax.prim_value(0), relax.prim_value(55.5)],
                relax.TensorType([t, 8], "bfloat16")))
        builder.emit_func_output(y)
    check_pass(scaled_embedding(55.4), FuseUnpackMatmul, builder.get())


def test_declines_a_factor_of_each_column():
    text = str(FuseUnpackMatmul(scaled_embedding(np.arange(8, dtype=np.float32))))
    assert "R.multiply" in text and '"relaxpack.embedding"' in text


def test_the_unused_sum_of_a_residual_is_no_bias():
    """The other operand of the addition is an activation: the matmul fuses, the addition stays."""
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((8, 8), "float32"))
                wt = R.permute_dims(u)
                a = R.matmul(x, wt)
                y = R.add(a, x)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8, 8), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                a = R.call_dps_packed("relaxpack.linear", (x, w, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((t, 8), "float32"))
                y = R.add(a, x)
                R.output(y)
            return y

    check_pass(Before, FuseUnpackMatmul, Expected)


def test_declines_a_weight_that_is_not_packed():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((16, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                wt = R.permute_dims(w)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    check_declines(Before, FuseUnpackMatmul)


def test_declines_a_matmul_of_activations():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), z: R.Tensor((8, 4), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                y = R.matmul(x, z)
                R.output(y)
            return y

    check_declines(Before, FuseUnpackMatmul)


def test_declines_halves_in_the_wrong_order():
    """silu of the second half times the first is not what the kernel computes."""
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((32, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((32, 8), "float32"))
                wt = R.permute_dims(u)
                a = R.matmul(x, wt)
                halves = R.split(a, 2, axis=1)
                g = halves[1]
                s = R.nn.silu(g)
                v = halves[0]
                y = R.multiply(s, v)
                R.output(y)
            return y

    check_declines(Before, FuseUnpackMatmul)


def test_declines_a_cast_that_is_no_logits():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float16")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.astype(x, "float32")
                R.output(y)
            return y

    check_declines(Before, FuseUnpackMatmul)
