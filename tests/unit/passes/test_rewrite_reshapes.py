"""Reshapes become views, and a scheduled kernel with one input is neither read nor changed."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.passes.rewrite_reshapes import RewriteDataflowReshape
from relaxpack.schedules.kernels.cuda.quantize_rows import quantize_rows
from tvm import relax


def before() -> tvm.IRModule:
    """x[4, 64] → codes and scales of the kernel; the codes as one row, twice."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([4, 64], "bfloat16"))
    kernel = builder.add_func(quantize_rows(64, "bfloat16").without_attr("global_symbol"), "quantize_rows_64")
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(relax.call_tir(kernel, [x], [relax.TensorType([4, 64], "uint8"),
                                                             relax.TensorType([4], "float32")]))
            codes = builder.emit(relax.TupleGetItem(made, 0))
            row = builder.emit(relax.op.reshape(codes, (1, 256)))
            out = builder.emit_output(relax.op.add(row, row))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.get())


def test_views_beside_a_kernel_of_one_input() -> None:
    mod = before()
    kept = mod.clone()
    after = RewriteDataflowReshape(mod)
    tvm.ir.assert_structural_equal(mod, kept)
    tvm.ir.assert_structural_equal(after["quantize_rows_64"], mod["quantize_rows_64"])
    calls = [binding.value.op.name for block in after["main"].body.blocks for binding in block.bindings
             if isinstance(binding.value, relax.Call)]
    assert calls == ["relax.call_tir", "relax.reshape", "relax.call_tir"]
