"""The prepared visit to a GPU, run dry: its measurements over stand-ins and a tiny model, and the script that runs them,
with sections that answer, fail, take too long, or have no time left.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from relaxpack.llm import LLM
from relaxpack.recipe import FromCheckpoint, to_json
from relaxpack.relax_models.export import BuildLimits
from tests.helpers import captured_model
from tests.helpers.captured_model import CapturedModel

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
LIMITS = BuildLimits(64, max_batch=4, prefill_chunk=16, page_size=4)
BUCKETS = {"decode": (1, 2, 4), "prefill": (4, 8)}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))


@pytest.fixture
def visit() -> Iterator[ModuleType]:
    import visit

    yield visit
    sys.modules.pop("visit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CapturedModel:
    return captured_model.build(tmp_path_factory.mktemp("visit"), LIMITS, BUCKETS)


@pytest.fixture(scope="module")
def bundle(model: CapturedModel) -> Path:
    path = model.path.parent / "large.bundle"
    captured_model.write_bundle(model, path)
    return path


def test_measurements(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import visit_sections as sections

    captured_model.as_gpu(monkeypatch)
    rates = sections.upload_rates(bundle)
    assert rates["bytes"] > 0 and len(rates["gigabytes_per_second"]) == 4
    assert all(rate > 0 for rate in rates["gigabytes_per_second"].values())
    captured_model.as_gpu(monkeypatch)
    loading = sections.loading(bundle)
    assert loading["capture"]["graphs"] == 5 and loading["load"]["target"] == "cuda:sm_90a"
    assert loading["after_capture"]["planned"] == loading["load"]["memory_plan"]["at_start"]
    captured_model.as_gpu(monkeypatch)
    tables = sections.tables(bundle, context=16, batches=(1, 3, 4, 8), prefills=(4, 16, 99), new=4)
    assert [row["batch"] for row in tables["decode"]] == [1, 3, 4], "8 is more than the bundle has"
    assert [row["tokens"] for row in tables["prefill"]] == [4, 16]
    for row in tables["decode"]:
        assert row["graph_ms"] > 0 and row["eager_ms"] > 0 and row["engine_tokens_per_second"] > 0
    assert json.dumps([rates, loading, tables])


def test_steps_by_what_is_asked_of_their_sampling(visit: ModuleType, model: CapturedModel,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    import sampling_steps

    captured_model.host_memory(monkeypatch)
    runner, _ = captured_model.runner(model, num_pages=80)
    found = sampling_steps.measure(runner, (1, 2, 99), steps=32)
    assert found["device"].keys() == sampling_steps.SETTINGS.keys() and set(found["host"]) == set(sampling_steps.ON_HOST)
    assert all(ms > 0 for where in ("device", "host") for times in found[where].values() for ms in times.values())
    stopped = sampling_steps.measure(runner, (1,), steps=32, done=lambda result: False)
    assert len(stopped["device"]) == 1 and not stopped["host"]


def test_a_bundle_of_a_seed_loads_and_answers(model: CapturedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From what `build_models.py` leaves: a library and a description."""
    import random_bundle

    (tmp_path / "m.so").write_bytes(model.path.read_bytes())
    (tmp_path / "m.json").write_text(json.dumps({
        "info": model.info.to_json(), "target": {"kind": "cuda", "arch": "sm_90a", "features": []},
        "memory": {"arena_bytes": 4096}, "buckets": BUCKETS, "explain": {"steps": {}},
        "parameters": [{"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype),
                        "recipe": to_json(FromCheckpoint(name))}
                       for name, tensor in zip(model.names, model.parameters, strict=True)]}))
    written = random_bundle.write(tmp_path / "m", tmp_path / "large.bundle")
    assert written.targets[0].memory_plan["weight_bytes"] == sum(t.numpy().nbytes for t in model.parameters)
    captured_model.as_gpu(monkeypatch)
    llm = LLM(tmp_path / "large.bundle", num_pages=40)
    assert len(llm.generate([5, 6], max_tokens=3, temperature=0.0, ignore_eos=True).token_ids) == 3
    weights = random_bundle.Weights()
    assert np.array_equal(weights.make("a", [3, 5], "bfloat16"), random_bundle.Weights().make("a", [3, 5], "bfloat16"))
    assert weights.make("x@q4_1.codes", [64], "uint32").dtype == np.uint32
    assert abs(float(weights.make("model.norm.weight", [4096], "float32").mean()) - 1) < 0.05


def test_the_visit_keeps_what_it_has(visit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def section(name: str, code: str, limit: float = 60) -> Any:
        return visit.Section(name, f"what of {name}", limit, lambda folder, out: [sys.executable, "-c", code, str(out)])

    sections = (section("prints", "print('{\"a\": 1}')"),
                section("writes", "import sys; open(sys.argv[1], 'w').write('[2]')"),
                section("fails", "import sys; print('said'); sys.exit('why')"),
                section("hangs", "import time; time.sleep(600)", limit=2),
                replace(section("skips", "print('29 skipped')"), must_say=" passed"))
    out = tmp_path / "visit.json"
    results = visit.run(tmp_path, out, 5.0, None, sections)["sections"]
    assert json.loads(out.read_text())["sections"] == results
    assert results["prints"]["result"] == {"a": 1} and results["writes"]["result"] == [2]
    assert results["prints"]["ok"] and results["prints"]["question"] == "what of prints"
    assert not results["fails"]["ok"] and "why" in results["fails"]["error"] and "said" in results["fails"]["output"]
    assert not results["hangs"]["ok"] and results["hangs"]["code"] == 124
    assert not results["skips"]["ok"] and results["skips"]["code"] == 0 and "29 skipped" in results["skips"]["output"]
    assert "BAD hangs" in capsys.readouterr().out
    late = visit.run(tmp_path, out, 0.01, {"prints"}, sections)["sections"]
    assert list(late) == ["prints"] and late["prints"]["error"] == "no time was left"


def test_every_section_is_something_that_can_be_run(visit: ModuleType, tmp_path: Path) -> None:
    import visit_sections

    names = [section.name for section in visit.SECTIONS]
    assert len(set(names)) == len(names) and sum(s.limit for s in visit.SECTIONS) < 15 * 60
    for section in visit.SECTIONS:
        _, *arguments = section.command(tmp_path, tmp_path / "out.json")
        if arguments[0] == "-c":
            function = arguments[1].rpartition("json.dump(s.")[2].partition("(")[0]
            assert callable(getattr(visit_sections, function)), section.name
            compile(arguments[1], section.name, "exec")
        elif arguments[0] == "-m":
            assert arguments[1] in ("pytest", "relaxpack")
        elif arguments[0] == "--tool":
            assert arguments[1] in ("memcheck", "racecheck") and arguments[3:5] == ["-m", "relaxpack"]
        else:
            assert Path(arguments[0]).is_file(), section.name
    done = subprocess.run([sys.executable, str(GPU / "visit.py"), "run", str(tmp_path), "--out", str(tmp_path / "x.json"),
                           "--only", "nothing"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no section nothing" in done.stderr


def test_the_doctor_section_answers_anywhere(visit: ModuleType, tmp_path: Path) -> None:
    (section,) = (s for s in visit.SECTIONS if s.name == "environment")
    results = visit.run(tmp_path, tmp_path / "visit.json", 5.0, None, (replace(section, limit=240),))
    assert "instruction sets" in json.dumps(results["sections"]["environment"]["result"])


def test_the_peer_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    out = tmp_path / "peer.json"
    monkeypatch.setattr(sys, "argv", ["peer", "--model", "tiny", "--batches", "1,2", "--prompt", "8", "--new", "4",
                                      "--device", "cpu", "--out", str(out)])
    runpy.run_path(str(GPU / "peer_transformers.py"), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 2] and all(row["first_token_ms"] > 0 for row in rows)
