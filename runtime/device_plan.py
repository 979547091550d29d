"""What a model takes of a GPU's memory: planned before it is taken, compared with the driver after. Pure arithmetic.

The driver gives memory in granules, so the plan counts them: a tensor of a MiB or more has granules of its own, smaller
ones share them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

GRANULE = 2 << 20
_OWN = 1 << 20          # from this size on an allocation has granules of its own
_SMALL = 512            # alignment of the others
TOLERANCE = 0.02


def granted(sizes: Iterable[int]) -> int:
    """Bytes that a driver gives away for allocations of these sizes."""
    own = small = 0
    for size in sizes:
        if size >= _OWN:
            own += _up(size, GRANULE)
        else:
            small += _up(size, _SMALL)
    return own + _up(small, GRANULE)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclass(frozen=True)
class DevicePlan:
    """Bytes. `eager`: intermediates of steps that no graph serves, taken at the first such step."""

    weights: int
    kv: int
    arena: int
    workspace: int
    eager: int
    pages: int
    tokens: int          # that the pages hold
    device_total: int

    @property
    def at_start(self) -> int:
        """Taken once every graph is captured."""
        return self.weights + self.kv + self.arena + self.workspace

    @property
    def total(self) -> int:
        return self.at_start + self.eager

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "at_start": self.at_start, "total": self.total}

    def __str__(self) -> str:
        parts = {"weights": self.weights, f"KV cache of {self.tokens} tokens": self.kv, "arena": self.arena,
                 "workspace": self.workspace, "eager steps": self.eager}
        text = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
        return f"GPU memory: {text}: {_gb(self.total)} of {_gb(self.device_total)} GB"


@dataclass(frozen=True)
class Comparison:
    """`planned` against what the driver says has gone since before the weights."""

    planned: int
    taken: int

    @property
    def difference(self) -> float:
        return (self.taken - self.planned) / self.planned if self.planned else 0.0

    @property
    def ok(self) -> bool:
        return abs(self.difference) <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "ok": self.ok}

    def __str__(self) -> str:
        return f"the driver says {_gb(self.taken)} GB are taken, planned were {_gb(self.planned)} GB " \
               f"({self.difference * 100:+.1f} %{'' if self.ok else ', more than 2 % off: please report this'})"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"
