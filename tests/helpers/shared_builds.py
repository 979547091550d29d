"""What is too dear to be made by every test process: the workers of pytest-xdist are sessions of their own, and each would
make what a session-scoped fixture makes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The file or folder `name`, made by `build(path)` in the process that asks first; the others wait for it. Nobody may
    change it. After a failure, whoever asks next tries again."""
    own = factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "built"
    shared.mkdir(exist_ok=True)
    made = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            beside = factory.mktemp("unfinished") / name
            build(beside)
            beside.rename(made)
    return made
