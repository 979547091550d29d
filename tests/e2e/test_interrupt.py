"""Ctrl-C while a bundle is built: one line, exit code 130, nothing half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.bundles import write_bundle
from tests.helpers.tiny_checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]


def reached(stage: str, build: subprocess.Popen[str], out: Path) -> bool:
    if stage == "compiling":    # TVM is being loaded, or works
        return "libtvm_compiler" in Path(f"/proc/{build.pid}/maps").read_text()
    return bool(list(out.glob("x.bundle.partial-*")))


@pytest.mark.parametrize("stage", ["compiling", "writing"])
def test_ctrl_c_leaves_what_was_there(tmp_path: Path, stage: str) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    out = tmp_path / "out"
    write_bundle(out / "x.bundle")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    build = subprocess.Popen([sys.executable, "-m", "relaxpack", "build", tmp_path / "checkpoint", "-o", out / "x.bundle",
                              "--force"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    deadline = time.monotonic() + 240
    while not reached(stage, build, out):
        assert build.poll() is None and time.monotonic() < deadline, build.communicate()
        time.sleep(0.01)
    build.send_signal(signal.SIGINT)
    _, errors = build.communicate(timeout=240)
    assert build.returncode == 130 and errors.strip().splitlines()[-1] == "relaxpack: interrupted", errors
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
