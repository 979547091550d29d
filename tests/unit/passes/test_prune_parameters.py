"""PruneParameters: one parameter list for all functions, sorted, without what nobody reads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.passes.prune_parameters import PruneParameters
from relaxpack.passes.rewrite import exported_functions, num_inputs, with_recipes
from relaxpack.recipe import Concat, FromCheckpoint
from relaxpack.relax_models.export import BuildLimits, export_model
from tests.helpers.ir import check_declines, check_pass
from tests.helpers.model_shapes import SHAPES
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


@pytest.mark.parametrize("generate, embed, head", [(True, False, True), (True, True, True), (False, True, False)])
def test_a_build_that_only_embeds_has_no_head(generate: bool, embed: bool, head: bool) -> None:
    """The head's bytes go with it, in every function, and so would any weight's that only dead code reads."""
    config = replace(SHAPES["SmolLM2-135M"], num_layers=1, layer_windows=(None,), tie_embeddings=False)
    mod = export_model(config, BuildLimits(64), "float32", "float16", False, generate, embed)
    after = PruneParameters(mod)
    for _, func in exported_functions(after):
        sizes = {v.name: math.prod(int(d) for d in v.ty.shape) for v in func.params[num_inputs(func):]}
        assert ("lm_head.weight" in sizes) is head
        matrices = sum(size for name, size in sizes.items()
                       if name.endswith(("_proj.weight", "_tokens.weight", "head.weight")))
        layer = 576 * (2 * 576 + 2 * 192 + 3 * 1536)
        assert matrices == layer + 49152 * 576 * (1 + head)
