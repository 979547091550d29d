"""PruneParameters: one parameter list for all functions, sorted, without what nobody reads."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.passes.prune_parameters import PruneParameters
from relaxpack.passes.rewrite import with_recipes
from relaxpack.recipe import Concat, FromCheckpoint
from tests.helpers.ir import check_declines, check_pass
from tvm.script import ir as I
from tvm.script import relax as R


def test_dead_ones_go_and_all_functions_take_the_rest_in_order():
    @I.ir_module
    class Before:
        @R.function
        def one(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32"), dead: R.Tensor((9,), "float32"),
                b: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.add(x, w)
                z = R.multiply(y, b)
                R.output(z)
            return z

        @R.function
        def two(x: R.Tensor(("t", 8), "float32"), unread: R.Tensor(("t",), "int32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                y = R.add(x, w)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def one(x: R.Tensor(("t", 8), "float32"), b: R.Tensor((8,), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.add(x, w)
                z = R.multiply(y, b)
                R.output(z)
            return z

        @R.function
        def two(x: R.Tensor(("t", 8), "float32"), unread: R.Tensor(("t",), "int32"), b: R.Tensor((8,), "float32"),
                w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                y = R.add(x, w)
                R.output(y)
            return y

    kept = Concat((FromCheckpoint("there"), FromCheckpoint("here")))
    check_pass(with_recipes(Before, {"w": kept, "dead": FromCheckpoint("gone")}), PruneParameters, Expected, {"w": kept})


def test_declines_what_is_in_order_already():
    @I.ir_module
    class Before:
        @R.function
        def one(x: R.Tensor(("t", 8), "float32"), b: R.Tensor((8,), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.add(x, w)
                z = R.multiply(y, b)
                R.output(z)
            return z

    check_declines(Before, PruneParameters)
