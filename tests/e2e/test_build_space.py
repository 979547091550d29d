"""A disk that cannot take the weights is named before anything is compiled, and nothing is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from relaxpack.compile import build_bundle, one_target
from relaxpack.dist import writer
from relaxpack.errors import EnvironmentProblem
from tests.helpers.tiny_checkpoints import write_checkpoint


def test_full_disk_is_said_before_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model")
    usage = shutil.disk_usage(tmp_path)

    def lower(*args: Any, **options: Any) -> Any:
        raise AssertionError("compiled for a disk that cannot hold the result")

    monkeypatch.setattr(one_target, "lower_model", lower)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(EnvironmentProblem, match=r"no disk space: .* needs \d+ MB more, 1 MB are free"):
        build_bundle(tmp_path / "model", tmp_path / "out.bundle")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
