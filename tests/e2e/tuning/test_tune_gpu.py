"""`relaxpack tune --target cuda` without a GPU: the command, its tasks, spaces and kernels are real, the GPU is a stand-in.
What it stores, a build for that GPU uses; a second run has nothing left to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from relaxpack import fingerprint
from relaxpack.cli.tune import tune
from relaxpack.compile.kernels import kernel_provider, records_for
from relaxpack.relax_models.export import BuildLimits
from relaxpack.target import parse_target
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import TuningRecord
from tests.helpers import gpu_stand_in
from tests.helpers.cuda_harness import can_generate
from tests.helpers.gpu_stand_in import StandInGpu
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.tuning_records import SM_90

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_generate(), reason="no CUDA code generator")]
TARGET = parse_target("cuda:sm_90a")
LIMITS = BuildLimits(256, max_batch=2, prefill_chunk=16)
H200 = {**SM_90, "name": "NVIDIA H200"}
OPTIONS = ("--target", "cuda:sm_90a", "--max-batch", "2", "--prefill-chunk", "16", "--bucket", "decode:2", "--json")


def _kernel_of(name: str) -> Any:
    if "_wa2_un1" in name:          # every candidate of two warps with one chunk each in flight
        return gpu_stand_in.wrong
    if "attention" in name:
        return gpu_stand_in.fused_attention
    return gpu_stand_in.norm if "rms_norm" in name else gpu_stand_in.linear


def _time_of(name: str) -> float:
    return 50.0 if "_wa4_" in name or "_th64" in name else 1.0 if "_wa2_un1" in name else 100.0


def _tune(model: Path, database: Path, *more: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(tune, [str(model), "--db", str(database), *OPTIONS, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["target"] == "cuda:sm_90a"
    tasks: list[dict[str, Any]] = report["tasks"]
    return tasks


def test_a_model_is_tuned_where_the_gpu_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {name: fact for name, fact in H200.items() if name not in ("kind", "arch")}
    monkeypatch.setattr(fingerprint, "_gpu_facts", lambda arch, index: facts)
    gpu_stand_in.use(monkeypatch, StandInGpu(_kernel_of, _time_of))
    write_checkpoint(tmp_path / "model", dtype="bfloat16", num_hidden_layers=3, hidden_size=256, intermediate_size=512,
                     head_dim=64)
    database = tmp_path / "h200.sqlite"
    first = _tune(tmp_path / "model", database, "--only", "*norm*", "--trials", "30")
    states = [task["state"] for task in first]
    assert set(states) <= {"improved", "kept"} and states.count("improved") >= 3, first
    assert sum(task["failed"] for task in first) >= 1                      # the wrong ones, and none of them won
    assert all(task["best_us"] < 0.8 * task["untuned_us"] for task in first if task["state"] == "improved")
    assert any("prepares_norm" in task["task"] for task in first)
    again = _tune(tmp_path / "model", database, "--only", "*norm*", "--trials", "30")
    assert {task["state"] for task in again} == {"known"} and [t["record"] for t in again] == [t["record"] for t in first]

    with records_for([str(database)], TARGET, H200) as lookup:
        assert lookup is not None
        records: list[TuningRecord] = list(lookup.source.all())
        provider = kernel_provider(TARGET, lookup, LIMITS)
        for one in records:
            family, spec = family_and_spec(one.workload)
            kernel = getattr(provider, family.partition(".")[2])(spec)
            assert kernel.source == f"tuned:{one.id[:16]}" and one.median_us <= (one.baseline_us or 0)
            assert "_wa2_un1" not in kernel.stages[0].name
    assert {one.id for one in records} == {task["record"] for task in first}
    in_layers = [one for one in records if "chain" in one.conditions]
    told = [str(one.conditions["chain"]).partition(": ")[0] for one in in_layers]
    begins = "whole layers of decode_2, 1 of these in each"
    assert len(in_layers) == 3 and all(one.startswith(begins) for one in told)
    winners = sum(bool(one.choice["parameters"]) for one in in_layers)
    around = {begins, *(f"{begins}, records for {n} of the others" for n in range(1, winners + 1))}
    assert winners >= 2 and begins in told and len(set(told)) > 1 and set(told) <= around, told
    assert all(one.median_us == pytest.approx(50, rel=0.1) for one in in_layers if one.choice["parameters"])
    folded = [one for one in records if "norm" in one.conditions]
    assert folded and all(one.conditions["sm_mhz"] == 1980 and one.conditions["rotated_bytes"] > 0 for one in records)


def test_a_machine_without_the_gpu_says_what_to_do(tmp_path: Path) -> None:
    from relaxpack.cli import run

    write_checkpoint(tmp_path / "model", dtype="bfloat16", num_hidden_layers=1)
    assert run(["tune", str(tmp_path / "model"), "--target", "cuda:sm_100a", "--db", str(tmp_path / "t.sqlite")]) != 0
    assert not (tmp_path / "t.sqlite").exists()
