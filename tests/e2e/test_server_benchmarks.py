"""Benchmarks of our server on the CPU: what they start ends with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script, options", [
    ("serve.py", ["--busy", "--runs", "100000"]), ("soak.py", ["--minutes", "30"]),
    ("serve_peers.py", ["--busy", "--rounds", "100000", "--llama-server", "/bin/sleep"])])
def test_no_server_is_left_behind(tiny_bundle: Path, tmp_path: Path, script: str, options: list[str]) -> None:
    command = [sys.executable, ROOT / "benchmarks" / script, "--bundle", tiny_bundle, *options]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    eventually(lambda: children.read_text().strip())
    server = Path(f"/proc/{int(children.read_text().split()[0])}")
    eventually(lambda: len(list((server / "task").iterdir())) > 1)      # it loads, so whoever started it has its number
    process.terminate()
    assert "ended by SIGTERM" in process.communicate(timeout=100)[1] and process.returncode == 1
    assert not server.exists() or (server / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
