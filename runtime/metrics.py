"""Counters and latency histograms of an engine, in plain Python.

Only the engine's thread writes; any thread may read (each number is right by itself). How they are shown, for example
as Prometheus text, is the server's business.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Histogram:
    """`counts[i]`: values at most bounds[i] and above bounds[i - 1]; the last entry is all above the last bound."""

    bounds: tuple[float, ...] = _SECONDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class EngineMetrics:
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)      # sequences by finish reason
    steps: int = 0
    failed_steps: int = 0
    prompt_tokens: int = 0          # of admitted requests
    cached_tokens: int = 0          # of those, found in the prefix cache
    computed_tokens: int = 0        # through the model, recomputed ones included
    output_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    graph_steps: int = 0            # on a GPU: steps that were one graph launch
    spread_steps: int = 0           # of these, decode steps that read leading pages of several sequences once
    eager_steps: int = 0            # and steps without a graph: above the largest bucket, or several prompts at once
    running: int = 0                # the rest: as of the last step
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    time_to_first_token: Histogram = field(default_factory=Histogram)   # seconds, from Engine.add
    time_per_token: Histogram = field(default_factory=Histogram)        # seconds, mean over a sequence's further tokens
    step_seconds: Histogram = field(default_factory=Histogram)

    def to_json(self) -> dict[str, object]:
        def plain(value: object) -> object:
            if isinstance(value, Histogram):
                return {"bounds": list(value.bounds), "counts": list(value.counts), "sum": value.total}
            return dict(value) if isinstance(value, dict) else value

        return {name: plain(getattr(self, name)) for name in self.__slots__}
