"""IrHistory: which functions are followed, and what a pass is said to have changed."""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.compile.ir_history import NOT_FOLLOWED, IrHistory
from relaxpack.passes.fuse_add_norm import FuseAddNorm
from relaxpack.passes.specialize_buckets import SpecializeBuckets
from relaxpack.passes.verify import VerifyPhase
from tvm.script import ir as I
from tvm.script import relax as R


@I.ir_module
class Model:
    @R.function
    def decode(a: R.Tensor(("t", 8), "float32"), b: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 2, "tir_var_upper_bound": {"t": 4}})
        with R.dataflow():
            total = R.add(a, b)
            n = R.nn.rms_norm(total, w, axes=[-1], epsilon=0.5)
            y = R.add(n, total)
            R.output(y)
        return y

    @R.function
    def sample(a: R.Tensor(("t", 8), "float32"), w: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 1, "tir_var_upper_bound": {"t": 4}})
        with R.dataflow():
            y = R.add(a, a)
            R.output(y)
        return y


def test_a_pass_that_changes_nothing_has_no_diff() -> None:
    assert IrHistory(Model).changes("VerifyPhase", VerifyPhase("graph")(Model)) == {}


def test_what_a_pass_changed_since_the_last_one() -> None:
    history, fused = IrHistory(Model), FuseAddNorm(Model)
    (name, change), = history.changes("FuseAddNorm", fused).items()
    assert name == "decode"
    (hunk,) = change["hunks"]
    assert [line[0] for line in hunk["lines"]] == list(" --+++ ")
    assert "relaxpack.add_rms_norm" in hunk["lines"][3] and hunk["lines"][-1].lstrip().startswith("y")
    assert history.changes("FuseAddNorm", fused) == {}                   # nothing since


def test_of_buckets_the_smallest_is_followed_from_the_symbolic_function() -> None:
    history = IrHistory(Model)
    buckets = SpecializeBuckets("decode", "t", (2, 4))(Model)
    (name, change), = history.changes("SpecializeBuckets", buckets).items()
    assert name == "decode_2"
    lines = [line for hunk in change["hunks"] for line in hunk["lines"]]
    assert "- parameter a: float32[t, 8]" in lines and "+ parameter a: float32[2, 8]" in lines
    assert set(history.changes("FuseAddNorm", FuseAddNorm(buckets))) == {"decode", "decode_2"}


def test_the_lowering_to_the_vm_is_not_followed() -> None:
    assert "VMShapeLower" in NOT_FOLLOWED
    assert IrHistory(Model).changes("VMShapeLower", FuseAddNorm(Model)) == {}


def test_a_function_from_nowhere_is_all_new() -> None:
    history = IrHistory(tvm.IRModule({"sample": Model["sample"]}))
    change = history.changes("export", Model)["decode"]
    assert change["removed"] == 0 and change["added"] == 7
