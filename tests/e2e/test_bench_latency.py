"""`relaxpack bench` on a real bundle: in this process, and with a server that it starts."""

from __future__ import annotations

import json
import subprocess
import sys


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", "relaxpack", "bench", *map(str, arguments)], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_latency(tiny_bundle, tmp_path):
    report = run("latency", tiny_bundle, "--batch", "1,3", "--prompt-tokens", 20, "--output-tokens", 6, "--runs", 1,
                 "--json", "--svg", tmp_path / "latency.svg")
    assert [result["batch"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        assert 0 < result["time_to_first_token"]["p50"] < result["seconds"]
        assert result["inter_token_latency"]["p50"] <= result["inter_token_latency"]["p99"]
    assert (tmp_path / "latency.svg").read_text().startswith("<svg")


def test_serve_starts_a_server_for_a_bundle(tiny_bundle):
    report = run("serve", tiny_bundle, "-r", 4, "-c", 2, "--prompt-tokens", 8, "--output-tokens", 5, "--json")
    assert report["requests"] == 4 and report["failed"] == 0 and report["output_tokens"] == 20
    assert report["workload"]["max_tokens"] == 128      # the bundle's own limit
