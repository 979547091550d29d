"""Tuning on the machine that has the GPU: kernels are compiled, checked and timed here, and a candidate that hangs, breaks
the GPU's context, crashes the compiler's process or is wrong costs one trial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import relaxpack.tvm_setup as setup

pytest.importorskip("sqlalchemy", reason="a machine that only runs bundles has no tuning database")
if setup.runtime_only():
    pytest.skip("tuning needs TVM's compiler", allow_module_level=True)

from relaxpack.dist.tuning.store import open_store
from relaxpack.fingerprint import compiler_fingerprint, target_fingerprint
from relaxpack.kernel_spec import NormSpec
from relaxpack.schedules.tuning.family import Part
from relaxpack.schedules.tuning.space import SearchSpace
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.cuda_measure import CudaMeasurer
from relaxpack.tuning.session import Limits, TuningSession
from relaxpack.tuning.tasks import Task
from relaxpack.tuning.trial_log import TrialLog
from relaxpack.tuning_record import digest

pytestmark = pytest.mark.gpu
KINDS = ("is_right", "runs_forever", "crashes_the_runner", "crashes_the_builder", "is_wrong")


class Harmed(CudaMeasurer):
    jobs = "tests.helpers.bad_gpu_candidates:"


def test_each_bad_candidate_costs_one_trial(tmp_path: Path) -> None:
    target = parse_target("cuda")
    workload = families_for(target)["cuda.norm"].workload(NormSpec(4096, 1e-5, "bfloat16", False), "norm")
    task = Task("norm", workload, 8, 1.0, 1e-6, Part(1, None, SearchSpace({"kind": KINDS}, {"kind": None})), "")
    log = TrialLog(tmp_path / "log")
    facts, compiler = target_fingerprint(target), compiler_fingerprint("cuda")
    with Harmed(target, run_seconds=8.0, compilers=2) as measurer, open_store(str(tmp_path / "t.sqlite")) as store:
        outcome, = TuningSession([task], target, facts, compiler, measurer, store, log, Limits(trials=10)).run()
        record = store.lookup(workload.hash, 8, digest(facts), digest(compiler))
    assert (outcome.trials, outcome.failed) == (5, 4) and outcome.state in ("improved", "kept"), outcome
    assert record is not None and record.check is not None and len(record.times_us) >= 8
    assert record.conditions["rotated_bytes"] and record.conditions["sm_mhz"] > 500, record.conditions
    reasons = {line["choice"]["kind"]: line.get("why", "") for line in map(json.loads, log.path.read_text().splitlines())
               if "choice" in line}
    assert reasons["is_right"] == ""
    assert reasons["runs_forever"] == "not done after 8 s"
    assert "illegal" in reasons["crashes_the_runner"]
    assert reasons["crashes_the_builder"] == "crashed (SIGABRT)"
    assert reasons["is_wrong"].startswith("wrong numbers: ")
