"""The load generator: workloads from a seed, percentiles, pictures, and whole runs against a server without a model."""

from __future__ import annotations

import json
import statistics
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner

from relaxpack.bench.client import LoadClient, Sample
from relaxpack.bench.load import run_load
from relaxpack.bench.picture import WIDTH, Panel, distribution, draw
from relaxpack.bench.report import ServiceLevel, percentile, summary
from relaxpack.bench.workload import Workload, requests_of
from relaxpack.cli.bench import bench
from relaxpack.errors import EnvironmentProblem, NotABundleError, UsageError
from relaxpack.runtime.server.serve import background
from tests.helpers.server import hash_model
from tests.helpers.waiting import DEADLINE


@pytest.fixture(scope="module")
def server():
    # Byte-level tokens of a tiny vocabulary: a word is several of them.
    with background(hash_model(num_pages=2000, page_size=16, max_context=2048, max_batch=16, prefill_chunk=512)) as running:
        yield running


def test_equal_seeds_make_equal_requests_and_lengths_have_a_long_tail():
    workload = Workload(400, seed=3, concurrency=4, max_tokens=4096)
    requests = list(requests_of(workload))
    assert requests == list(requests_of(workload)) and requests != list(requests_of(Workload(400, seed=4, concurrency=4)))
    outputs = [r.output_tokens for r in requests]
    words = [len(r.prompt.split()) for r in requests]
    assert 100 < statistics.median(outputs) < 170 and 150 < statistics.mean(outputs) < 260
    assert 45 < statistics.median(words) < 95 and statistics.mean(words) > 1.8 * statistics.median(words)
    assert all(r.output_tokens + len(r.prompt.split()) <= 4096 for r in requests)


def test_arrivals_are_poisson():
    arrivals = [r.arrival for r in requests_of(Workload(3000, rate=20.0, prompt_tokens=8, output_tokens=4))]
    between = np.diff(arrivals)
    assert arrivals[0] == 0 and between.min() >= 0
    assert between.mean() == pytest.approx(1 / 20, rel=0.06) and between.std() == pytest.approx(1 / 20, rel=0.1)


def test_groups_share_prefixes_and_nothing_else():
    workload = Workload(200, concurrency=1, shared_prefix=40, prefix_groups=3, share=0.5, prompt_tokens=10, output_tokens=4)
    prompts = [r.prompt for r in requests_of(workload)]
    heads = [" ".join(p.split()[:40]) for p in prompts if len(p.split()) > 40]
    assert len(set(heads)) == 3 and 70 < len(heads) < 130
    assert len(set(prompts)) == 200


@pytest.mark.parametrize("options", [{}, {"rate": 1.0, "concurrency": 1}])
def test_a_loop_is_open_or_closed(options):
    with pytest.raises(UsageError, match="open loop"):
        Workload(5, **options)


def test_lengths_that_cannot_fit_are_refused():
    with pytest.raises(UsageError, match="700 tokens together"):
        Workload(5, concurrency=1, prompt_tokens=500, shared_prefix=100, output_tokens=100, max_tokens=600)


@pytest.mark.parametrize("percent", [0, 37.5, 50, 95, 99, 100])
def test_percentiles_are_numpys(percent, rng):
    for size in (1, 2, 7, 100):
        values = rng.exponential(size=size).tolist()
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_goodput_counts_what_met_the_service_level():
    level = ServiceLevel(time_to_first_token=1.0, time_per_token=0.1)
    good = Sample(0, 5.0, 5.9, 6.71, [5.9, 6.71], 3, 0, 10)
    assert good.time_to_first_token == pytest.approx(0.9) and good.time_per_token == pytest.approx(0.09)
    assert level.met_by(good) and not ServiceLevel(1.0, 0.08).met_by(good)
    assert not level.met_by(Sample(1, 5.0, 6.2, 6.3, [], 3, 0, 10)) and not level.met_by(Sample(2, 0.0, error="x"))
    assert level.met_by(Sample(3, 5.0, 5.5, 5.5, [5.5], 3, 0, 1))


def test_a_closed_loop_runs_so_many_at_once(server):
    workload = Workload(24, seed=1, concurrency=6, prompt_tokens=12, output_tokens=9)
    run = run_load(LoadClient(server.url, extra={"temperature": 0, "ignore_eos": True}), workload)
    report = summary(run, ServiceLevel(1e6, 1e6))
    assert report["requests"] == 24 and report["failed"] == 0 and report["output_tokens"] == 24 * 9
    assert report["met_service_level"] == 1 and report["goodput_requests_per_second"] == report["requests_per_second"]
    for sample in run.samples:
        assert sample.due <= sample.first <= sample.last and sample.pieces == sorted(sample.pieces)
    overlapping = max(sum(s.due <= at < s.last for s in run.samples) for at in [s.due for s in run.samples])
    assert overlapping <= 6
    json.dumps(report, allow_nan=False)


def test_an_open_loop_counts_from_when_a_request_was_due(server):
    workload = Workload(20, rate=100.0, prompt_tokens=10, output_tokens=4)
    run = run_load(LoadClient(server.url, extra={"temperature": 0}), workload)
    due = [r.arrival for r in requests_of(workload)]
    assert [s.due for s in run.samples] == due and all(s.first > s.due for s in run.samples) and run.seconds >= due[-1]


def test_shared_prefixes_are_found_in_the_cache(server):
    workload = Workload(12, seed=9, concurrency=2, prompt_tokens=8, output_tokens=3, shared_prefix=120, prefix_groups=1)
    report = summary(run_load(LoadClient(server.url, extra={"temperature": 0}), workload), ServiceLevel())
    assert report["cached_tokens"] > 0.7 * report["prompt_tokens"]


def test_failures_are_counted_and_said(server):
    runner = server.state.model.engine.call(lambda engine: engine.runner).result(DEADLINE)
    client = LoadClient(server.url, extra={"temperature": 500})
    with pytest.raises(EnvironmentProblem, match="temperature"):
        run_load(client, Workload(3, concurrency=1, prompt_tokens=5, output_tokens=3))
    runner.fail_next = RuntimeError("gone wrong")
    workload = Workload(3, concurrency=1, prompt_tokens=5, output_tokens=3)
    client = LoadClient(server.url, extra={"temperature": 0, "ignore_eos": True})   # a drawn EOS would leave no text
    report = summary(run_load(client, workload, warmup=0), ServiceLevel(1e6, 1e6))
    assert report["failed"] == 1 and "gone wrong" in report["errors"][0]
    assert report["met_service_level"] == pytest.approx(2 / 3)


def test_nobody_there_is_said():
    with pytest.raises(EnvironmentProblem, match="is the server running"):
        run_load(LoadClient("http://127.0.0.1:9"), Workload(1, concurrency=1, prompt_tokens=5, output_tokens=3))


def test_the_command_prints_a_table_json_and_a_picture(server, tmp_path, monkeypatch):
    runner = server.state.model.engine.call(lambda engine: engine.runner).result(DEADLINE)
    monkeypatch.setattr(runner, "delay", 0.005)     # so that tokens come one after the other, and there are gaps
    picture, document = tmp_path / "load.svg", tmp_path / "load.json"
    arguments = ["serve", server.url, "-r", "8", "-c", "2", "--prompt-tokens", "10", "--output-tokens", "6", "--svg",
                 str(picture), "--out", str(document)]
    done = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "time to first token" in done.stdout and "output tokens/s" in done.stdout
    report = json.loads(document.read_text())
    assert report["requests"] == 8 and report["workload"]["concurrency"] == 2 and report["environment"]["cores"] >= 1
    root = ET.fromstring(picture.read_text())
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 and root.find("{http://www.w3.org/2000/svg}title").text == "hash under load"


def test_the_command_refuses_what_makes_no_sense():
    for arguments, kind, words in ((["serve", "http://x", "--rate", "1", "-c", "2"], UsageError, "closed one"),
                                   (["serve", "nowhere.bundle"], NotABundleError, "does not exist"),
                                   (["latency", "nowhere.bundle"], NotABundleError, "does not exist")):
        done = CliRunner().invoke(bench, arguments)
        assert isinstance(done.exception, kind) and words in str(done.exception)


@pytest.mark.parametrize("values", [
    [0.0100, 0.0101, 0.0102], [5.0] * 9, [0.001] * 98 + [9.0] * 2, [1e-6, 2e3], [0.5, 0.5001]])
def test_labels_of_marks_are_readable_however_near_they_are(values):
    root = ET.fromstring(draw("t", "f", [distribution("x", values)]))
    group = root.find("{http://www.w3.org/2000/svg}g")
    kinds = [node.get("class") for node in group]
    assert kinds[-2:] == ["label", "label"], "above marks and curve"
    boxes = []
    for node in list(group)[-2:]:
        width, x = 7.5 * len(node.text), float(node.get("x"))
        left = x - width if node.get("text-anchor") == "end" else x
        assert left >= -4 and left + width <= WIDTH + 4, node.text
        boxes.append(float(node.get("y")))
    assert abs(boxes[0] - boxes[1]) >= 15, "one line of text apart"
    assert root.find("{http://www.w3.org/2000/svg}style").text.count(".label {") == 2, "on a ground, light and dark"


def test_pictures_are_well_formed_whatever_the_numbers():
    panels = [distribution("a <b> & c", [0.001, 0.5, 0.02]), distribution("nothing", []),
              Panel("flat", "x", "y", [(0, 0), (1, 0)])]
    root = ET.fromstring(draw('quotes " and <tags>', "facts & figures", panels))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <b> & c" in texts and any(text.startswith("p99 500") for text in texts)
    points = [node.attrib["points"] for node in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(points) == 2 and "nan" not in "".join(points)
