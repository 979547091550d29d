"""LowerKernels: placeholders become calls of what a provider answers; the questions it is asked; pages as a chain."""

from __future__ import annotations

import json
from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
import tvm_ffi
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, Kernel, LinearSpec, NormSpec, Stage
from relaxpack.passes.linear_call import has_many_rows
from relaxpack.passes.lower_kernels import KERNELS, LowerKernels
from relaxpack.passes.rewrite import placeholder
from relaxpack.weight_format import FORMATS
from tests.helpers.ir import check_pass
from tests.helpers.plain_kernels import PlainKernels
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

ATTENTION = AttentionSpec(2, 2, 1, 4, 4, 8, 3, 24, "float32", "float32", 0.5)


class Asked(PlainKernels):
    """Answers with given kernels and remembers the questions."""

    def __init__(self, **answers: Kernel) -> None:
        self.answers, self.questions = answers, []

    def linear(self, spec: LinearSpec) -> Kernel:
        self.questions.append(spec)
        return self.answers["linear"]

    def norm(self, spec: NormSpec) -> Kernel:
        self.questions.append(spec)
        return self.answers["norm"]

    def rope_append(self, spec: AttentionSpec) -> Kernel:
        self.questions.append(spec)
        return self.answers["rope_append"]

    def decode_attention(self, spec: AttentionSpec) -> Kernel:
        self.questions.append(spec)
        return self.answers["decode_attention"]


def kernel(mod: tvm.IRModule, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...],
           inplace: tuple[str, ...] = ()) -> Kernel:
    return Kernel((Stage(mod[name], name, inputs, outputs, inplace),), f"rule:{name}")


def calls_of(mod: tvm.IRModule) -> Any:
    return json.loads(str(mod.attrs[KERNELS]))


def test_linear_and_the_phase_it_is_asked_for():
    @I.ir_module
    class Before:
        @R.function
        def decode(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((16, 8), "float32"), b: R.Tensor((16,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear+bias", (x, w, b, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((t, 16), "float32"))
                R.output(y)
            return y

        @R.function
        def prefill(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((16, 8), "float32"),
                    b: R.Tensor((16,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear+bias", (x, w, b, R.str("f32"), R.prim_value(0)),
                                      out_ty=R.Tensor((t, 16), "float32"))
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        I.module_attrs({"relaxpack.kernels":
            '{"decode": [{"kernel": "linear", "source": "rule:linear", "calls": 1}], '
            '"prefill": [{"kernel": "linear", "source": "rule:linear", "calls": 1}]}'})

        @T.prim_func(private=True, s_tir=True)
        def linear(x_h: T.handle, w: T.Buffer((T.int64(16), T.int64(8)), "float32"),
                   b: T.Buffer((T.int64(16),), "float32"), y_h: T.handle):
            t = T.int64()
            x = T.match_buffer(x_h, (t, T.int64(8)), "float32")
            y = T.match_buffer(y_h, (t, T.int64(16)), "float32")
            for i in range(t):
                y[i, 0] = x[i, 0] * w[0, 0] + b[0]

        @R.function
        def decode(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((16, 8), "float32"), b: R.Tensor((16,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                z = R.call_tir(cls.linear, (x, w, b), out_ty=R.Tensor((t, 16), "float32"))
                y = z
                R.output(y)
            return y

        @R.function
        def prefill(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((16, 8), "float32"),
                    b: R.Tensor((16,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                z = R.call_tir(cls.linear, (x, w, b), out_ty=R.Tensor((t, 16), "float32"))
                y = z
                R.output(y)
            return y

    provider = Asked(linear=kernel(Expected, "linear", ("x", "weight", "bias"), ("y",)))
    check_pass(Before, LowerKernels(provider, ATTENTION), Expected)
    assert provider.questions == [LinearSpec(16, 8, FORMATS["f32"], phase, "float32", "float32", bias=True)
                                  for phase in ("decode", "prefill")]


def test_swiglu_counts_both_halves():
    @I.ir_module
    class Before:
        @R.function
        def decode(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((32, 8), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.linear+swiglu", (x, w, R.str("f32"), R.prim_value(1)),
                                      out_ty=R.Tensor((t, 16), "float32"))
                R.output(y)
            return y

    provider = Asked(linear=PlainKernels().linear(LinearSpec(32, 8, FORMATS["f32"], "decode", "float32", "float32",
                                                             glu="swiglu")))
    after = LowerKernels(provider, ATTENTION)(Before)
    assert provider.questions == [LinearSpec(32, 8, FORMATS["f32"], "decode", "float32", "float32", glu="swiglu")]
    assert calls_of(after)["decode"][0]["calls"] == 1


def with_norm(flags: str, more: list[Any], results: Any) -> tvm.IRModule:
    """A linear of x `[4, 16]` that has to do with a norm; `more` are (name, shape) of its further operands."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(name, relax.TensorType(shape, "float32"))
              for name, shape in [("x", [4, 16]), ("w", [16, 16]), *more]]
    epsilon = [relax.prim_value(1e-5)] if "squares" in dict(more) else []
    with builder.function("decode_4", inputs, attrs={"num_input": 1}):
        with builder.dataflow():
            call = builder.emit(placeholder(f"relaxpack.linear{flags}", [*inputs, *epsilon, tvm.ir.StringImm("f32"),
                                                                         relax.prim_value(0)], results))
            out = builder.emit_output(call)
        builder.emit_func_output(out)
    return builder.get()


ROWS, SQUARES = relax.TensorType([4, 16], "float32"), relax.TensorType([4, 1], "float32")
BEFORE_NORM = with_norm("+bias+residual+prepares_norm", [("b", [16]), ("r", [4, 16]), ("g", [16])], [ROWS, ROWS, SQUARES])
AFTER_NORM = with_norm("+norm", [("squares", [4, 1])], ROWS)


@pytest.mark.parametrize(("before", "facts", "stages"), [
    (BEFORE_NORM, {"bias": True, "residual": True, "prepares_norm": True}, ["linear_16x16_bias", "add_16", "prepare_16"]),
    (AFTER_NORM, {"norm_epsilon": 1e-5}, ["normed_16", "linear_16x16"])], ids=["before", "after"])
def test_linears_beside_a_norm(before: tvm.IRModule, facts: dict[str, Any], stages: list[str]) -> None:
    spec = LinearSpec(16, 16, FORMATS["f32"], "decode", "float32", "float32", max_rows=4, **facts)
    provider = Asked(linear=PlainKernels().linear(spec))
    after = LowerKernels(provider, ATTENTION)(before)
    assert provider.questions == [spec]
    assert [call["kernel"] for call in calls_of(after)["decode_4"]] == sorted(stages)
    assert tvm_ffi.structural_equal(after["decode_4"].ret_ty, before["decode_4"].ret_ty)


def test_a_kernel_that_ignores_what_it_is_given() -> None:
    provider = Asked(linear=PlainKernels().linear(LinearSpec(16, 16, FORMATS["f32"], "decode", "float32", "float32")))
    with pytest.raises(CompileError, match="linear_16x16 ignores squares"):
        LowerKernels(provider, ATTENTION)(AFTER_NORM)


def test_a_kernel_of_two_stages_with_a_temporary():
    @I.ir_module
    class Before:
        @R.function
        def decode(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.rms_norm", (x, w, T.float64(0.5)), out_ty=R.Tensor((t, 8), "float32"))
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        I.module_attrs({"relaxpack.kernels":
            '{"decode": [{"kernel": "scale", "source": "rule:two", "calls": 1}, '
            '{"kernel": "sums", "source": "rule:two", "calls": 1}]}'})

        @T.prim_func(private=True, s_tir=True)
        def sums(x_h: T.handle, s_h: T.handle):
            t = T.int64()
            x = T.match_buffer(x_h, (t, T.int64(8)), "float32")
            s = T.match_buffer(s_h, (t, T.int64(2)), "float32")
            for i in range(t):
                s[i, 0] = x[i, 0]

        @T.prim_func(private=True, s_tir=True)
        def scale(x_h: T.handle, s_h: T.handle, w: T.Buffer((T.int64(8),), "float32"), y_h: T.handle):
            t = T.int64()
            x = T.match_buffer(x_h, (t, T.int64(8)), "float32")
            s = T.match_buffer(s_h, (t, T.int64(2)), "float32")
            y = T.match_buffer(y_h, (t, T.int64(8)), "float32")
            for i in range(t):
                y[i, 0] = x[i, 0] * s[i, 0] * w[0]

        @R.function
        def decode(x: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            cls = Expected
            with R.dataflow():
                s = R.call_tir(cls.sums, (x,), out_ty=R.Tensor((t, 2), "float32"))
                z = R.call_tir(cls.scale, (x, s, w), out_ty=R.Tensor((t, 8), "float32"))
                y = z
                R.output(y)
            return y

    two = Kernel((Stage(Expected["sums"], "sums", ("x",), ("s",)),
                  Stage(Expected["scale"], "scale", ("x", "s", "weight"), ("y",))),
                 "rule:two", {"s": (("t", 2), "float32")})
    provider = Asked(norm=two)
    check_pass(Before, LowerKernels(provider, ATTENTION), Expected)
    assert provider.questions == [NormSpec(8, 0.5, "float32", residual=False)]


@I.ir_module(s_tir=True)
class Norms:
    @T.prim_func(private=True, s_tir=True)
    def few(x: T.handle, w: T.handle, y: T.handle):
        n = T.int64()
        X, W = T.match_buffer(x, (n, T.int64(8)), "float32"), T.match_buffer(w, (T.int64(8),), "float32")
        Y = T.match_buffer(y, (n, T.int64(8)), "float32")
        for i, j in T.grid(n, T.int64(8)):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] * W[vj]

    @T.prim_func(private=True, s_tir=True)
    def many(x: T.handle, w: T.handle, y: T.handle):
        n = T.int64()
        X, W = T.match_buffer(x, (n, T.int64(8)), "float32"), T.match_buffer(w, (T.int64(8),), "float32")
        Y = T.match_buffer(y, (n, T.int64(8)), "float32")
        for i, j in T.grid(n, T.int64(8)):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = W[vj] * X[vi, vj]

    @R.function
    def prefill(x: R.Tensor(("t", 8), "float32"), picked: R.Tensor(("r", 8), "float32"), w: R.Tensor((8,), "float32")):
        t, r = T.int64(), T.int64()
        R.func_attr({"num_input": 2})
        cls = Norms
        with R.dataflow():
            first = R.call_tir(cls.many, (x, w), out_ty=R.Tensor((t, 8), "float32"))
            a = first
            second = R.call_tir(cls.few, (picked, w), out_ty=R.Tensor((r, 8), "float32"))
            b = second
            y = (a, b)
            R.output(y)
        return y


class ByRows(PlainKernels):
    def norm(self, spec: NormSpec) -> Kernel:
        return kernel(Norms, "many" if spec.many_rows else "few", ("x", "weight"), ("y",))


def test_a_prefill_has_norms_of_many_rows():
    @I.ir_module
    class Before:
        @R.function
        def prefill(x: R.Tensor(("t", 8), "float32"), picked: R.Tensor(("r", 8), "float32"), w: R.Tensor((8,), "float32")):
            t, r = T.int64(), T.int64()
            R.func_attr({"num_input": 2})
            with R.dataflow():
                a = R.call_dps_packed("relaxpack.rms_norm", (x, w, T.float64(0.5)), out_ty=R.Tensor((t, 8), "float32"))
                b = R.call_dps_packed("relaxpack.rms_norm", (picked, w, T.float64(0.5)), out_ty=R.Tensor((r, 8), "float32"))
                y = (a, b)
                R.output(y)
            return y

    check_pass(Before, LowerKernels(ByRows(), ATTENTION), Norms)


@pytest.mark.parametrize(("function", "rows", "many"), [
    ("prefill_512", 512, True), ("prefill_384", 384, False), ("embed", "t", True), ("decode", "t", False),
    ("decode_512", 512, False)])
def test_how_many_rows_are_many(function: str, rows: Any, many: bool) -> None:
    size = tvm.tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    assert has_many_rows(function, relax.Var("x", relax.TensorType((size, 8), "float32"))) == many


def test_pages_travel_from_layer_to_layer():
    """Each append takes the pages that the one before returned, so no later call can move before it; the window of a
    layer reaches the spec."""
    @I.ir_module
    class Before:
        @R.function
        def decode(qkv: R.Tensor(("t", 16), "float32"), table: R.Tensor((24, 4), "float32"),
                   positions: R.Tensor(("t",), "int32"), slots: R.Tensor(("t",), "int32"),
                   page_table: R.Tensor(("t", 3), "int32"), lengths: R.Tensor(("t",), "int32"),
                   pages: R.Tensor((2, "p", 2, 1, 8, 4), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 7})
            with R.dataflow():
                a = R.call_dps_packed("relaxpack.decode_attention", (
                    qkv, pages, table, positions, slots, page_table, lengths, R.prim_value(0), R.prim_value(0)),
                    out_ty=R.Tensor((t, 8), "float32"))
                b = R.concat((a, a), axis=1)
                y = R.call_dps_packed("relaxpack.decode_attention", (
                    b, pages, table, positions, slots, page_table, lengths, R.prim_value(1), R.prim_value(5)),
                    out_ty=R.Tensor((t, 8), "float32"))
                R.output(y)
            return y

    plain = PlainKernels()
    provider = Asked(rope_append=plain.rope_append(ATTENTION), decode_attention=plain.decode_attention(ATTENTION))
    after = LowerKernels(provider, ATTENTION)(Before)
    assert [spec.window for spec in provider.questions] == [None, None, 5, 5]
    bindings = [b for b in after["decode"].body.blocks[0].bindings]
    appends = [b for b in bindings if "call_tir_inplace" in str(b.value)]
    reads = [b for b in bindings if "decode_attention" in str(b.value)]
    assert len(appends) == 2 and len(reads) == 2
    pages_after = {b.value.tuple_value: b.var for b in bindings
                   if isinstance(b.value, tvm.relax.TupleGetItem) and b.value.index == 0}
    first, second = (pages_after[b.var] for b in appends)
    assert appends[0].value.args[1].fields[4].name == "pages"
    assert appends[1].value.args[1].fields[4].same_as(first)
    assert reads[0].value.args[1].fields[1].same_as(first) and reads[1].value.args[1].fields[1].same_as(second)
    assert [int(b.value.args[1].fields[5]) for b in appends] == [0, 1]
    assert calls_of(after)["decode"] == [
        {"kernel": "decode_attention_None", "source": "rule:plain", "calls": 2},
        {"kernel": "rope_append", "source": "rule:plain", "calls": 2}]


def test_declines_what_is_no_placeholder():
    @I.ir_module
    class Before:
        @R.function
        def decode(x: R.Tensor((4, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("vm.something", (x,), out_ty=R.Tensor((4, 8), "float32"))
                R.output(y)
            return y

    check_pass(Before, LowerKernels(Asked(), ATTENTION), Before.with_attr(KERNELS, '{"decode": []}'))
