"""`relaxpack bench latency` on a CPU says what a step moves, the sum of its kernels, and the share of the bandwidth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaxpack.cli import run


def test_facts_of_a_step(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "latency", str(tiny_bundle), "--batch", "1,2", "--prompt-tokens", "8", "--output-tokens", "6",
                 "--runs", "1"]
    assert run([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["load"]["target"].startswith("cpu:") and report["capture"] is None
    one, two = (result["step"] for result in report["results"])
    assert run(["explain", str(tiny_bundle), "--context", "11", "--json", "--bandwidth", "20"]) == 0
    explained = json.loads(capsys.readouterr().out)["step"]
    assert one["kernels"] == one["launches"] == explained["launches"] and one["bytes"] == explained["bytes"]
    assert two["bytes"] > one["bytes"], "twice the keys and values, the same weights"
    assert one["device_seconds"] > 0 and two["device_seconds"] is None and two["gap_seconds"] is None
    assert one["share_of_bandwidth"] == one["bytes"] / one["seconds"] / one["bandwidth_bytes_per_second"]
    assert run(arguments) == 0
    assert "of bandwidth" in capsys.readouterr().out
