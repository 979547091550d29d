"""What `relaxpack bench latency` says of loading: times, rate, capture, and the memory plan against the driver."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relaxpack.bench.latency import _prepare
from relaxpack.llm import LLM
from relaxpack.runtime.cuda_model_runner import WarmUp
from relaxpack.runtime.device_plan import Comparison, DevicePlan, granted
from relaxpack.runtime.load import LoadReport

PLAN = DevicePlan(100, 200, 30, 10, 40, 5, 64, 1000)


def llm(report: LoadReport, warm_up: WarmUp | None, compared: Comparison | None) -> LLM:
    return cast(LLM, SimpleNamespace(loaded=SimpleNamespace(
        report=report, warm_up=lambda: warm_up, compare_plan=lambda: compared)))


def test_on_a_gpu() -> None:
    report = LoadReport("cuda:sm_90a", 6_000_000_000, {"weights": 1.5, "library": 0.25}, PLAN)
    said: dict[str, Any] = json.loads(json.dumps(_prepare(llm(report, WarmUp(7, 0.5, 9, 3), Comparison(340, 343)))))
    assert said["load"]["weights_gigabytes_per_second"] == 4.0 and said["load"]["seconds"]["library"] == 0.25
    assert said["load"]["memory_plan"]["at_start"] == 340 and said["load"]["memory_plan"]["total"] == 380
    assert said["capture"] == {"graphs": 7, "seconds": 0.5, "bytes": 9, "arena": 3}
    assert said["memory"]["taken"] == 343 and said["memory"]["ok"] and abs(said["memory"]["difference"] - 3 / 340) < 1e-9


def test_on_a_cpu_weights_are_mapped() -> None:
    report = LoadReport("cpu:x86-64-v3", 5_000_000, {"library": 0.25})
    said = _prepare(llm(report, None, None))
    assert said["capture"] is said["memory"] is said["load"]["weights_gigabytes_per_second"] is None
    assert str(report) == "cpu:x86-64-v3: 0.01 GB of weights mapped (library 0.25 s)"
    assert _prepare(cast(LLM, SimpleNamespace(loaded=None))) == {"load": None, "capture": None, "memory": None}


@pytest.mark.parametrize("sizes, bytes_", [
    ([], 0), ([1], 2 << 20), ([1 << 20], 2 << 20), ([3 << 20], 4 << 20), ([4 << 20], 4 << 20), ([100] * 4096, 2 << 20),
    ([100] * 4097, 4 << 20), ([2 << 20, 10, 10], 4 << 20)])
def test_what_a_driver_grants(sizes: list[int], bytes_: int) -> None:
    assert granted(sizes) == bytes_
