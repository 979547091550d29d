"""From samples to numbers: percentiles, throughput, and goodput, the requests per second that met a service level."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from relaxpack import __version__
from relaxpack.bench.client import Sample
from relaxpack.bench.load import Run


@dataclass(frozen=True)
class ServiceLevel:
    """What a request must meet to count as good; seconds."""

    time_to_first_token: float = 1.0
    time_per_token: float = 0.1

    def met_by(self, sample: Sample) -> bool:
        first, each = sample.time_to_first_token, sample.time_per_token
        return (sample.error is None and first is not None and first <= self.time_to_first_token
                and (each is None or each <= self.time_per_token))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours, as numpy's default; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and the largest, in the values' unit; None of no values."""
    if not values:
        return None
    return {"mean": sum(values) / len(values), "p50": percentile(values, 50), "p95": percentile(values, 95),
            "p99": percentile(values, 99), "max": max(values)}


def gaps(sample: Sample) -> list[float]:
    """Times between neighbouring pieces of text."""
    return [after - before for before, after in pairwise(sample.pieces)]


def summary(run: Run, level: ServiceLevel) -> dict[str, Any]:
    """The numbers of a run; times in seconds."""
    good = [s for s in run.samples if s.error is None and s.first is not None]
    failed = [s for s in run.samples if s.error is not None]
    output = sum(s.output_tokens for s in good)
    prompt = sum(s.prompt_tokens for s in good)
    met = sum(level.met_by(s) for s in run.samples)
    return {
        "model": run.model.get("id"), "requests": len(run.samples), "failed": len(failed),
        "errors": sorted({s.error for s in failed if s.error})[:5], "seconds": run.seconds,
        "output_tokens": output, "prompt_tokens": prompt, "cached_tokens": sum(s.cached_tokens for s in good),
        "output_tokens_per_second": output / run.seconds, "total_tokens_per_second": (output + prompt) / run.seconds,
        "requests_per_second": len(good) / run.seconds, "goodput_requests_per_second": met / run.seconds,
        "met_service_level": met / max(len(run.samples), 1), "service_level": asdict(level),
        "time_to_first_token": spread([s.first - s.due for s in good if s.first is not None]),
        "inter_token_latency": spread([gap for s in good for gap in gaps(s)]),
        "time_per_token": spread([t for s in good if (t := s.time_per_token) is not None]),
        "request_latency": spread([s.last - s.due for s in good if s.last is not None]),
        "workload": asdict(run.workload), "environment": environment()}


def environment() -> dict[str, Any]:
    """What a number means nothing without."""
    return {"relaxpack": __version__, "python": platform.python_version(), "system": platform.platform(terse=True),
            "cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0],
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
