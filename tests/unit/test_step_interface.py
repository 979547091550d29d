"""The written step interface is what models are exported with."""

from __future__ import annotations

import pytest

from relaxpack.passes.rewrite import exported_functions, num_inputs
from relaxpack.relax_models.export import export_model
from relaxpack.step_interface import STEP_INPUTS, missing_functions
from tests.helpers.captured_model import CONFIG, BuildLimits


@pytest.mark.parametrize("kind", list(STEP_INPUTS))
def test_functions_and_inputs_are_those_of_the_export(kind: str) -> None:
    """Who changes one raises the number of that kind."""
    mod = export_model(CONFIG, BuildLimits(64), "float32", "float32", device_sampling=kind == "cuda", embed=True)
    found = {gv.name_hint: tuple(v.name for v in func.params[:num_inputs(func)]) for gv, func in exported_functions(mod)}
    assert found == dict(STEP_INPUTS[kind])


def test_missing_functions() -> None:
    assert missing_functions("cpu", ("prefill", "decode")) == missing_functions("cpu", ("embed",)) == []
    assert missing_functions("cpu", ("prefill", "embed")) == ["decode"]
    assert missing_functions("cuda", ("decode", "prefill", "top_logprobs")) == ["sample"]
    assert missing_functions("npu", ()) == []
