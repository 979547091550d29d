"""`relaxpack inspect` and `relaxpack verify`, run in-process on small bundles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import relaxpack.runtime
from relaxpack.cli import run
from relaxpack.runtime.step_plan import StepPlan
from relaxpack.target import TargetSpec
from tests.helpers.bundles import LIBRARY, SHARD, write_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "x.bundle")
    return tmp_path / "x.bundle"


def test_inspect_shows_everything(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(bundle), "--members"]) == 0
    text = capsys.readouterr().out
    for part in ("tiny (llama), 2 layers", "cpu:x86-64-v3", "yes, it would run", "q4_1", "5 rule", "4.1 kB",
                 "1 keys used, 1 ignored", "use_cache", "always on", "lm_head.weight is tied",
                 "apache-tvm 0.27.0.post1", LIBRARY, "weights", "as-is"):
        assert part in text, part


def test_inspect_fits_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest table has three columns, and what nobody chose is called default."""
    write_bundle(tmp_path / "x.bundle")
    manifest = json.loads((tmp_path / "x.bundle" / "manifest.json").read_text())
    manifest["source"] = {"name": "m.gguf", "kind": "gguf", "bytes": 98362432, "files": ["m.gguf"]}
    manifest["build_options"] = {"weights": "as-is", "max_context": None, "disabled_passes": []}
    (tmp_path / "x.bundle" / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr("relaxpack.cli.inspect.console", lambda: Console(width=80))
    assert run(["inspect", str(tmp_path / "x.bundle")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("source m.gguf (gguf), 98.4 MB in one file", "max_context default", "disabled_passes none",
                 "config.json value", "ignored: always on"):
        assert any(line in shown for shown in lines), (line, lines)


def test_inspect_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(bundle), "--json"]) == 0
    what = json.loads(capsys.readouterr().out)
    assert what["chosen"] == "cpu:x86-64-v3" and what["targets"][0]["reasons"] == []
    on_disk = sum(p.stat().st_size for p in bundle.rglob("*") if p.is_file())
    assert what["bytes"] == sum(what["sizes"].values()) == on_disk
    assert what["manifest"]["model_info"]["name"] == "tiny"
    assert [entry["key"] for entry in what["audit"]["entries"]] == ["hidden_size", "use_cache"]


def test_inspect_names_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "x.rpk", target=TargetSpec("cpu", "future", ("avx2", "avx2048")))
    assert run(["inspect", str(tmp_path / "x.rpk")]) == 0
    assert "this CPU lacks avx2048" in capsys.readouterr().out


def test_inspect_does_not_let_a_bundle_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "x.bundle", target=TargetSpec("cpu", "a\x1b[2Jb[red]", ("evil\x1b]0;x\x07",)))
    assert run(["inspect", str(tmp_path / "x.bundle")]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text and "[red]" in text


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_not_a_bundle_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run([command, str(tmp_path / "none")]) == 5
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "does not exist" in captured.err


class FakeRunner:
    """Answers as the canary of tests.helpers.bundles expects, moved by `offset`."""

    page_size, num_pages, max_batch, prefill_chunk, max_context, vocab_size = 16, 8, 1, 64, 128, 100
    offset = 0.0

    def forward(self, plan: StepPlan) -> np.ndarray:
        logits = np.zeros((1, 100), np.float32)
        logits[0, [3, 4]] = 2.5 + self.offset, 1.0
        return logits


@pytest.fixture
def fake_runner(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    """Stands in for runtime/load.py, which would load TVM and a real library."""
    import sys
    import types

    module = types.ModuleType("relaxpack.runtime.load")
    module.load_runner = lambda bundle, kind=None, progress=None: FakeRunner()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "relaxpack.runtime.load", module)
    monkeypatch.setattr(relaxpack.runtime, "load", module, raising=False)
    monkeypatch.setattr(FakeRunner, "offset", 0.0)
    return FakeRunner


def test_verify_runs_the_canaries(bundle: Path, fake_runner: type[FakeRunner],
                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(bundle)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "ok  digests of 4 members"
    assert second.startswith("ok  hello: logits within 0") and "all 2 greedy tokens equal" in second


def test_verify_fails_where_the_model_answers_otherwise(bundle: Path, fake_runner: type[FakeRunner],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    fake_runner.offset = 0.1
    assert run(["verify", str(bundle)]) == 5
    assert "BAD  hello: the logit of token 3 is 2.6000, it was 2.5000" in capsys.readouterr().out
    assert run(["verify", str(bundle), "--json"]) == 5
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and answer["canaries"][0]["max_difference"] == pytest.approx(0.1, rel=1e-3)


def test_verify_names_the_damaged_member(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((bundle / SHARD).read_bytes())
    data[-1] ^= 1
    (bundle / SHARD).write_bytes(data)
    assert run(["verify", str(bundle), "--no-run"]) == 5
    assert f"{SHARD} is damaged" in capsys.readouterr().err


def test_verify_where_it_does_not_run_names_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "gpu.bundle", target=TargetSpec("cuda", "sm_80", ()))
    assert run(["verify", str(tmp_path / "gpu.bundle"), "--device", "cuda"]) != 0
    assert "Its digests alone are checked with --no-run" in capsys.readouterr().err
    assert run(["verify", str(tmp_path / "gpu.bundle"), "--no-run"]) == 0


def test_verify_without_running(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(bundle), "--no-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(bundle), "ok": True, "members": 4, "canaries": []}
    shutil.rmtree(bundle)


def held_to(bundle: Path, **canary: object) -> None:
    """Say in the manifest whose answers the target is held to."""
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    manifest["targets"][0]["canary"] = canary
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_verify_of_a_target_that_could_not_run_where_it_was_built(bundle: Path, fake_runner: type[FakeRunner],
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    held_to(bundle, recorded_by="cpu:other", tolerance=0.25)
    fake_runner.offset = 0.2        # beyond what the answering target itself would be allowed
    assert run(["verify", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "note  cpu:x86-64-v3 could not run where it was built: its answers are held against those of cpu:other" in out
    assert "ok  hello: logits within 0.2 (tolerance 0.25)" in out
    fake_runner.offset = 0.3
    assert run(["verify", str(bundle), "--json"]) == 5
    answer = json.loads(capsys.readouterr().out)
    assert (answer["target"], answer["recorded_by"]) == ("cpu:x86-64-v3", "cpu:other")
    assert run(["inspect", str(bundle)]) == 0
    assert "by cpu:other: it could not run where it was built" in " ".join(capsys.readouterr().out.split())


def test_verify_says_why_there_are_no_canaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "x.bundle")
    held_to(tmp_path / "x.bundle", reason="a CPU reference of 16.0 GB is not made")
    manifest = json.loads((tmp_path / "x.bundle" / "manifest.json").read_bytes())
    del manifest["members"]["canary.json"]
    (tmp_path / "x.bundle" / "manifest.json").write_text(json.dumps(manifest))
    assert run(["verify", str(tmp_path / "x.bundle")]) == 5
    assert "has no canary.json: a CPU reference of 16.0 GB is not made, so" in capsys.readouterr().err


@pytest.mark.parametrize("canary", [{"tolerance": 1}, {"recorded_by": 3}, {"recorded_by": "x", "tolerance": "much"}])
def test_a_canary_entry_that_says_nothing(bundle: Path, canary: dict[str, object],
                                          capsys: pytest.CaptureFixture[str]) -> None:
    held_to(bundle, **canary)
    assert run(["verify", str(bundle)]) == 5
    assert "manifest.json is damaged: a target's canary" in capsys.readouterr().err
