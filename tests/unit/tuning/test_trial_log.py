"""The log of trials: what a killed job left is what the next one goes on from."""

from __future__ import annotations

from pathlib import Path

from relaxpack.tuning.trial_log import TrialLog

TASK, OTHER = {"workload": "a", "bucket": 1}, {"workload": "a", "bucket": 2}


def test_trials_and_ends_come_back(tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "deep" / "log.jsonl")
    log.trial(TASK, {"tiles": (2, 8)}, 12.5)
    log.trial(TASK, {"tiles": (4,)}, None, "crashed (SIGSEGV)")
    log.finish(OTHER, "kept: not 1% faster")
    again = TrialLog(log.path)
    history = again.history(TASK)
    assert history.results == [({"tiles": [2, 8]}, 12.5), ({"tiles": [4]}, None)]
    assert (history.failures(), history.done, again.history(OTHER).done) == (1, None, "kept: not 1% faster")


def test_a_line_cut_by_a_kill_is_passed_over_and_spoils_no_later_one(tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "log.jsonl")
    log.trial(TASK, {"a": 1}, 1.0)
    log.trial(TASK, {"a": 2}, 2.0)
    data = log.path.read_bytes()
    log.path.write_bytes(data[:-9])
    again = TrialLog(log.path)
    assert again.history(TASK).results == [({"a": 1}, 1.0)]
    again.trial(TASK, {"a": 3}, 3.0)
    assert TrialLog(log.path).history(TASK).results == [({"a": 1}, 1.0), ({"a": 3}, 3.0)]


def test_forgetting_starts_again(tmp_path: Path) -> None:
    log = TrialLog(tmp_path / "log.jsonl")
    log.trial(TASK, {"a": 1}, 1.0)
    log.finish(TASK, "improved")
    log.forget(TASK)
    log.trial(TASK, {"a": 2}, 2.0)
    history = TrialLog(log.path).history(TASK)
    assert history.results == [({"a": 2}, 2.0)] and history.done is None
