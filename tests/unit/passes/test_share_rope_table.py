"""ShareRopeTable: the table of cosines and sines becomes one computed parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack import recipe
from relaxpack.passes.rewrite import exported_functions, num_inputs, recipes_of
from relaxpack.passes.share_rope_table import ShareRopeTable
from relaxpack.recipe import RopeTable
from relaxpack.relax_models.ops import Graph, rope_table
from tests.helpers.ir import check_declines, check_pass
from tvm import relax

FREQUENCIES = np.asarray([1.0, 0.1], np.float32)
AS_FLOATS = tuple(map(float, FREQUENCIES))


def module(*tables: tuple[int, np.ndarray, float]) -> tvm.IRModule:
    """A function that adds tables of (positions, frequencies, factor) to x."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([tables[0][0], 2 * len(tables[0][1])], "float32"))
    with builder.function("step", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            y = x
            for positions, frequencies, factor in tables:
                y = builder.emit(relax.op.add(y, rope_table(Graph(builder), frequencies, positions, factor)))
            y = builder.emit_output(relax.op.negative(y))
        builder.emit_func_output(y)
    return builder.get()


def expected(names: list[str]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    ty = relax.TensorType([6, 4], "float32")
    x, tables = relax.Var("x", ty), {name: relax.Var(name, ty) for name in dict.fromkeys(names)}
    with builder.function("step", [x, *tables.values()], attrs={"num_input": 1}):
        with builder.dataflow():
            y = x
            for name in names:
                y = builder.emit(relax.op.add(y, tables[name]))
            y = builder.emit_output(relax.op.negative(y))
        builder.emit_func_output(y)
    return builder.get()


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_a_table_is_one_parameter(factor: float) -> None:
    one = 6, FREQUENCIES, factor
    check_pass(module(one, one), ShareRopeTable, expected(["rope_table", "rope_table"]),
               {"rope_table": RopeTable(6, AS_FLOATS, factor)})


def test_another_table_gets_another_name() -> None:
    check_pass(module((6, FREQUENCIES, 1.0), (6, FREQUENCIES * 2, 1.0)), ShareRopeTable,
               expected(["rope_table", "rope_table.2"]),
               {"rope_table": RopeTable(6, AS_FLOATS), "rope_table.2": RopeTable(6, (2.0, AS_FLOATS[1] * 2))})


@pytest.mark.parametrize("positions, other", [
    (np.arange(1, 7), None), (np.arange(6), "sin"), (np.arange(6), "axis")])
def test_declines_what_is_no_table(positions: Any, other: str | None) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([6, 4] if other != "axis" else [12, 2], "float32"))
    with builder.function("step", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            angles = builder.emit(relax.op.multiply(relax.const(positions[:, None].astype("float32")),
                                                    relax.const(FREQUENCIES[None])))
            cos = builder.emit(relax.op.cos(angles))
            sin = builder.emit(relax.op.sin(angles if other != "sin" else cos))
            table = builder.emit(relax.op.concat([cos, sin], axis=0 if other == "axis" else 1))
            y = builder.emit_output(relax.op.add(x, table))
        builder.emit_func_output(y)
    check_declines(builder.get(), ShareRopeTable)


def test_the_numbers_are_those_that_folding_gives() -> None:
    frequencies = (1 / 10000 ** (np.arange(0, 16, 2) / 16)).astype(np.float32)
    mod = module((300, frequencies, 1.5))
    after = ShareRopeTable(mod)
    made_by = recipes_of(after)["rope_table"]
    assert recipe.loads(recipe.dumps({"a": made_by})) == {"a": made_by}
    assert recipe.checkpoint_tensors(made_by) == []
    (_, func), = exported_functions(after)
    assert isinstance(made_by, RopeTable)
    table = made_by.numbers()
    assert table.dtype == np.float32 and list(table.shape) == [int(d) for d in func.params[num_inputs(func)].ty.shape]
    with tvm.target.Target("llvm"):
        folded = relax.transform.FoldConstant()(mod)
    (_, func), = exported_functions(folded)
    (constant,) = [arg.value.numpy() for binding in func.body.blocks[0].bindings
                   for arg in getattr(binding.value, "args", []) if isinstance(arg, tvm.ir.GenericConst)]
    np.testing.assert_allclose(table, constant, rtol=0, atol=2.5e-7)
