"""`relaxpack diff` on small bundles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaxpack.cli import run
from relaxpack.cli.diff import _numbers
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


def test_a_target_of_one_side_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = tmp_path / "a.bundle", tmp_path / "b.bundle"
    write_bundle(left)
    write_bundle(right, target=TargetSpec("cpu", "haswell", ("avx2", "fma")))
    assert run(["diff", str(left), str(right)]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("targets.")]
    assert rows == [["targets.cpu:haswell", "absent", "in", "it"], ["targets.cpu:x86-64-v3", "in", "it", "absent"]]
    assert run(["diff", str(left), str(right), "--json"]) == 1
    assert "targets.cpu:haswell.target.features" in json.loads(capsys.readouterr().out)["fields"]


@pytest.mark.parametrize("name, values, shown", [
    ("decode step: bytes", [110_292_324, 1_014_784], ["110 MB", "1.01 MB"]),
    ("decode step: bytes", [1_014_784, 1_014_790], ["1014784", "1014790"]),
    ("prefill of 511 tokens: flops", [114_703_534_080, None], ["114.7 G", "absent"]),
    ("memory: lower bound", [5_505_024, 0], ["5.51 MB", "0 B"]), ("passes", [42, 41], ["42", "41"])])
def test_numbers_can_be_read_and_told_apart(name: str, values: list[int | None], shown: list[str]) -> None:
    assert _numbers(name, values) == shown
