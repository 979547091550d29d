"""The benchmark of whole servers, run dry: a tiny bundle on the CPU as ours, and as the peer the same server, one that says
why it cannot start, or one that never answers.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relaxpack.dist.bundle import Bundle
from tests.helpers.waiting import eventually

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "serve_peers.py"
FEW = ["--streams", "1,3", "--waves", "2", "--prompt-tokens", "20", "--output-tokens", "10", "--rate", "0"]


@pytest.fixture
def folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    """What `build_models.py` leaves, and the bundle that would be made of it."""
    with Bundle.open(tiny_bundle) as opened:
        info = opened.manifest.model_info.to_json()
    (tmp_path / "tiny-bf16.json").write_text(json.dumps(
        {"info": info, "intermediate_size": 48, "rope_theta": 10000.0, "tie_embeddings": True}))
    (tmp_path / "tiny-bf16.bundle").symlink_to(tiny_bundle)
    return tmp_path


def command_of(folder: Path, *options: str | Path) -> list[str | Path]:
    return [sys.executable, SCRIPT, folder, "--model", "tiny", "--out", folder / "out.json", *FEW, *options]


def hears_sighup() -> None:
    """In the process under test, also where nohup keeps it from ours."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run(folder: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command_of(folder, *options), cwd=ROOT, capture_output=True, text=True, timeout=300)


def saved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_both_servers_get_the_same_requests_in_two_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(folder, "--only", "ours")
    assert done.returncode == 0, done.stdout + done.stderr
    ours = saved(folder)["systems"]["relaxpack"]
    served = f"{sys.executable} -m relaxpack serve {folder}/tiny-bf16.bundle --model-name theirs --port {{port}}"
    done = run(folder, "--peer", "vllm", "--only", "peer", "--peer-command", served)
    assert done.returncode == 0, done.stdout + done.stderr
    systems = saved(folder)["systems"]
    assert systems["relaxpack"] == ours, "the second call adds to the first"
    for system in systems.values():
        assert system["error"] is None and system["start_seconds"] > 0 and list(system["cases"]) == ["1", "3"]
        for streams, case in system["cases"].items():
            requests = 2 * int(streams)
            assert case["requests"] == requests and case["failed"] == 0 and not case["cached_tokens"]
            assert case["output_tokens"] == 10 * requests and case["prompt_tokens"] == 20 * requests
            assert case["output_tokens_per_second"] == pytest.approx(case["output_tokens"] / case["seconds"])
            assert case["server_cores"] > 0 and case["time_to_first_token"]["p99"] >= case["time_to_first_token"]["p50"] > 0
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import report

    (folder / "out.json").rename(folder / "gpu_serve_tiny_2026-01-01.json")
    monkeypatch.setattr(report, "RESULTS", folder)
    rows = [line.split(" | ") for line in report.gpu_serving("tiny") if line.startswith("| ")][1:]
    assert [(row[0], row[1]) for row in rows] == [(f"| {n}", system) for n in ("1", "3") for system in systems]
    rates = [systems[system]["cases"]["3"]["output_tokens_per_second"] for system in ("relaxpack", "vllm")]
    assert rows[3][2] == f"{rates[1]:.0f}" and rows[3][3] == f"{rates[0] / rates[1]:.2f}x"
    assert report.gpu_serving("other") == []


@pytest.mark.parametrize("options, says", [
    (["--streams", "1,0"], "--streams"), (["--streams", "many"], "--streams"),
    (["--out", "{here}/no/out.json"], "there is no folder {here}/no"), (["--out", "{here}"], "cannot be read"),
    (["--out", "{here}/broken.json"], "broken.json cannot be read"), (["--model", "none"], "none-bf16.json is not there"),
    (["--bundle", "{here}/none.bundle"], "tiny-bf16.so is not there"),
    (["--peer", "vllm", "--only", "peer", "--peer-command", "serve {no}"], "--peer-command makes no command"),
    (["--peer", "vllm", "--only", "peer", "--peer-command", "serve 'here"], "--peer-command makes no command")])
def test_what_cannot_be_measured_is_one_clear_error(folder: Path, options: list[str], says: str) -> None:
    (folder / "broken.json").write_text("{")
    before = sorted(folder.iterdir())
    done = run(folder, *(option.replace("{here}", str(folder)) for option in options))
    assert done.returncode in (1, 2) and says.replace("{here}", str(folder)) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and sorted(folder.iterdir()) == before


def test_results_of_another_measurement_stay(folder: Path) -> None:
    (folder / "out.json").write_text('{"model": "tiny", "output_tokens": 11}')
    other = run(folder, "--only", "ours")
    assert other.returncode == 1 and "another measurement (prompt_tokens, output_tokens, " in other.stderr
    assert saved(folder)["output_tokens"] == 11


@pytest.mark.parametrize("command, limit, says", [
    ("{python} -c 'raise SystemExit(\"no GPU here\")'", "60", "vllm: ended with code 1 before it answered: no GPU here"),
    ("{python} -c 'import time; print(\"starting\", flush=True); time.sleep(600)'", "2",
     "vllm: does not answer after 2 s: starting"),
    ("{here}/no-such-server", "60", "no-such-server: No such file or directory")])
def test_a_peer_that_fails_leaves_our_results(folder: Path, command: str, limit: str, says: str) -> None:
    command = command.replace("{python}", sys.executable).replace("{here}", str(folder))
    done = run(folder, "--peer", "vllm", "--only", "peer", "--peer-command", command, "--limit", limit)
    assert done.returncode == 1 and says in done.stdout and "failed: vllm" in done.stderr
    assert saved(folder)["systems"]["vllm"]["error"] and not saved(folder)["systems"]["vllm"]["cases"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_server_is_left_behind(folder: Path, number: signal.Signals) -> None:
    """Ended in the middle: the server runs, and waits for nothing else."""
    command = f"{sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'"
    process = subprocess.Popen(command_of(folder, "--peer", "vllm", "--only", "peer", "--peer-command", command), cwd=ROOT,
                               stderr=subprocess.PIPE, text=True, preexec_fn=hears_sighup)
    said = folder / "out.vllm.log"
    eventually(lambda: said.exists() and said.read_text().strip())
    process.send_signal(number)
    assert f"ended by {number.name}" in process.communicate(timeout=60)[1] and process.returncode == 1
    status = Path(f"/proc/{int(said.read_text())}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"       # ended, if nobody has waited


def test_the_mixed_case_has_lengths_of_people_in_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import serve_peers

    from relaxpack.bench.workload import Workload

    requests = serve_peers.in_token_ids(Workload(300, rate=30.0, max_tokens=2048), 1000)
    lengths = sorted(len(r.prompt) for r in requests)
    assert 40 < lengths[150] < 100 and lengths[-1] > 500 and all(2 <= i < 1000 for r in requests for i in r.prompt)
    assert len({tuple(r.prompt[:8]) for r in requests if len(r.prompt) >= 8}) == sum(length >= 8 for length in lengths)
    assert all(len(r.prompt) + r.output_tokens <= 2048 for r in requests)
    fixed = serve_peers.in_token_ids(Workload(4, concurrency=2, prompt_tokens=512, output_tokens=128), 1000)
    assert [len(r.prompt) for r in fixed] == [512] * 4


def test_transformers_reads_the_tokenizer_of_the_peer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    transformers = pytest.importorskip("transformers")
    import serve_peers

    written = serve_peers.peer_folder(folder / "peer", json.loads((folder / "tiny-bf16.json").read_text()))
    read = transformers.AutoTokenizer.from_pretrained(written, local_files_only=True)
    config = transformers.AutoConfig.from_pretrained(written, local_files_only=True)
    ids = [5, 17, 2, config.vocab_size - 1]
    assert read.encode("t5 t17 t2 " + f"t{ids[-1]}", add_special_tokens=False) == ids
    assert read(read.decode(ids), add_special_tokens=False)["input_ids"] == ids and len(read) == config.vocab_size
    assert config.model_type == "llama" and config.architectures == ["LlamaForCausalLM"]
