"""CombineParallelMatmul: before and after, and each reason to decline."""

from __future__ import annotations

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.combine_parallel_matmul import CombineParallelMatmul
from relaxpack.recipe import Concat, FromCheckpoint
from relaxpack.weight_format import FORMATS
from tests.helpers.ir import check_declines, check_pass, named
from tvm.script import ir as I
from tvm.script import relax as R

NAMES = {"q": "l.q_proj.weight", "k": "l.k_proj.weight", "qb": "l.q_proj.bias", "kb": "l.k_proj.bias",
         "gate": "l.gate_proj.weight", "up": "l.up_proj.weight", "qk": "l.q_proj+k_proj.weight",
         "qkb": "l.q_proj+k_proj.bias", "both": "l.gate_proj+up_proj.weight"}


def stacked(*names: str) -> Concat:
    return Concat(tuple(map(FromCheckpoint, names)))


def test_projections_that_are_concatenated():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32"), k: R.Tensor((4, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                qt = R.permute_dims(q)
                a = R.matmul(x, qt)
                kt = R.permute_dims(k)
                b = R.matmul(x, kt)
                y = R.concat((a, b), axis=1)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32"), k: R.Tensor((4, 8), "float32"),
                 qk: R.Tensor((20, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                w = R.permute_dims(qk)
                y = R.matmul(x, w)
                R.output(y)
            return y

    check_pass(named(Before, NAMES), CombineParallelMatmul(), named(Expected, NAMES),
               {"l.q_proj+k_proj.weight": stacked("l.q_proj.weight", "l.k_proj.weight")})


def test_projections_with_biases():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32"), qb: R.Tensor((16,), "float32"),
                 k: R.Tensor((4, 8), "float32"), kb: R.Tensor((4,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                qt = R.permute_dims(q)
                a = R.matmul(x, qt)
                a1 = R.add(a, qb)
                kt = R.permute_dims(k)
                b = R.matmul(x, kt)
                b1 = R.add(b, kb)
                y = R.concat((a1, b1), axis=1)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32"), qb: R.Tensor((16,), "float32"),
                 k: R.Tensor((4, 8), "float32"), kb: R.Tensor((4,), "float32"), qk: R.Tensor((20, 8), "float32"),
                 qkb: R.Tensor((20,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                w = R.permute_dims(qk)
                a = R.matmul(x, w)
                y = R.add(a, qkb)
                R.output(y)
            return y

    check_pass(named(Before, NAMES), CombineParallelMatmul(), named(Expected, NAMES),
               {"l.q_proj+k_proj.weight": stacked("l.q_proj.weight", "l.k_proj.weight"),
                "l.q_proj+k_proj.bias": stacked("l.q_proj.bias", "l.k_proj.bias")})


@I.ir_module
class Gated:
    @R.function
    def step(x: R.Tensor(("t", 8), "float32"), gate: R.Tensor((16, 8), "float32"), up: R.Tensor((16, 8), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            gt = R.permute_dims(gate)
            g = R.matmul(x, gt)
            ut = R.permute_dims(up)
            u = R.matmul(x, ut)
            s = R.nn.silu(g)
            y = R.multiply(s, u)
            R.output(y)
        return y


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up(activation):
    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), gate: R.Tensor((16, 8), "float32"),
                 up: R.Tensor((16, 8), "float32"), both: R.Tensor((32, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                w = R.permute_dims(both)
                gu = R.matmul(x, w)
                halves = R.split(gu, 2, axis=1)
                g = halves[0]
                s = R.nn.silu(g)
                u = halves[1]
                y = R.multiply(s, u)
                R.output(y)
            return y

    def with_activation(mod: tvm.IRModule) -> tvm.IRModule:
        return named(tvm.script.from_source(mod.script().replace("R.nn.silu", f"R.nn.{activation}")), NAMES)

    check_pass(with_activation(Gated), CombineParallelMatmul(), with_activation(Expected),
               {"l.gate_proj+up_proj.weight": stacked("l.gate_proj.weight", "l.up_proj.weight")})


def test_equal_formats_combine_and_different_ones_do_not():
    before = named(Gated, NAMES)
    formats = {"l.gate_proj.weight": FORMATS["q4_1"], "l.up_proj.weight": FORMATS["q4_1"]}
    assert "l.gate_proj+up_proj.weight" in str(CombineParallelMatmul(formats)(before).attrs)
    check_declines(before, CombineParallelMatmul(formats | {"l.up_proj.weight": FORMATS["q6_k"]}))


def test_declines_different_inputs():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), z: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32"),
                 k: R.Tensor((4, 8), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                qt = R.permute_dims(q)
                a = R.matmul(x, qt)
                kt = R.permute_dims(k)
                b = R.matmul(z, kt)
                y = R.concat((a, b), axis=1)
                R.output(y)
            return y

    check_declines(named(Before, NAMES), CombineParallelMatmul())


def test_declines_where_only_some_have_a_bias():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32"), qb: R.Tensor((16,), "float32"),
                 k: R.Tensor((4, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                qt = R.permute_dims(q)
                a = R.matmul(x, qt)
                a1 = R.add(a, qb)
                kt = R.permute_dims(k)
                b = R.matmul(x, kt)
                y = R.concat((a1, b), axis=1)
                R.output(y)
            return y

    check_declines(named(Before, NAMES), CombineParallelMatmul())


def test_declines_a_weight_that_is_an_input():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32"), k: R.Tensor((4, 8), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                qt = R.permute_dims(q)
                a = R.matmul(x, qt)
                kt = R.permute_dims(k)
                b = R.matmul(x, kt)
                y = R.concat((a, b), axis=1)
                R.output(y)
            return y

    check_declines(named(Before, NAMES), CombineParallelMatmul())


def test_declines_a_product_without_silu():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), gate: R.Tensor((16, 8), "float32"),
                 up: R.Tensor((16, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                gt = R.permute_dims(gate)
                g = R.matmul(x, gt)
                ut = R.permute_dims(up)
                u = R.matmul(x, ut)
                y = R.multiply(g, u)
                R.output(y)
            return y

    check_declines(named(Before, NAMES), CombineParallelMatmul())


def test_declines_a_single_projection():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float32"), q: R.Tensor((16, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                qt = R.permute_dims(q)
                a = R.matmul(x, qt)
                y = R.concat((a,), axis=1)
                R.output(y)
            return y

    check_declines(named(Before, NAMES), CombineParallelMatmul())
