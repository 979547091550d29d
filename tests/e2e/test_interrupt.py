"""Ctrl-C, SIGTERM and SIGHUP while a bundle is built: one line, 128 and the signal's number, nothing half-written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.bundles import write_bundle
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.waiting import eventually

ROOT = Path(__file__).parents[2]
COMMAND = "import sys, relaxpack.cli; sys.exit(relaxpack.cli.run())"
# Stays where it is once three tensors are written.
WRITING = """
import time
from relaxpack.dist.params import ParamsWriter
add = ParamsWriter.add
def add_and_stay(self, name, buffers):
    add(self, name, buffers)
    if len(self.names) == 3:
        time.sleep(3600)
ParamsWriter.add = add_and_stay
"""


def loading_or_compiling(build: subprocess.Popen[str], out: Path) -> bool:
    """TVM is being loaded, or works."""
    return "libtvm_compiler" in Path(f"/proc/{build.pid}/maps").read_text()


def compiling(build: subprocess.Popen[str], out: Path) -> bool:
    return bool(list(out.glob("x.bundle.partial-*/bundle")))


def writing(build: subprocess.Popen[str], out: Path) -> bool:
    return bool(list(out.glob("x.bundle.partial-*/bundle/params/*/*")))


@pytest.mark.parametrize(("number", "reached", "before"), [
    (signal.SIGINT, loading_or_compiling, ""), (signal.SIGINT, compiling, ""), (signal.SIGINT, writing, WRITING),
    (signal.SIGTERM, compiling, ""), (signal.SIGTERM, writing, WRITING), (signal.SIGHUP, writing, WRITING)])
def test_a_signal_leaves_what_was_there(tmp_path: Path, number: signal.Signals, reached: Callable[..., bool],
                                        before: str) -> None:
    write_checkpoint(tmp_path / "checkpoint", num_hidden_layers=16)     # seconds, so that nobody comes too late
    out = tmp_path / "out"
    write_bundle(out / "x.bundle")
    found = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    build = subprocess.Popen([sys.executable, "-c", before + COMMAND, "build", tmp_path / "checkpoint", "-o",
                              out / "x.bundle", "--force"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    eventually(lambda: build.poll() is not None or reached(build, out), "the stage", 300)
    build.send_signal(number)
    _, errors = build.communicate(timeout=300)
    said = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert build.returncode == 128 + number and errors.strip().splitlines()[-1] == f"relaxpack: {said}", errors
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == found
