"""`relaxpack tune` as a user runs it: a job that is killed with -9 and goes on, a job that is complete, and mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from relaxpack.cli import run
from relaxpack.cli.tune import tune
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.waiting import eventually

OPTIONS = ("--max-batch", "2", "--prefill-chunk", "16", "--only", "add_rms_norm", "--bucket", "decode:1")

# The same command, which stays where it is once the first trial is in its log.
STAYS = """
import sys, time, relaxpack.cli
from relaxpack.tuning.trial_log import TrialLog
trial = TrialLog.trial
def trial_and_stay(self, *arguments, **more):
    trial(self, *arguments, **more)
    time.sleep(3600)
TrialLog.trial = trial_and_stay
sys.exit(relaxpack.cli.run())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune") / "model"
    write_checkpoint(path)
    return path


def _command(model: Path, database: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "relaxpack", "tune", str(model), *OPTIONS, "--db", str(database), "--json", *more]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.getcwd()}


def _tried(log: Path) -> list[Any]:
    if not log.exists():
        return []
    return [json.loads(line)["choice"] for line in log.read_text().splitlines() if '"choice"' in line]


@pytest.mark.slow
def test_a_job_killed_with_9_leaves_no_process_and_goes_on(model: Path, tmp_path: Path) -> None:
    database, log = tmp_path / "t.sqlite", tmp_path / "t.sqlite.trials.jsonl"
    command = [sys.executable, "-c", STAYS, *_command(model, database)[3:]]
    job = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _tried(log) or job.poll() is not None, "the first trial", 600)
        assert job.poll() is None, "it ended before it could be killed"
        workers = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGKILL)
        job.wait()
    finally:
        if job.poll() is None:
            job.kill()
    eventually(lambda: not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers),
               "the end of its workers")
    before = _tried(log)
    done = subprocess.run(_command(model, database), env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    outcome, = report["tasks"]
    after = _tried(log)
    assert after[:len(before)] == before and len(after) == 3 == len({str(choice) for choice in after})
    assert outcome["trials"] == 3 and outcome["failed"] == 0 and outcome["state"] in ("improved", "kept", "busy")
    assert report["target"].startswith("cpu:") and report["database"] == str(database)


def _error(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["tune", *arguments]) != 0
    error = capsys.readouterr().err
    assert error.startswith("relaxpack: ") and error.count("\n") == 1, error
    return error


def test_mistakes_are_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = str(model), "--db", str(tmp_path / "t.sqlite")
    assert "a decode step has at most 8 rows" in _error(*names, "--bucket", "decode:9", "--dry-run", capsys=capsys)
    assert "expected decode:ROWS" in _error(*names, "--bucket", "8", capsys=capsys)
    assert "they are: add_rms_norm_64" in _error(*names, "--only", "nothing", "--dry-run", capsys=capsys)
    assert "belong together" in _error(*names, "--key", "a", capsys=capsys)
    assert "benchmarks.gpu.tune" in _error(*names, "--target", "cuda:sm_100a", capsys=capsys)      # whatever GPU is here
    assert not (tmp_path / "t.sqlite").exists()


def test_the_tasks_of_a_model(model: Path) -> None:
    done = CliRunner().invoke(tune, [str(model), "--dry-run", "--json", "--max-batch", "2", "--prefill-chunk", "16"])
    assert done.exit_code == 0, done.output
    tasks = {task["task"]: task for task in json.loads(done.stdout)}
    assert "linear_f32_64x128_decode@1" in tasks and "linear_f32_64x128_prefill@16" in tasks
    assert sum(task["weight"] for task in tasks.values()) <= 1.0001
    assert all(task["choices"] > 0 and task["roofline_us"] > 0 and task["calls"] for task in tasks.values())
    weights = [task["weight"] for task in tasks.values()]
    assert weights == sorted(weights, reverse=True)
