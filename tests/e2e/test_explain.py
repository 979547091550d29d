"""`relaxpack explain` on a real bundle: text, JSON, measured kernels, and the page in a browser, light and dark."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from relaxpack.cli import run
from relaxpack.explain.digest import by_kernel
from relaxpack.explain.page import page
from relaxpack.explain.pass_notes import NOTES
from tests.helpers.browser import chromium


@pytest.fixture(scope="module")
def document(tiny_bundle: Path) -> dict[str, Any]:
    from relaxpack.dist.bundle import Bundle
    from relaxpack.explain.document import explanation
    from relaxpack.step_costs import Machine

    with Bundle.open(tiny_bundle) as bundle:
        return explanation(bundle, context=100, machine=Machine("a machine", 1e10, 1e11, "given"))


def test_the_step_adds_up(document: dict[str, Any]) -> None:
    """Two layers of a 64-wide Llama with 4 heads, 2 of them with keys, head size 16, vocabulary 512, float32."""
    step = document["step"]
    assert [k["operation"] for k in step["kernels"]] == [
        "embedding", "rms_norm", *["linear", "rope_append", "attention", "linear", "add_rms_norm", "linear", "linear",
                                   "add_rms_norm"] * 2, "linear"]
    weights = 4 * (2 * ((64 + 64) * 64 + 64 * 64 + 3 * 128 * 64) + 512 * 64)
    matmuls = [k for k in step["kernels"] if k["operation"] == "linear"]
    assert sum(k["flops"] for k in matmuls) == 2 * weights // 4
    assert weights < sum(k["bytes"] for k in matmuls) < 1.03 * weights
    attention = [k for k in step["kernels"] if k["operation"] == "attention"]
    assert {k["bytes"] for k in attention} == {100 * 2 * 2 * 16 * 2 + 2 * 64 * 4}      # float16 keys and values, q, y
    assert {k["flops"] for k in attention} == {100 * 4 * 64}
    assert step["bytes"] == sum(k["bytes"] for k in step["kernels"])
    assert step["bytes_over_floor"] < 1.05                                   # tiny activations are not that tiny
    assert step["seconds"] == pytest.approx(sum(max(k["bytes"] / 1e10, k["flops"] / 1e11) for k in step["kernels"]))
    assert sum(k["calls"] for k in by_kernel(step["kernels"])) == step["launches"] == len(step["kernels"])
    assert step["chain"] == step["launches"]
    assert document["memory"]["arena_bytes"] <= 1.05 * document["memory"]["live_bytes"]


def test_as_json_and_text(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(tiny_bundle), "--json", "--bandwidth", "20", "--peak", "0.1"]) == 0
    what = json.loads(capsys.readouterr().out)
    assert what["machine"]["bandwidth"] == 20e9 and what["machine"]["peak"] == 0.1e12
    assert what["context"] == 127                                            # cut to what the bundle allows
    assert run(["explain", str(tiny_bundle), "--bandwidth", "20"]) == 0
    text = capsys.readouterr().out
    for part in ("One decode step: batch 1, context 127", "rule:cpu.linear", "CombineParallelMatmul", "PlanMemory",
                 "of the lower bound", "19 kernels"):
        assert part in text, part


@pytest.mark.parametrize(("options", "shown", "said"), [
    ([], 127, ""), (["--context", "127"], 127, ""), (["--context", "1"], 1, ""),
    (["--context", "128"], 127, "note: --context 128: {} takes 128 tokens, so this is a step after 127\n"),
    (["--context", "1000000"], 127, "note: --context 1000000: {} takes 128 tokens, so this is a step after 127\n")])
def test_a_context_beyond_the_bundle_is_said(tiny_bundle: Path, capsys: pytest.CaptureFixture[str], options: list[str],
                                             shown: int, said: str) -> None:
    assert run(["explain", str(tiny_bundle), "--json", "--bandwidth", "20", "--peak", "1", *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["context"] == shown and err == said.format(tiny_bundle)


def test_a_bundle_that_only_embeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.helpers.tiny_checkpoints import write_checkpoint

    model, bundle, html = write_checkpoint(tmp_path / "checkpoint"), tmp_path / "x.bundle", tmp_path / "x.html"
    assert run(["build", str(model), "-o", str(bundle), "--max-context", "128", "--embeddings-only"]) == 0
    capsys.readouterr()
    assert run(["explain", str(bundle), "--bandwidth", "20", "--peak", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "One embed step: 127 tokens" in said and "20 kernels" in said
    assert re.search(r"phase +pass +embed +PrimFuncs", said) and re.search(r"graph +CombineParallelMatmul +[1-9]", said)
    assert run(["explain", str(bundle), "--html", str(html), "--bandwidth", "20", "--peak", "0.1"]) == 0
    text = html.read_text()
    assert "kernels to embed 127 tokens" in text and "One embed step" in text and "decode step" not in text


def test_measured(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    assert run(["explain", str(tiny_bundle), "--measure", "--json", "--bandwidth", "20"]) == 0
    whole = time.perf_counter() - started
    step = json.loads(capsys.readouterr().out)["step"]
    assert all(k["measured_seconds"] > 0 for k in step["kernels"]) and step["measured_seconds"] < whole
    assert step["measured_seconds"] == pytest.approx(sum(k["measured_seconds"] for k in step["kernels"]))
    assert run(["explain", str(tiny_bundle), "--measure", "--bandwidth", "0.001"]) == 0
    assert "Faster than the roofline" in capsys.readouterr().out
    assert run(["explain", str(tiny_bundle), "--measure", "--bandwidth", "1000", "--peak", "1000"]) == 0
    assert "Faster than the roofline" not in capsys.readouterr().out
    assert run(["explain", str(tiny_bundle), "--measure", "--batch", "2"]) == 2


def test_measured_as_on_a_gpu(tiny_bundle: Path, document: dict[str, Any]) -> None:
    """Kernel by kernel with flushed caches, by the device's clock; here on the CPU, whose clock is that of its timer."""
    from relaxpack.runtime.kernel_times import decode_kernel_times

    order = [k["kernel"] for k in document["step"]["kernels"]]
    times = decode_kernel_times(tiny_bundle, set(order), 100, alone=True, flush_bytes=1 << 16)
    assert [name for name, _ in times] == order
    assert all(seconds > 0 for _, seconds in times)
    assert len(set(times)) == len(set(order))                                # a kernel is timed once


def test_the_page_needs_nothing_from_outside(document: dict[str, Any]) -> None:
    text = page(document)
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=", text)
    for part in ("One decode step", "One prefill of", "What each pass changed", "Memory plan", "Functions, graphs",
                 "Config audit", "most alive at once"):
        assert part in text, part


def test_text_of_a_bundle_stays_text(document: dict[str, Any]) -> None:
    hostile = json.loads(json.dumps(document))
    hostile["model"]["name"] = "<script>alert(1)</script>"
    hostile["step"]["kernels"][0]["kernel"] = '"><img src=x onerror=alert(1)>\x1b[31m'
    hostile["audit"]["entries"][0]["value"] = "<b>&"
    text = page(hostile)
    assert "<script" not in text and "<img" not in text and "\x1b" not in text and "&lt;b&gt;&amp;" in text


def test_the_ir_of_each_pass(document: dict[str, Any], tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_name = {p["name"]: p.get("ir", {}) for p in document["passes"]}
    assert set(by_name["FuseAddNorm"]) == {"decode", "prefill"} and not by_name["VerifyPhase"]
    hunks = by_name["FuseAddNorm"]["decode"]["hunks"]
    assert any(h["count"] == 2 and any(line.startswith("- ") and "R.add(" in line for line in h["lines"])
               and any(line.startswith("+ ") and "relaxpack.add_rms_norm" in line for line in h["lines"]) for h in hunks)
    text = page(document)
    assert "FuseAddNorm <span" in text and "<code class=add>+ " in text and "2 times like this" in text
    assert run(["explain", str(tiny_bundle), "--pass", "FuseAddNorm"]) == 0
    shown = capsys.readouterr().out
    assert "residual sum and norm become one kernel" in shown and "@@ 2 times @@" in shown
    assert run(["explain", str(tiny_bundle), "--pass", "FuseAddNorm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["ir"] == by_name["FuseAddNorm"]
    assert run(["explain", str(tiny_bundle), "--pass", "FuseEverything"]) == 2
    assert "these changed the IR: " in capsys.readouterr().err


def test_every_pass_that_runs_says_what_it_is_for(document: dict[str, Any]) -> None:
    assert {p["name"] for p in document["passes"]} <= set(NOTES)


def test_more_sequences_than_the_bundle_takes(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(tiny_bundle), "--batch", "9999"]) == 2
    assert "--max-batch 9999" in capsys.readouterr().err


def test_a_place_that_cannot_be_written(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(tiny_bundle), "--html", str(tmp_path / "no" / "x.html"), "--bandwidth", "20"]) == 2
    assert "choose another --html file" in capsys.readouterr().err


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser(document: dict[str, Any], tmp_path: Path, dark: bool) -> None:
    (tmp_path / "x.html").write_text(page(document), encoding="utf-8")
    with chromium(dark=dark) as browser:
        browser.get(f"file://{tmp_path}/x.html")
        assert [entry for entry in browser.get_log("browser") if not entry["message"].startswith("chrome://")] == []
        wide, window = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window
        color = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", color)[:3])) < 120) == dark
        heights = browser.execute_script("return [...document.querySelectorAll('svg')].map(s => s.clientHeight)")
        assert len(heights) >= 4 and min(heights) > 20
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        wide, window, folds = browser.execute_script(
            "return [document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('details.pass').length]")
        assert wide <= window and folds == sum(bool(p.get("ir")) for p in document["passes"])
        added, plain = browser.execute_script("""return ['.diff .add', '.diff'].map(
            s => getComputedStyle(document.querySelector(s)).backgroundColor)""")
        assert added != plain
        rows = browser.execute_script("return document.querySelectorAll('details')[0].querySelectorAll('tbody tr').length")
        assert rows == document["step"]["launches"]


def test_diff_of_two_levels(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from relaxpack.compile import BuildOptions, build_bundle
    from tests.helpers.tiny_checkpoints import write_checkpoint

    write_checkpoint(tmp_path / "checkpoint")
    build_bundle(tmp_path / "checkpoint", tmp_path / "o0.bundle",
                 options=BuildOptions(max_context=128, max_batch=4, prefill_chunk=32, level=0))
    assert run(["verify", str(tmp_path / "o0.bundle")]) == 0
    capsys.readouterr()
    assert run(["diff", str(tiny_bundle), str(tmp_path / "o0.bundle"), "--json"]) == 1
    step = json.loads(capsys.readouterr().out)["step"]
    best, plain = step["facts"]["decode step: launches"]
    assert best == 19 and plain > 30
    assert step["facts"]["memory: intermediates"][1] == 0            # allocated as needed
    assert "CombineParallelMatmul" in step["facts"]["passes left out"][1] and step["facts"]["passes left out"][0] == "none"
    assert any("swiglu" in name and calls == [2, 0] for name, calls in step["kernels"].items())
    assert run(["diff", str(tiny_bundle), str(tmp_path / "o0.bundle")]) == 1
    text = capsys.readouterr().out
    assert "Kernels of a decode step that differ" in text and "prefill of 32 tokens: flops" in text


def test_a_record_without_steps_is_shown_too(document: dict[str, Any]) -> None:
    """As earlier versions wrote it."""
    old = json.loads(json.dumps(document))
    old["step"] |= {"kernels": [], "launches": 0, "bytes": 0, "flops": 0, "seconds": 0.0, "bytes_over_floor": None}
    old["prefill"]["kernels"], old["passes"] = [], []
    for plan in old["memory_plan"].values():
        del plan["live_bytes"], plan["captured"], plan["result_bytes"]
    assert "Memory plan" in page(old)


@pytest.mark.parametrize("record", [[1], {}, {"kernels": None}, {"kernels": [{"name": "linear"}]}])
def test_a_record_of_another_form_is_one_line(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              record: Any) -> None:
    """That of an older relaxpack, whose bundles still run."""
    folder = tmp_path / "older.bundle"
    shutil.copytree(tiny_bundle, folder)
    text = json.dumps(record).encode()
    (folder / "explain.json").write_bytes(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["members"]["explain.json"].update(bytes=len(text), sha256=hashlib.sha256(text).hexdigest())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for command in (["explain", str(folder)], ["diff", str(folder), str(tiny_bundle)]):
        assert run(command) == 5
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and f"{folder}: explain.json is not a record" in message


def test_diff_of_two_sets_of_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.helpers.tiny_checkpoints import write_checkpoint

    model = str(write_checkpoint(tmp_path / "checkpoint"))
    assert run(["diff", model, "--left", "-O0 --max-context 128", "--right", "--max-context 128", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["options"] == {"level": [0, 3]}
    assert found["facts"]["decode step: launches"][1] == 19
    assert any("swiglu" in name and calls == [0, 2] for name, calls in found["kernels"].items())
    assert run(["diff", model, "--left", "--max-context 128 -O3", "--right", "--max-context 128"]) == 0
    assert capsys.readouterr().out == "equal\n"


@pytest.mark.parametrize("arguments, message", [
    (["x"], "nothing to compare with"),
    (["x", "y", "--left", "-O0"], "'y' beside --left and --right"),
    (["x", "--left", "--no-such-option"], "options '--no-such-option': No such option"),
    (["x", "--left", "--weights 'q4"], "No closing quotation"),
    (["x", "--right", "-O9"], "options '-O9'"),
    (["x", "--left", "-O0 --target cuda:sm_90a"], "--target is not compared: both sides are built for diff's own --target"),
    (["x", "--right", "--db a.sqlite"], "--db is not compared"),
    (["x", "--right", "--force"], "--force is not compared"),
    (["x", "--left", "-o y"], "-o is not compared: nothing is written"),
])
def test_diff_says_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_functions_stand_by_name_and_bucket() -> None:
    from relaxpack.explain.document import _by_bucket

    names = ["decode_spread_8", "prefill_128", "decode_16", "decode", "prefill", "decode_spread_1", "decode_2"]
    assert sorted(names, key=_by_bucket) == ["decode", "decode_2", "decode_16", "decode_spread_1", "decode_spread_8",
                                             "prefill", "prefill_128"]
