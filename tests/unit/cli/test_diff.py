"""`relaxpack diff` on small bundles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaxpack.cli import run
from relaxpack.target import TargetSpec
from tests.helpers.bundles import LIBRARY, write_bundle


def test_equal_bundles_in_two_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "a.bundle")
    write_bundle(tmp_path / "b.rpk")
    assert run(["diff", str(tmp_path / "a.bundle"), str(tmp_path / "b.rpk")]) == 0
    assert capsys.readouterr().out == "equal\n"


def test_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = tmp_path / "a.bundle", tmp_path / "b.bundle"
    write_bundle(left)
    write_bundle(right, target=TargetSpec("cpu", "x86-64-v3", ("avx2", "fma", "f16c")))
    manifest = json.loads((right / "manifest.json").read_bytes())
    (right / LIBRARY).write_bytes(b"other")
    manifest["members"][LIBRARY] = {"bytes": 5, "sha256": "1" * 64}
    del manifest["members"]["audit.json"]
    manifest["build_options"] = {"weights": "q4", "page_size": 8}
    (right / "manifest.json").write_text(json.dumps(manifest))
    assert run(["diff", str(left), str(right), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fields"] == {
        "build_options.page_size": [None, 8], "build_options.weights": ["as-is", "q4"],
        "targets.cpu:x86-64-v3.target.features": [["avx2", "fma"], ["avx2", "fma", "f16c"]]}
    assert found["members"] == {"audit.json": [found["members"]["audit.json"][0], None], LIBRARY: [271, 5]}
    assert run(["diff", str(left), str(right)]) == 1
    text = capsys.readouterr().out
    assert "build_options.page_size" in text and "absent" in text and LIBRARY in text and "5 B" in text
