"""A candidate that runs forever, crashes the process that runs it, crashes the one that builds it, or is wrong costs one
trial; the job goes on and never hangs. The candidates are real: compiled by LLVM and run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from relaxpack.dist.tuning.store import open_store
from relaxpack.schedules.tuning.family import Part
from relaxpack.schedules.tuning.space import SearchSpace
from relaxpack.target import TargetSpec, parse_target
from relaxpack.tuning.measure import LocalMeasurer
from relaxpack.tuning.session import Limits, TuningSession
from relaxpack.tuning.tasks import Task
from relaxpack.tuning.trial_log import TrialLog
from relaxpack.tuning.worker import CandidateFailed, Worker
from relaxpack.tuning_record import Workload
from relaxpack.tvm_records import primfunc_workload
from tests.helpers import bad_candidates
from tests.helpers.tuning_records import COMPILER, CPU, doubling

KINDS = ("is_right", "runs_forever", "crashes_the_runner", "crashes_the_builder", "is_wrong")


def target() -> TargetSpec:
    return parse_target("cpu:x86-64-v3")


class ByName(LocalMeasurer):
    """Parameters name the candidate; without any, it is the untuned function."""

    def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
        name = choice["parameters"].get("kind")
        made = getattr(bad_candidates, name)() if name is not None else {"kind": "trace", "trace": [[], []]}
        return super().build(workload, made)


def test_each_costs_one_trial(tmp_path: Path) -> None:
    space = SearchSpace({"kind": KINDS}, {"kind": None})
    task = Task("doubling", primfunc_workload(doubling(), "doubling"), 1, 1.0, 1e-6, Part(1, None, space), "")
    log = TrialLog(tmp_path / "log")
    with ByName(target(), run_seconds=30.0) as measurer, open_store(str(tmp_path / "t.sqlite")) as store:
        session = TuningSession([task], target(), CPU, COMPILER, measurer, store, log,
                                Limits(trials=10, trial_seconds=0.1, duel_seconds=0.5))
        outcome, = session.run()
    assert (outcome.trials, outcome.failed) == (5, 4) and outcome.state in ("improved", "kept", "busy"), outcome
    reasons = {entry["choice"]["kind"]: entry.get("why", "") for entry in _lines(log.path) if "choice" in entry}
    assert reasons["is_right"] == ""
    assert reasons["runs_forever"] == "not done after 30 s"
    assert reasons["crashes_the_runner"] == "crashed (SIGSEGV)"
    assert reasons["crashes_the_builder"] == "crashed (SIGABRT)"
    assert reasons["is_wrong"].startswith("wrong numbers: ")


def _lines(path: Path) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_worker_outlives_the_thread_that_used_it_first() -> None:
    """Candidates side by side are measured in threads that end; the processes they were the first to use go on."""
    with Worker() as worker:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(worker.call("os:getpid", timeout=60)))
        thread.start()
        thread.join()
        assert [worker.call("os:getpid", timeout=60)] == found


def test_a_worker_starts_again_after_each_kind_of_death() -> None:
    with Worker() as worker:
        first = worker.call("os:getpid", timeout=60)
        assert worker.call("os:getpid", timeout=60) == first
        for function, arguments, how in (("time:sleep", (600,), "not done after 1 s"), ("os:abort", (), "crashed (SIGABRT)"),
                                         ("os:_exit", (3,), "ended with exit code 3")):
            with pytest.raises(CandidateFailed) as caught:
                worker.call(function, *arguments, timeout=1 if function == "time:sleep" else 60)
            assert str(caught.value) == how
        assert worker.call("os:getpid", timeout=60) != first
        with pytest.raises(CandidateFailed, match="ValueError: math domain error"):
            worker.call("math:sqrt", -1, timeout=60)
