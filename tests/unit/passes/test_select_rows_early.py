"""SelectRowsEarly: a take moves before row-wise work that nobody else reads, and no further."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.passes.select_rows_early import SelectRowsEarly
from tests.helpers.ir import check_declines, check_pass
from tvm.script import ir as I
from tvm.script import relax as R


def test_a_residual_mlp_is_computed_for_the_rows_alone():
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), rows: R.Tensor(("r",), "int32"), w: R.Tensor((8, 8), "float32"),
                 b: R.Tensor((8,), "float32"), n: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                x = R.tanh(a)
                h = R.nn.rms_norm(x, n, axes=[-1], epsilon=0.5)
                m = R.matmul(h, R.permute_dims(w))
                m1 = R.add(m, b)
                s = R.nn.silu(m1)
                total = R.add(s, x)
                y = R.take(total, rows, axis=0, mode="clip")
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), rows: R.Tensor(("r",), "int32"), w: R.Tensor((8, 8), "float32"),
                 b: R.Tensor((8,), "float32"), n: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 2})
            with R.dataflow():
                x = R.tanh(a)
                wt = R.permute_dims(w)
                x_rows = R.take(x, rows, axis=0, mode="clip")
                h = R.nn.rms_norm(x_rows, n, axes=[-1], epsilon=0.5)
                m = R.matmul(h, wt)
                m1 = R.add(m, b)
                s = R.nn.silu(m1)
                y = R.add(s, x_rows)
                R.output(y)
            return y

    check_pass(Before, SelectRowsEarly, Expected)


def test_work_that_others_read_stays_whole():
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), b: R.Tensor(("t", 8), "float32"), rows: R.Tensor(("r",), "int32")):
            R.func_attr({"num_input": 3})
            with R.dataflow():
                x = R.add(a, b)
                sums = R.sum(x)
                y = R.take(x, rows, axis=0, mode="clip")
                both = (y, sums)
                R.output(both)
            return both

    check_declines(Before, SelectRowsEarly)


def test_a_sum_over_rows_is_not_row_wise():
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor((4, 8), "float32"), c: R.Tensor((8,), "float32"), rows: R.Tensor(("r",), "int32")):
            R.func_attr({"num_input": 3})
            with R.dataflow():
                x = R.add(a, c)
                y = R.take(x, rows, axis=0, mode="clip")
                R.output(y)
            return y

    check_declines(Before, SelectRowsEarly)      # `c` is an input without a row axis


def test_matmul_of_two_activations_stays():
    @I.ir_module
    class Before:
        @R.function
        def step(a: R.Tensor(("t", 8), "float32"), c: R.Tensor((8, 8), "float32"), rows: R.Tensor(("r",), "int32")):
            R.func_attr({"num_input": 3})
            with R.dataflow():
                x = R.matmul(a, c)
                y = R.take(x, rows, axis=0, mode="clip")
                R.output(y)
            return y

    check_declines(Before, SelectRowsEarly)


def test_embedding_tables_are_left_alone():
    @I.ir_module
    class Before:
        @R.function
        def step(ids: R.Tensor(("t",), "int32"), table: R.Tensor((16, 8), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                y = R.take(table, ids, axis=0, mode="clip")
                R.output(y)
            return y

    check_declines(Before, SelectRowsEarly)
