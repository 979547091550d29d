"""A GPU bundle from file to tokens over stand-ins: the whole public path, with what is said about loading, memory and
capture, and the same answers with graphs as without.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaxpack.cli import run
from relaxpack.dist.bundle import Bundle
from relaxpack.llm import LLM
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.load import load_model, load_runner
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from tests.helpers import captured_model
from tests.helpers.graph_stand_ins import GraphLog

LIMITS = BuildLimits(64, max_batch=4, prefill_chunk=16, page_size=4)
BUCKETS = {"decode": (1, 2, 4), "prefill": (4, 8)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu-bundle")
    captured_model.write_bundle(captured_model.build(folder, LIMITS, BUCKETS), folder / "x.bundle")
    return folder / "x.bundle"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GraphLog:
    return captured_model.as_gpu(monkeypatch)


def test_from_file_to_tokens(bundle: Path, gpu: GraphLog) -> None:
    seen: list[tuple[int, int]] = []
    llm = LLM(bundle, num_pages=60, progress=lambda *numbers: seen.append(numbers))
    assert llm.loaded is not None and isinstance(llm.loaded.runner, CudaModelRunner)
    report = llm.loaded.report
    assert report.target == "cuda:sm_90a" and report.weight_bytes == seen[-1][0] == seen[-1][1] > 0
    assert set(report.seconds) == {"weights", "library", "memory"} and report.plan == llm.loaded.runner.plan
    assert " GB/s (weights " in str(report) and json.dumps(report.to_json())
    took = llm.loaded.warm_up()
    assert took is not None and took.graphs == gpu.count("capture") == 5
    gpu.events.clear()
    one = llm.generate([5, 6, 7], max_tokens=6, temperature=0.0, ignore_eos=True)
    assert len(one.token_ids) == 6 and {kind for kind, _ in gpu.events} == {"replay"}
    crowd = llm.generate([[5, 6, 7], [8, 9]], max_tokens=6, temperature=0.0, ignore_eos=True)
    assert crowd[0].token_ids == one.token_ids


def test_the_plan_covers_what_is_taken(bundle: Path, gpu: GraphLog) -> None:
    model = load_model(bundle, num_pages=60)
    entry = Bundle.open(bundle).manifest.targets[0]
    plan = model.report.plan
    assert plan is not None and plan.pages == 60
    assert sum(entry.memory_plan["arena_storages"]) == entry.memory_plan["arena_bytes"] <= plan.arena
    assert entry.memory_plan["weight_bytes"] == model.report.weight_bytes <= plan.weights
    assert plan.eager == entry.memory_plan["eager_bytes"] > 0


def test_graphs_off_gives_the_same_bits(bundle: Path, gpu: GraphLog) -> None:
    opened = Bundle.open(bundle)
    with_graphs, without = (load_runner(opened, "cuda", 60, graphs=on) for on in (True, False))
    for step in (SequenceStep([3, 1, 4], 0, [1], [2]), SequenceStep([5], 3, [1], [0]), SequenceStep([9], 4, [1, 2], [0])):
        one, other = (runner.forward(StepPlan((step,))) for runner in (with_graphs, without))
        assert (one == other).all()
    assert gpu.count("capture") == 2


def test_bench_latency_says_what_loading_took(bundle: Path, gpu: GraphLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "latency", str(bundle), "--batch", "1,2", "--prompt-tokens", "6", "--output-tokens", "4", "--runs",
                "1", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["load"]["target"] == "cuda:sm_90a" and report["load"]["weights_gigabytes_per_second"] > 0
    assert report["load"]["memory_plan"]["kv"] > 0 and report["capture"]["graphs"] == 5
    assert report["memory"]["planned"] == report["load"]["memory_plan"]["at_start"]
    for result in report["results"]:
        step = result["step"]
        assert step["launches"] == 1 < step["kernels"], "a captured step is one launch"
        assert step["bytes"] > 0 and step["bandwidth_bytes_per_second"] > 0 and step["device_seconds"] > 0
        assert abs(step["gap_seconds"] - (step["seconds"] - step["device_seconds"])) < 1e-12
        assert step["share_of_bandwidth"] == step["bytes"] / step["seconds"] / step["bandwidth_bytes_per_second"]
    assert "\r" not in err and "GPU" not in err, "no bar where nobody looks"
