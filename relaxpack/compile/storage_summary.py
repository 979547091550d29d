"""What a memory plan (`explain.json`) means for a device, in the few numbers that a manifest carries. Pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any


def storage_summary(memory_plan: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of a target with graphs: bytes of each storage that all graphs share, and what the functions without graphs take in
    all. Memory that one of these gives back serves the next one's storages of the same size. Empty without graphs."""
    captured = [sorted(plan["storages"], reverse=True) for plan in memory_plan.values() if plan.get("captured")]
    if not captured:
        return {}
    others = [plan for plan in memory_plan.values() if not plan.get("captured")]
    eager: Counter[int] = Counter()
    for plan in others:
        eager |= Counter(plan["storages"])
    return {"arena_storages": [max(rank) for rank in zip_longest(*captured, fillvalue=0)],
            "eager_bytes": sum(eager.elements()) + sum(plan.get("result_bytes", 0) for plan in others)}
