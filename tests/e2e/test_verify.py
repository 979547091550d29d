"""`relaxpack verify` on a real bundle: right answers pass, in both forms; wrong weights are found by their answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from relaxpack.cli import run
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.integrity import sha256_bytes
from relaxpack.dist.manifest import MANIFEST
from relaxpack.dist.params import ParamsReader
from relaxpack.dist.store import FolderStore, write_single_file


def test_a_fresh_bundle_answers_as_it_did_when_built(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(tiny_bundle)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok  digests of ") and len(lines) > 1
    assert all(line.startswith("ok  ") for line in lines)


def test_the_single_file_runs_too(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = Bundle.open(tiny_bundle).manifest.members
    write_single_file(FolderStore(tiny_bundle), list(members), tmp_path / "tiny.rpk")
    assert run(["verify", str(tmp_path / "tiny.rpk"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["canaries"] and all(canary["max_difference"] == 0 for canary in answer["canaries"])


def test_weights_that_were_changed_and_signed_again_give_other_answers(
        tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Digests cannot find this: the manifest was rewritten. The canaries do."""
    copy = tmp_path / "tiny.bundle"
    shutil.copytree(tiny_bundle, copy)
    bundle = Bundle.open(copy)
    entry = bundle.manifest.targets[0]
    (shard,) = bundle.param_members(entry.params)
    reader = ParamsReader(FolderStore(copy), [shard])
    largest = max(reader.names, key=lambda name: reader[name].nbytes)
    offset = reader._where[largest][3]
    with (copy / shard).open("r+b") as file:
        file.seek(offset)
        size = reader[largest].nbytes
        file.write(np.roll(np.frombuffer(reader[largest].tobytes(), np.uint8), 4096).tobytes())
        assert size > 4096
    manifest = json.loads((copy / MANIFEST).read_bytes())
    manifest["members"][shard]["sha256"] = sha256_bytes((copy / shard).read_bytes())
    (copy / MANIFEST).write_text(json.dumps(manifest))
    assert run(["verify", str(copy), "--no-run"]) == 0
    assert run(["verify", str(copy)]) == 5
    assert "BAD  " in capsys.readouterr().out
