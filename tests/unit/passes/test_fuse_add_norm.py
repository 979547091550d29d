"""FuseAddNorm: residual + norm becomes one placeholder with both results, a norm alone becomes a placeholder."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.passes.fuse_add_norm import FuseAddNorm
from relaxpack.recipe import FromCheckpoint
from tests.helpers.ir import check_declines, check_pass, named
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T


def test_a_sum_and_its_norm():
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                total = R.add(a, b)
                n = R.nn.rms_norm(total, w, axes=[-1], epsilon=0.5)
                y = R.add(n, total)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 2})
            with R.dataflow():
                both = R.call_dps_packed("relaxpack.add_rms_norm", (a, b, w, T.float64(0.5)),
                                         out_ty=[R.Tensor((t, 8), "float32"), R.Tensor((t, 8), "float32")])
                total = both[0]
                n = both[1]
                y = R.add(n, total)
                R.output(y)
            return y

    check_pass(Before, FuseAddNorm, Expected)


def test_a_norm_alone():
    @I.ir_module
    class Before:
        @R.function
        def step(x: R.Tensor(("t", 8), "float16"), w: R.Tensor((8,), "float16")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.nn.rms_norm(x, w, axes=[-1], epsilon=0.5)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(x: R.Tensor(("t", 8), "float16"), w: R.Tensor((8,), "float16"), w32: R.Tensor((8,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.call_dps_packed("relaxpack.rms_norm", (x, w32, T.float64(0.5)),
                                      out_ty=R.Tensor((t, 8), "float16"))
                R.output(y)
            return y

    check_pass(Before, FuseAddNorm, named(Expected, {"w32": "w"}), {"w": FromCheckpoint("w")})


def test_a_sum_with_two_norms_stays_a_sum():
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor(("t", 8), "float32"), v: R.Tensor((8,), "float32"),
                 w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                total = R.add(a, b)
                m = R.nn.rms_norm(total, v, axes=[-1], epsilon=0.5)
                n = R.nn.rms_norm(total, w, axes=[-1], epsilon=0.5)
                y = R.add(m, n)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor(("t", 8), "float32"), v: R.Tensor((8,), "float32"),
                 w: R.Tensor((8,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 2})
            with R.dataflow():
                total = R.add(a, b)
                m = R.call_dps_packed("relaxpack.rms_norm", (total, v, T.float64(0.5)),
                                      out_ty=R.Tensor((t, 8), "float32"))
                n = R.call_dps_packed("relaxpack.rms_norm", (total, w, T.float64(0.5)),
                                      out_ty=R.Tensor((t, 8), "float32"))
                y = R.add(m, n)
                R.output(y)
            return y

    check_pass(Before, FuseAddNorm, Expected)


def test_a_bias_is_no_residual():
    """The second operand is a parameter `[8]`, which the kernel does not read as rows."""
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor((8,), "float32"), w: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                total = R.add(a, b)
                y = R.nn.rms_norm(total, w, axes=[-1], epsilon=0.5)
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor((8,), "float32"), w: R.Tensor((8,), "float32")):
            t = T.int64()
            R.func_attr({"num_input": 1})
            with R.dataflow():
                total = R.add(a, b)
                y = R.call_dps_packed("relaxpack.rms_norm", (total, w, T.float64(0.5)),
                                      out_ty=R.Tensor((t, 8), "float32"))
                R.output(y)
            return y

    check_pass(Before, FuseAddNorm, Expected)


def test_declines_a_sum_that_no_norm_reads():
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor(("t", 8), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                total = R.add(a, b)
                y = R.nn.silu(total)
                R.output(y)
            return y

    check_declines(Before, FuseAddNorm)
