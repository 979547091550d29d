"""Crash reports: the message names pass, function, operation and shapes, and the file it leaves fails in the same way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import relaxpack.compile.reproducer
import relaxpack.tvm_setup
from relaxpack.cli import run
from relaxpack.compile.lowering import lower_model
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import Kernel, LinearSpec, NormSpec
from relaxpack.passes.config import PipelineConfig, left_out
from relaxpack.relax_models.config import ModelConfig
from relaxpack.relax_models.export import BuildLimits
from relaxpack.relax_models.rope import RopeConfig
from relaxpack.target import parse_target
from tests.helpers.model_shapes import formats_of
from tests.helpers.plain_kernels import PlainKernels

CONFIG = ModelConfig("llama", 32, 48, 2, 2, 1, 16, 64, 1e-5, 128, RopeConfig("default", 1e4, 16, 128), (None, 24), False,
                     True, False, False, False)


class Faulty(PlainKernels):
    """Has no kernel for SwiGLU, and no error of ours to say so."""

    def linear(self, spec: LinearSpec) -> Kernel:
        if spec.gated:
            raise KeyError(f"no tile for {spec.out_features}")
        return super().linear(spec)

    def folds_norm(self, spec: LinearSpec) -> bool:
        return False


RAISES = Faulty.linear.__code__.co_firstlineno + 2


class Refusing(PlainKernels):
    def norm(self, spec: NormSpec) -> Kernel:
        raise CompileError(f"hidden size {spec.hidden_size}: make it a multiple of 1000")


def lower(provider: Any, folder: Path) -> None:
    lower_model(CONFIG, BuildLimits(64), parse_target("cpu"), provider, formats_of(CONFIG, "f32", "f32"), "float32",
                "float32", PipelineConfig(left_out(3)), dump=folder)


def test_a_crash_names_what_failed_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileError) as caught:
        lower(Faulty(), tmp_path)
    message = str(caught.value)
    path = tmp_path / "relaxpack-LowerKernels.reproducer.json"
    for part in ("pass LowerKernels failed in phase 'lower'", "KeyError: 'no tile for 96' (", f"{__file__}:{RAISES})",
                 "decode: ", "relaxpack.linear+swiglu(", 'R.Tensor((t, 32), dtype="float32")',
                 'R.Tensor((96, 32), dtype="float32")', f"relaxpack replay {path}"):
        assert part in message, (part, message)
    assert "weight" in json.loads(path.read_text())["module"]           # names only: the file is small
    assert path.stat().st_size < 1e6

    monkeypatch.setattr(relaxpack.compile.reproducer, "kernel_provider", lambda target: Faulty())
    assert run(["replay", str(path)]) == 4
    assert "no tile for 96" in capsys.readouterr().err
    monkeypatch.setattr(relaxpack.compile.reproducer, "kernel_provider", lambda target: PlainKernels())
    assert run(["replay", str(path)]) == 0
    assert "pass LowerKernels of phase 'lower' does not fail any more" in capsys.readouterr().out


def test_what_the_user_can_change_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="^hidden size 32: make it a multiple of 1000$"):
        lower(Refusing(), tmp_path)
    assert not list(tmp_path.glob("*.reproducer.json"))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "something else"}'])
def test_other_files_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    assert run(["replay", str(tmp_path / "x.json")]) == 2
    assert "not a reproducer of this relaxpack" in capsys.readouterr().err


def test_another_pipeline_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileError):
        lower(Faulty(), tmp_path)
    (path,) = tmp_path.glob("*.reproducer.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "index": 99}))
    assert run(["replay", str(path)]) == 2
    assert "has no pass LowerKernels at place 99 of phase 'lower'" in capsys.readouterr().err


def test_inputs_survive_the_file() -> None:
    from relaxpack.compile.reproducer import Inputs

    inputs = Inputs(CONFIG, BuildLimits(64), parse_target("cuda:sm_90a"), {"a.weight": "q4_1"}, "bfloat16", "bfloat16",
                    PipelineConfig(left_out(1), (1, 2), (16,), True))
    assert Inputs.from_json(json.loads(json.dumps(inputs.to_json()))) == inputs
    assert dataclasses.is_dataclass(inputs)
