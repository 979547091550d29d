"""The benchmark of what HTTP costs for each token: a run of it, over its own server process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import eventually

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "http_overhead.py"


def test_every_token_is_read_and_paid_for() -> None:
    command = [sys.executable, SCRIPT, "--streams", "3", "--tokens", "40", "--runs", "1",
               "--step-ms", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)     # exits 1 where one is missing
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["rows"]
    assert row["streams"] == 3 and row["us_per_token"] > 0 and set(row["us_by_thread"]) == {"http", "others"}
    assert 0 < row["tokens_per_second"] <= 3000, "a step of 1 ms gives 3 tokens"
    assert 1 <= row["tokens_per_chunk"] <= 40


@pytest.mark.parametrize("option, value", [("--streams", "0"), ("--streams", "-3"), ("--tokens", "0"), ("--runs", "0"),
                                           ("--step-ms", "-1"), ("--step-ms", "nan")])
def test_numbers_that_measure_nothing_are_refused(option: str, value: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, option, value], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"argument {option}: " in done.stderr and "Traceback" not in done.stderr


def test_more_streams_than_a_server_takes_by_default() -> None:
    command = [sys.executable, SCRIPT, "--streams", "260", "--tokens", "2", "--runs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["streams"] == 260, done.stderr


def test_no_server_is_left_behind() -> None:
    command = [sys.executable, SCRIPT, "--streams", "1", "--tokens", "1000", "--step-ms", "1000"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(lambda: started.read_text().strip())
    server = Path(f"/proc/{int(started.read_text())}/stat")
    process.terminate()
    assert "ended by SIGTERM" in process.communicate(timeout=100)[1] and process.returncode == 1
    assert not server.exists() or server.read_text().rpartition(")")[2].split()[0] == "Z"
