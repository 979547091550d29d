"""What timing gives back, and what this machine's caches are. Imports no TVM."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from relaxpack.tuning_record import Facts

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNKNOWN_CACHE = 64 << 20


@dataclass(frozen=True)
class Rounds:
    """Times of one candidate, microseconds a call, one a round; `clean[i]` where nothing interrupted it in round i."""

    times_us: tuple[float, ...]
    clean: tuple[bool, ...]
    rotated_bytes: int

    def kept(self) -> tuple[float, ...]:
        return tuple(t for t, ok in zip(self.times_us, self.clean, strict=True) if ok)


def rotation_bytes() -> int:
    """How much memory argument sets must take so that none is in a cache when its turn comes: twice the last level."""
    return 2 * last_level_cache()


def last_level_cache() -> int:
    """Bytes, from sysfs; 64 MiB where it does not say."""
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=_UNKNOWN_CACHE)


def machine_conditions() -> Facts:
    """What else was the case: clock of the first CPU and the load, as far as the system says."""
    facts: dict[str, float | str] = {"load": round(os.getloadavg()[0], 2)}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "cpu MHz":
            facts["clock_mhz"] = round(float(value))
        elif key.strip() == "model name":
            facts["cpu"] = value.strip()
        if {"clock_mhz", "cpu"} <= facts.keys():
            break
    return facts
