"""A tuning session with a measurer that only pretends: what is tried, stored, kept, and how a stopped job goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaxpack.dist.tuning.store import open_store
from relaxpack.errors import EnvironmentProblem
from relaxpack.schedules.tuning import metaschedule
from relaxpack.schedules.tuning.family import Part
from relaxpack.schedules.tuning.space import ListedSpace, SearchSpace
from relaxpack.target import TargetSpec
from relaxpack.tuning.duel import decide
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.session import Limits, Outcome, TuningSession, shares
from relaxpack.tuning.tasks import Task
from relaxpack.tuning.trial_log import TrialLog
from relaxpack.tuning.worker import CandidateFailed
from relaxpack.tuning_record import Workload, digest
from relaxpack.tvm_records import primfunc_workload
from tests.helpers.tuning_records import COMPILER, CPU, doubling

TARGET = TargetSpec("cpu", "znver5", ("avx2", "fma"), 2)
SPACE = SearchSpace({"a": tuple(range(12))}, {"a": 0})


def task(name: str = "linear", weight: float = 1.0, space: SearchSpace | ListedSpace = SPACE, roofline: float = 1.0) -> Task:
    return Task(name, Workload.kernel("family", {"name": name}, name), 4, weight, roofline, Part(1, None, space), "shape")


class Pretending:
    """Microseconds are a function of the parameters; {} is the rule. Some choices fail."""

    def __init__(self, times: Any = lambda a: 100.0 - a, busy: bool = False) -> None:
        self.times, self.busy, self.parallel = times, busy, 1
        self.built: list[dict[str, Any]] = []
        self.kept = 0

    def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
        self.built.append(dict(choice["parameters"]))
        self.kept += 1
        if choice["parameters"].get("a") == 3:
            raise CandidateFailed("crashed (SIGSEGV)")
        return str(choice["parameters"].get("a", 0))

    def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
        return (7.0, "output 0, 4 rows") if library == "5" else (0.5, "")

    def time(self, libraries: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int,
             seconds: float) -> list[Rounds]:
        return [Rounds(tuple(self.times(int(library)) * (1 + 0.001 * (i % 3)) for i in range(rounds)),
                       (not self.busy,) * rounds, 1 << 26) for library in libraries]

    def conditions(self) -> Mapping[str, Any]:
        return {"method": "pretended"}

    def discard(self, library: str) -> None:
        self.kept -= 1

    def close(self) -> None:
        pass


def run(tmp_path: Path, measurer: Pretending, *tasks: Task, **limits: Any) -> list[Outcome]:
    with open_store(str(tmp_path / "t.sqlite")) as store:
        return TuningSession(tasks or [task()], TARGET, CPU, COMPILER, measurer, store, TrialLog(tmp_path / "log"),
                             Limits(**{"trials": 100, **limits})).run()


def records(tmp_path: Path) -> list[Any]:
    with open_store(str(tmp_path / "t.sqlite")) as store:
        return list(store.all())


def test_the_fastest_right_candidate_is_stored_with_its_evidence(tmp_path: Path) -> None:
    outcome, = run(tmp_path, Pretending())
    assert (outcome.state, outcome.trials, outcome.failed) == ("improved", 11, 2)    # 3 crashes, 5 is wrong
    one, = records(tmp_path)
    assert one.choice == {"kind": "parameters", "parameters": {"a": 11}} and one.id == outcome.record
    assert one.median_us == pytest.approx(89, rel=0.01) and one.baseline_us == pytest.approx(100, rel=0.01)
    assert one.conditions["repeats"] == len(one.times_us) == 15 and one.conditions["rotated_bytes"] == 1 << 26
    assert one.check.max_error <= one.check.tolerance and one.origin.trials == 11


def test_nothing_faster_keeps_the_rule_and_says_so(tmp_path: Path) -> None:
    outcome, = run(tmp_path, Pretending(lambda a: 100.0 - 0.01 * a))
    assert outcome.state == "kept" and outcome.why == "not 1% faster"
    one, = records(tmp_path)
    assert one.choice["parameters"] == {} and one.baseline_us == one.median_us


def test_an_incumbent_is_only_replaced_beyond_the_noise(tmp_path: Path) -> None:
    run(tmp_path, Pretending())
    TrialLog(tmp_path / "log").forget(_key(task()))
    outcome, = run(tmp_path, Pretending(lambda a: 100.0 - a + (1.5 if a == 11 else 0)))   # now 10 is faster by 0.6 %
    assert outcome.state == "kept" and len(records(tmp_path)) == 1
    TrialLog(tmp_path / "log").forget(_key(task()))
    outcome, = run(tmp_path, Pretending(lambda a: 100.0 - a + (5 if a == 11 else 0)))
    assert outcome.state == "improved" and len(records(tmp_path)) == 2


def test_a_busy_machine_decides_nothing_and_stores_nothing(tmp_path: Path) -> None:
    outcome, = run(tmp_path, Pretending(busy=True))
    assert outcome.state == "busy" and "run again" in outcome.why and records(tmp_path) == []
    measurer = Pretending()
    outcome, = run(tmp_path, measurer)                # the trials are known, only the duel is fought again
    assert outcome.state == "improved" and len(measurer.built) == 1 + 2 + 3


def test_a_finished_job_builds_nothing_the_second_time(tmp_path: Path) -> None:
    first, = run(tmp_path, Pretending())
    measurer = Pretending()
    outcome, = run(tmp_path, measurer)
    assert (outcome.state, outcome.record, measurer.built) == ("known", first.record, [])


class _Killed(BaseException):
    pass


def test_a_killed_job_goes_on_where_it_was(tmp_path: Path) -> None:
    class DiesAt(Pretending):
        def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
            if len(self.built) == 6:
                raise _Killed
            return super().build(workload, choice)

    dying = DiesAt()
    with pytest.raises(_Killed):
        run(tmp_path, dying)
    tried = [choice for choice in dying.built if choice]
    measurer = Pretending()
    outcome, = run(tmp_path, measurer)
    assert outcome.state == "improved" and outcome.trials == 11
    assert len(tried) == 5 and not [choice for choice in measurer.built[:8] if choice in tried]


def test_the_time_limit_stops_and_the_next_run_goes_on(tmp_path: Path) -> None:
    now = [0.0]

    class Slow(Pretending):
        def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
            now[0] += 1.0
            return super().build(workload, choice)

    with open_store(str(tmp_path / "t.sqlite")) as store:
        session = TuningSession([task(), task("other")], TARGET, CPU, COMPILER, Slow(), store, TrialLog(tmp_path / "log"),
                                Limits(100, 5.0), clock=lambda: now[0])
        first, second = session.run()
    assert (first.state, second.state, second.why) == ("stopped", "stopped", "no time left") and first.trials == 4
    outcomes = run(tmp_path, Pretending(), task(), task("other"))
    assert [outcome.state for outcome in outcomes] == ["improved", "improved"]


def test_near_the_roofline_the_search_stops_but_not_before_some_trials(tmp_path: Path) -> None:
    outcome, = run(tmp_path, Pretending(), task(roofline=90.0))
    assert outcome.trials == 8 and outcome.state == "improved"


def test_a_roofline_that_is_beaten_by_far_is_wrong_and_stops_nothing(tmp_path: Path) -> None:
    outcome, = run(tmp_path, Pretending(), task(roofline=200.0))
    assert outcome.trials == 11


def test_an_untuned_kernel_that_fails_is_the_tasks_failure_alone(tmp_path: Path) -> None:
    class Broken(Pretending):
        def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
            return (2.0, "output 0") if workload.name == "linear" else (0.1, "")

    broken, fine = run(tmp_path, Broken(), task(), task("other"))
    assert broken.state == "failed" and "wrong numbers: 2 times" in broken.why and fine.state == "improved"


def test_every_library_is_discarded(tmp_path: Path) -> None:
    measurer = Pretending()
    run(tmp_path, measurer)
    assert measurer.kept == measurer.built.count({"a": 3})        # what never was built


def test_trials_are_shared_by_weight() -> None:
    tasks = [task("heavy", 0.7), task("light", 0.3), task("tiny", 0.0, SearchSpace({"a": (1, 2)}, {"a": 1}))]
    assert shares(tasks, 21) == {"heavy@4": 11, "light@4": 9, "tiny@4": 1}
    assert sum(shares(tasks, 7).values()) == 7
    assert shares(tasks, 1000) == {"heavy@4": 11, "light@4": 11, "tiny@4": 1}
    assert shares(tasks, 0) == dict.fromkeys(("heavy@4", "light@4", "tiny@4"), 0)


def _key(one: Task) -> dict[str, Any]:
    return {"workload": one.workload.hash, "bucket": one.bucket, "target": dict(CPU), "compiler": dict(COMPILER)}


def test_a_key_names_the_whole_of_what_was_tried(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "t.sqlite")) as store:
        session = TuningSession([task()], TARGET, CPU, COMPILER, Pretending(), store, TrialLog(tmp_path / "log"))
    assert digest(session.key(task())) == digest(_key(task())) != digest(session.key(task("other")))


def test_what_the_machine_mistakes_for_a_difference_is_no_gain() -> None:
    """The incumbent and the rule are the same kernel: where these two differ, a gain must be twice that."""
    def rounds(us: float) -> Rounds:
        return Rounds(tuple(us * (1 + 0.001 * (i % 3)) for i in range(15)), (True,) * 15, 1)

    calm = decide([rounds(100), rounds(100.5), rounds(90)], same=True)
    shaky = decide([rounds(100), rounds(94), rounds(90)], same=True)
    assert calm[0] == 2 and shaky[0] == 0 and "the same kernel measured twice differs by 6.0%" in shaky[1].why
    assert decide([rounds(100), rounds(94), rounds(90)], same=False)[0] == 2      # a record and the rule may differ
    assert decide([rounds(100), rounds(94), rounds(80)], same=True)[0] == 2


def test_a_task_may_ask_for_more_than_the_noise(tmp_path: Path) -> None:
    """And is measured as a build has it, which its record does not say."""
    class Asked(Pretending):
        def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
            names.append(workload.name)
            return super().build(workload, choice)

    names: list[str] = []
    asked = Workload.kernel("family", {"name": "with norm"}, "with norm")
    outcome, = run(tmp_path, Asked(lambda a: 100.0 - a / 4), replace(task(), asked=asked, least_gain=0.03))
    assert outcome.state == "kept" and outcome.why == "faster by 2.7%, 3% needed" and set(names) == {"with norm"}
    one, = records(tmp_path)
    assert one.workload.name == "linear" and one.choice["parameters"] == {} and "norm" in one.conditions


def test_the_choice_of_a_library_is_stored_as_one(tmp_path: Path) -> None:
    space = ListedSpace(({"a": 1}, {"a": 2, "library": "cublaslt"}), {"a": 0})
    run(tmp_path, Pretending(lambda a: 100.0 - 20 * a), task(space=space))
    one, = records(tmp_path)
    assert one.choice == {"kind": "library", "library": "cublaslt", "parameters": {"a": 2}}


def test_missing_packages_of_metaschedule_cost_its_tasks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any, **more: Any) -> None:
        raise EnvironmentProblem("MetaSchedule's search needs xgboost")

    monkeypatch.setattr(metaschedule, "search", missing)
    function = Task("doubling", primfunc_workload(doubling(), "doubling"), None, 1.0, 1.0, None, "")

    class Traced(Pretending):
        def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
            return "0" if choice["kind"] == "trace" else super().build(workload, choice)

    left, tuned = run(tmp_path, Traced(), function, task())
    assert (left.state, left.why) == ("failed", "MetaSchedule's search needs xgboost") and tuned.state == "improved"
