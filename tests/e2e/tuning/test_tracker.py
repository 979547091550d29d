"""Tuning on machines behind TVM's own RPC tracker: real tracker and server processes, one of them killed in the middle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relaxpack.dist.tuning.store import open_store
from relaxpack.errors import EnvironmentProblem, UsageError
from relaxpack.fingerprint import compiler_fingerprint, target_fingerprint
from relaxpack.kernel_spec import NormSpec
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.remote import RemoteMeasurer
from relaxpack.tuning.session import Limits, Outcome, TuningSession
from relaxpack.tuning.tasks import Task
from relaxpack.tuning.trial_log import TrialLog
from tests.helpers.ports import free_port
from tests.helpers.rpc_machines import Machines, machines

TARGET = replace(parse_target("cpu"), threads=1)


def _task() -> Task:
    spec = NormSpec(64, 1e-5, "float32", False)
    family = families_for(TARGET)["cpu.norm"]
    return Task("norm", family.workload(spec, "norm"), 1, 1.0, 1e-6, family.part(spec, 1), "")


class _KillsOne:
    """Observes a session and kills the first machine after the first trial."""

    def __init__(self, there: Machines) -> None:
        self.there, self.trials = there, 0

    def planned(self, budgets: object) -> None:
        pass

    def started(self, task: Task) -> None:
        pass

    def trial(self, outcome: Outcome, left: int) -> None:
        self.trials += 1
        if self.trials == 1:
            self.there.kill(0)

    def finished(self, outcome: Outcome) -> None:
        pass


@pytest.mark.slow
def test_a_machine_that_dies_loses_nothing(tmp_path: Path) -> None:
    with machines(2) as there, open_store(str(tmp_path / "t.sqlite")) as store:
        with RemoteMeasurer(TARGET, there.address, there.key) as measurer:
            assert measurer.parallel == 2
            observer = _KillsOne(there)
            log = TrialLog(tmp_path / "trials.jsonl")
            session = TuningSession([_task()], TARGET, target_fingerprint(TARGET), compiler_fingerprint("cpu"), measurer,
                                    store, log, Limits(trials=3), observer)
            outcome, = session.run()
        assert (outcome.state in ("improved", "kept"), outcome.trials, outcome.failed) == (True, 3, 0), outcome
        assert there.servers[0].poll() is not None and there.servers[1].poll() is None
        assert len(log.history(session.key(session.tasks[0])).results) == 3
        record = store.get(outcome.record or "")
        assert record.check is not None and record.conditions["method"] == "RPC, cache flushed before every call"
        with RemoteMeasurer(TARGET, there.address, there.key) as measurer:
            assert measurer.parallel == 1
        with pytest.raises(EnvironmentProblem, match=r"no machine with key 'other'; it has: test\."):
            RemoteMeasurer(TARGET, there.address, "other")
        with pytest.raises(UsageError, match="threads 1 there, 3 in the target"):
            RemoteMeasurer(replace(TARGET, threads=3), there.address, there.key)


def test_a_tracker_that_is_not_there() -> None:
    with pytest.raises(EnvironmentProblem, match="no RPC tracker answers"):
        RemoteMeasurer(TARGET, f"127.0.0.1:{free_port()}", "any")


@pytest.mark.parametrize("address", ["host", "host:port", ":9190"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        RemoteMeasurer(TARGET, address, "any")
