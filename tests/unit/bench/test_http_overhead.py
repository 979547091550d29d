"""The benchmark of what HTTP costs for each token: a run of it, over its own server process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_token_is_read_and_paid_for() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "http_overhead.py", "--streams", "3", "--tokens", "40", "--runs", "1",
               "--step-ms", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)     # exits 1 where one is missing
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)["rows"]
    assert row["streams"] == 3 and row["us_per_token"] > 0 and set(row["us_by_thread"]) == {"http", "others"}
    assert 0 < row["tokens_per_second"] <= 3000, "a step of 1 ms gives 3 tokens"
    assert 1 <= row["tokens_per_chunk"] <= 40
