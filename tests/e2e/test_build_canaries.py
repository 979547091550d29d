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

from relaxpack import build_canaries
from relaxpack.build_canaries import BuiltTarget, Recorded, record_canaries
from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.canary import CANARY, CanaryOrigin, CanarySet, foreign_tolerance, tolerance
from relaxpack.dist.manifest import TargetEntry
from relaxpack.errors import CompileError
from relaxpack.model_info import ModelInfo
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime.canaries import check
from relaxpack.runtime.load import load_model
from relaxpack.target_plan import plan_targets, target_specs
from tests.helpers.tiny_checkpoints import make_config, make_tensors, write_checkpoint

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
                                 weights, (True, False), stage)
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
    """Two layers; the second one's down_proj lifts the residual beyond 65504. Nothing is infinite in float32."""
    tensors = make_tensors(make_config("llama"))
    scaled = tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = (scaled * np.float32(3e5)).astype(np.float32)
    return write_checkpoint(tmp_path_factory.mktemp("overflow") / "model", tensors=tensors, dtype="bfloat16")


def test_c39_float16_that_cannot_hold_the_activations_is_refused_at_build(tmp_path: Path, overflowing: Path) -> None:
    with pytest.raises(CompileError) as caught:
        checkpoint = open_checkpoint(overflowing)
        (plan,) = plan_targets(target_specs("cuda:sm_90a"), checkpoint, "as-is", "float16", None)
        with BundleWriter(tmp_path / "x.bundle") as writer:
            record_canaries(writer, [BuiltTarget(plan, TargetEntry(plan.spec, "lib/x.so", "x", (), (), {}), tmp_path)],
                            checkpoint, info(checkpoint), LIMITS, "as-is", (True, False),
                            lambda name, total: contextlib.nullcontext())
    text = str(caught.value)
    assert "cuda:sm_90a: activations do not fit into float16, which ends at 65504" in text
    assert "in layer 1, from linear" in text and "--dtype bfloat16" in text
    value = float(text.partition("a value of ")[2].split()[0])
    assert 65504 < value < 1e8
    assert not (tmp_path / "x.bundle").exists()


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
