"""PackWeights: weights become `relaxpack.unpack` of the buffers that the provider's layout names."""

from __future__ import annotations

from collections.abc import Mapping

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import WeightLayout
from relaxpack.passes.pack_weights import PackWeights
from relaxpack.recipe import FromCheckpoint, Pack
from relaxpack.weight_format import FORMATS, WeightFormat
from tests.helpers.ir import check_declines, check_pass, named
from tests.helpers.plain_kernels import PlainKernels
from tvm.script import ir as I
from tvm.script import relax as R


class TwoBuffers(PlainKernels):
    """Codes and scales, as quantised kernels have them."""

    def weight_layout(self, weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
        return WeightLayout("two", (("codes", (out_features, in_features // 2), "uint8"),
                                    ("scales", (out_features, in_features // 32), "float16")))


NAMES = {"w": "l.proj.weight", "w_f32": "l.proj.weight@f32", "w_codes": "l.proj.weight@q4_1.codes",
         "w_scales": "l.proj.weight@q4_1.scales", "table": "embed.weight", "table_f32": "embed.weight@f32"}
F32: Mapping[str, WeightFormat] = {"l.proj.weight": FORMATS["f32"], "embed.weight": FORMATS["f32"]}


def pack(tensor: str, fmt: str, n: int, k: int, suffix: str = "", gated: bool = False) -> Pack:
    return Pack(fmt, n, k, gated, suffix, FromCheckpoint(tensor))


@I.ir_module
class Linear:
    @R.function
    def step(x: R.Tensor(("t", 64), "float32"), w: R.Tensor((16, 64), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            wt = R.permute_dims(w)
            y = R.matmul(x, wt)
            R.output(y)
        return y


def test_a_linear_weight():
    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 64), "float32"), w: R.Tensor((16, 64), "float32"),
                 w_f32: R.Tensor((16, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w_f32, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((16, 64), "float32"))
                wt = R.permute_dims(u)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    check_pass(named(Linear, NAMES), PackWeights(PlainKernels(), F32), named(Expected, NAMES),
               {"l.proj.weight@f32": pack("l.proj.weight", "f32", 16, 64)})


def test_a_layout_of_several_buffers():
    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 64), "float32"), w: R.Tensor((16, 64), "float32"),
                 w_codes: R.Tensor((16, 32), "uint8"), w_scales: R.Tensor((16, 2), "float16")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w_codes, w_scales, R.str("q4_1"), R.prim_value(0)),
                                      out_ty=R.Tensor((16, 64), "float32"))
                wt = R.permute_dims(u)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    check_pass(named(Linear, NAMES), PackWeights(TwoBuffers(), {"l.proj.weight": FORMATS["q4_1"]}),
               named(Expected, NAMES),
               {f"l.proj.weight@q4_1.{s}": pack("l.proj.weight", "q4_1", 16, 64, s) for s in ("codes", "scales")})


def test_a_table_that_is_also_the_head_is_packed_once():
    @I.ir_module
    class Before:
        @R.function
        def step(ids: R.Tensor(("t",), "int32"), table: R.Tensor((32, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                x = R.take(table, ids, axis=0, mode="clip")
                wt = R.permute_dims(table)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(ids: R.Tensor(("t",), "int32"), table: R.Tensor((32, 64), "float32"),
                 table_f32: R.Tensor((32, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (table_f32, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((32, 64), "float32"))
                x = R.take(u, ids, axis=0, mode="clip")
                v = R.call_dps_packed("relaxpack.unpack", (table_f32, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((32, 64), "float32"))
                wt = R.permute_dims(v)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    check_pass(named(Before, NAMES), PackWeights(PlainKernels(), F32), named(Expected, NAMES),
               {"embed.weight@f32": pack("embed.weight", "f32", 32, 64)})


def test_a_weight_whose_product_is_split_is_packed_for_swiglu():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 64), "float32"), w: R.Tensor((16, 64), "float32"), b: R.Tensor((16,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                wt = R.permute_dims(w)
                y = R.matmul(x, wt)
                yb = R.add(y, b)
                halves = R.split(yb, 2, axis=1)
                z = halves[0]
                R.output(z)
            return z

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 64), "float32"), w: R.Tensor((16, 64), "float32"), b: R.Tensor((16,), "float32"),
                 w_f32: R.Tensor((16, 64), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                u = R.call_dps_packed("relaxpack.unpack", (w_f32, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((16, 64), "float32"))
                wt = R.permute_dims(u)
                y = R.matmul(x, wt)
                yb = R.add(y, b)
                halves = R.split(yb, 2, axis=1)
                z = halves[0]
                R.output(z)
            return z

    check_pass(named(Before, NAMES), PackWeights(PlainKernels(), F32), named(Expected, NAMES),
               {"l.proj.weight@f32": pack("l.proj.weight", "f32", 16, 64, gated=True)})


def test_declines_what_is_no_parameter():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 64), "float32"), w: R.Tensor((16, 64), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                wt = R.permute_dims(w)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    check_declines(Before, PackWeights(PlainKernels(), F32))


def test_declines_a_take_from_activations():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 64), "float32"), rows: R.Tensor(("r",), "int32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                y = R.take(x, rows, axis=0, mode="clip")
                R.output(y)
            return y

    check_declines(Before, PackWeights(PlainKernels(), F32))
