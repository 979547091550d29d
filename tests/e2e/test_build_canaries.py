"""Canaries of targets that the building machine cannot run, and C39: a model whose activations leave float16 behind.
Nothing is compiled for a GPU here; the reference is lowered for this CPU, as a build does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.compile import canaries as build_canaries
from relaxpack.compile.canaries import BuiltTarget, Recorded, record_canaries
from relaxpack.compile.target_plan import plan_targets, target_specs
from relaxpack.compile.weights import convert
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.canary import CANARY, CanaryOrigin, CanarySet, foreign_tolerance, tolerance
from relaxpack.dist.manifest import TargetEntry
from relaxpack.errors import CompileError
from relaxpack.model_info import ModelInfo
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime.canaries import check
from relaxpack.runtime.load import load_model
from relaxpack.weight_format import QuantizedTensor
from tests.helpers.tiny_checkpoints import make_config, make_tensors, write_checkpoint
from tests.reference.numpy_decoder import forward

LIMITS = BuildLimits(64, max_batch=1, prefill_chunk=32)


def info(checkpoint: object) -> ModelInfo:
    c = checkpoint.config  # type: ignore[attr-defined]
    return ModelInfo("tiny", c.architecture, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim,
                     c.vocab_size, LIMITS.max_context, LIMITS.page_size, "bfloat16", "bfloat16", LIMITS.max_batch,
                     LIMITS.prefill_chunk, None, (), False)


def recorded(folder: Path, model: Path, dtype: str | None = None, weights: str = "as-is") -> tuple[Recorded, bytes | None]:
    """As `build_bundle` does it for a GPU target whose library and parameters are written; (result, canary.json)."""
    checkpoint = open_checkpoint(model)
    (plan,) = plan_targets(target_specs("cuda:sm_90a"), checkpoint, weights, dtype, None)
    entry = TargetEntry(plan.spec, "lib/x.so", "x", (), ("decode",), {})

    @contextlib.contextmanager
    def stage(name: str, total: int | None) -> Iterator[None]:
        yield

    with pytest.raises(RuntimeError, match="without finish"), BundleWriter(folder / "x.bundle") as writer:
        result = record_canaries(writer, [BuiltTarget(plan, entry, folder / "x.so")], checkpoint, info(checkpoint), LIMITS,
                                 (True, False), stage)
        data = (writer._folder / CANARY).read_bytes() if CANARY in writer.members else None
    return result, data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "model", dtype="bfloat16")


def test_a_cpu_answers_for_a_gpu_that_is_not_there(tmp_path: Path, model: Path) -> None:
    result, data = recorded(tmp_path, model)
    assert result.missing == "" and data is not None
    (entry,) = result.entries
    origin = CanaryOrigin.from_json(entry.canary)
    assert origin is not None and origin.recorded_by.startswith("cpu:")
    assert origin.tolerance == foreign_tolerance({"bf16"}, "bfloat16") > tolerance({"bf16"}, "bfloat16")
    # The answers are those of this model: its own CPU bundle gives them too, and closer than a GPU must.
    build_bundle(model, tmp_path / "cpu.bundle", options=BuildOptions(max_context=64, max_batch=1, prefill_chunk=32))
    canaries = CanarySet.from_bytes(data)
    reports = list(check(load_model(tmp_path / "cpu.bundle").runner, canaries))
    assert len(reports) == 3 and all(report.ok and report.max_difference < 1e-3 for report in reports)


def test_the_answers_are_those_of_the_targets_weights(tmp_path: Path, model: Path) -> None:
    """With 4-bit weights of a float checkpoint: those are what the GPU has, unpacked, so no CPU rounds activations."""
    result, data = recorded(tmp_path, model, weights="q4")
    assert data is not None
    assert result.entries[0].canary["tolerance"] == foreign_tolerance({"f16"}, "bfloat16") < foreign_tolerance(
        {"q4_1"}, "bfloat16")
    quantised = CanarySet.from_bytes(data).canaries[0]
    expected = prompt_logits(model, "q4", quantised.prompt_ids)
    here = np.array(quantised.top_logits)
    np.testing.assert_allclose(here, expected[list(quantised.top_ids)], atol=2e-2)
    assert np.abs(here - prompt_logits(model, "as-is", quantised.prompt_ids)[list(quantised.top_ids)]).max() > 5e-2


class _Converted:
    """A checkpoint's tensors as `--weights` stores them for a GPU, unpacked."""

    def __init__(self, checkpoint: Checkpoint, weights: str) -> None:
        self._checkpoint = checkpoint
        (self._plan,) = plan_targets(target_specs("cuda:sm_90a"), checkpoint, weights, None, None)

    def read(self, name: str) -> np.ndarray:
        weight = self._checkpoint.read(name)
        weight = convert(weight, self._plan.formats[name]) if name in self._plan.formats else weight
        return np.asarray(weight.dequantize() if isinstance(weight, QuantizedTensor) else weight, np.float32)


def prompt_logits(model: Path, weights: str, ids: tuple[int, ...]) -> np.ndarray:
    """By NumPy."""
    checkpoint = open_checkpoint(model)
    converted = replace(checkpoint, reader=_Converted(checkpoint, weights))  # type: ignore[arg-type]
    return forward(converted, list(ids), LIMITS.max_context)[-1]


def test_where_a_reference_is_too_large_the_bundle_says_so(tmp_path: Path, model: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_canaries, "REFERENCE_BYTES", 1000)
    result, data = recorded(tmp_path, model)
    assert data is None and "a CPU reference of 0.0 GB is not made" in result.missing
    origin = CanaryOrigin.from_json(result.entries[0].canary)
    assert origin is not None and origin.reason == result.missing and not origin.recorded_by


# -- C39: a bfloat16 checkpoint in float16 -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; the second one's MLP lifts the residual beyond 65504. Every weight fits into float16, and nothing is
    infinite in float32."""
    tensors = make_tensors(make_config("llama"))
    for name, factor in (("up", 1e2), ("down", 3e3)):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"] *= np.float32(factor)
    return write_checkpoint(tmp_path_factory.mktemp("overflow") / "model", tensors=tensors, dtype="bfloat16")


def refusal(folder: Path, model: Path) -> str:
    """What a float16 build says; nothing is left of it."""
    with pytest.raises(CompileError) as caught:
        checkpoint = open_checkpoint(model)
        (plan,) = plan_targets(target_specs("cuda:sm_90a"), checkpoint, "as-is", "float16", None)
        with BundleWriter(folder / "x.bundle") as writer:
            record_canaries(writer, [BuiltTarget(plan, TargetEntry(plan.spec, "lib/x.so", "x", (), (), {}), folder)],
                            checkpoint, info(checkpoint), LIMITS, (True, False),
                            lambda name, total: contextlib.nullcontext())
    assert not (folder / "x.bundle").exists()
    return str(caught.value)


def test_c39_float16_that_cannot_hold_the_activations_is_refused_at_build(tmp_path: Path, overflowing: Path) -> None:
    text = refusal(tmp_path, overflowing)
    assert "cuda:sm_90a: activations do not fit into float16, which ends at 65504" in text
    assert "in layer 1, from linear" in text and "--dtype bfloat16" in text
    value = float(text.partition("a value of ")[2].split()[0])
    assert 65504 < value < 1e8


@pytest.mark.parametrize("target, dtype, weights", [("cuda:sm_90a", "float16", "as-is"), ("cpu", None, "f16")])
def test_c39_float16_that_cannot_hold_the_weights_is_refused_at_build(tmp_path: Path, target: str, dtype: str | None,
                                                                      weights: str) -> None:
    tensors = make_tensors(make_config("llama"))
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e5
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", tensors=tensors, dtype="bfloat16"))
    (plan,) = plan_targets(target_specs(target), checkpoint, weights, dtype, None)
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(CompileError, match=r"a weight of 9.98e\+04 does not fit into float16, .*--dtype bfloat16"):
        convert(checkpoint.read(name), plan.formats[name])


def test_c39_bfloat16_is_the_default_and_holds_them(tmp_path: Path, overflowing: Path) -> None:
    (plan,) = plan_targets(target_specs("cuda:sm_90a"), open_checkpoint(overflowing), "as-is", None, None)
    assert plan.activation_dtype == "bfloat16"
    result, data = recorded(tmp_path, overflowing)
    assert result.missing == "" and data is not None


def test_c39_a_model_that_fits_is_built_in_float16(tmp_path: Path, model: Path) -> None:
    result, data = recorded(tmp_path, model, "float16")
    assert result.missing == "" and data is not None
    assert replace(result.entries[0], canary={}).canary == {}
    assert CanaryOrigin.from_json(result.entries[0].canary).tolerance == 0.1  # type: ignore[union-attr]
