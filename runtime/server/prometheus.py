"""/metrics: the engine's and the server's counters as Prometheus text. Reads them when asked and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from relaxpack.runtime.metrics import EngineMetrics, Histogram
from relaxpack.runtime.server.limits import HttpCounts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS = {
    "requests": "Requests given to the engine", "steps": "Steps of the engine",
    "failed_steps": "Steps that the model failed in", "prompt_tokens": "Prompt tokens of requests that began",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "computed_tokens": "Tokens that went through the model, recomputed ones included",
    "output_tokens": "Tokens generated", "preemptions": "Sequences that had to give their pages back",
    "evictions": "Cached pages that were dropped", "graph_steps": "Steps of a GPU that were one graph launch",
    "spread_steps": "Decode steps of a GPU that read leading pages of several sequences once",
    "eager_steps": "Steps of a GPU without a graph: above the largest bucket, or several prompts at once"}
_GAUGES = {
    "running": "Sequences in the batch", "waiting": "Sequences that wait for room", "pages_total": "Pages of the KV cache",
    "pages_free": "Pages with nothing in them", "pages_cached": "Pages kept for reuse that nobody holds",
    "pages_held": "Pages that sequences hold"}
_HISTOGRAMS = {
    "time_to_first_token": ("time_to_first_token_seconds", "From arrival to the first token"),
    "time_per_token": ("time_per_token_seconds", "Mean time of a sequence's further tokens"),
    "step_seconds": ("step_seconds", "Duration of a step")}


class ServerCollector(Collector):
    def __init__(self, engine: EngineMetrics, http: HttpCounts, model: str) -> None:
        self._engine, self._http, self._model = engine, http, model

    def collect(self) -> Iterable[Metric]:
        yield from self._engine_metrics()
        answers = CounterMetricFamily("relaxpack_http_answers", "HTTP answers by path and status", labels=["path", "status"])
        for (path, status), count in sorted(self._http.answers.copy().items()):
            answers.add_metric([path, str(status)], count)
        yield answers
        yield CounterMetricFamily("relaxpack_http_refused", "Requests refused because too many were in work",
                                  value=self._http.refused)
        yield CounterMetricFamily("relaxpack_http_disconnects", "Clients that left before their answer was whole",
                                  value=self._http.disconnects)
        yield GaugeMetricFamily("relaxpack_http_in_flight", "Generation requests in work", value=self._http.in_flight)

    def _engine_metrics(self) -> Iterator[Metric]:
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"relaxpack_{name}", text, labels=["model"])
            counter.add_metric([self._model], getattr(self._engine, name))
            yield counter
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"relaxpack_{name}", text, labels=["model"])
            gauge.add_metric([self._model], getattr(self._engine, name))
            yield gauge
        finished = CounterMetricFamily("relaxpack_finished", "Outputs by how they ended", labels=["model", "reason"])
        for reason, count in sorted(self._engine.finished.copy().items()):
            finished.add_metric([self._model, reason], count)
        yield finished
        for name, (shown, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"relaxpack_{shown}", text, labels=["model"])
            family.add_metric([self._model], *_cumulative(getattr(self._engine, name)))
            yield family


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], list(histogram.counts), strict=True):
        below += count
        buckets.append((bound, below))
    return buckets, histogram.total


def metrics_text(engine: EngineMetrics, http: HttpCounts, model: str) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(engine, http, model))
    ProcessCollector(registry=registry)     # memory, processor time, open files
    return generate_latest(registry)
