"""What the two graphs of a decode bucket cost: a provider says it, the manifest carries it, the runtime chooses by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpreadCosts:
    """Microseconds that decode attention of a layer takes, for a bucket with two graphs. The first one: the greater of
    `longest_us` times the keys of the longest sequence, and `key_us` a key, `again_us` one that another sequence has just
    read. The second one: `more_us`, `key_us` a key, and `shared_us` one that another sequence shares."""

    longest_us: float
    key_us: float
    again_us: float
    shared_us: float
    more_us: float
