"""When a decode step takes the second graph of its bucket (`decode_spread_8`), and which leading keys of its sequences that
reads once for all. Decided from page tables, lengths and what the build says of both graphs: nothing is timed here.

A page belongs to one history of tokens: one sequence writes it, and it reaches others through the prefix cache or a fork,
with everything before it. So equal page ids at one place of two tables mean equal keys up to there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from relaxpack.kernel_spec import SHARED_KEYS
from relaxpack.runtime.step_plan import SequenceStep
from relaxpack.spread_costs import SpreadCosts

SPREAD = "decode_spread"
Rows = list[int]


@dataclass(frozen=True)
class Spread:
    """`keys`: leading keys that the sequences `rows` have in common; 0 and none where only the lengths ask for it."""

    keys: int = 0
    rows: Sequence[int] = ()


class Chooser:
    """Chooses for one step after the other; what the last one shared is found again at once."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._last: tuple[list[int], int, Rows] = [], 0, []

    def choose(self, sequences: Sequence[SequenceStep], costs: SpreadCosts) -> Spread | None:
        """None: the first graph is the faster one."""
        pages, rows = self._shared(sequences)
        shared = pages * self._page_size // SHARED_KEYS * SHARED_KEYS
        spread = Spread(shared, rows) if shared else Spread()
        lengths = [s.start + 1 for s in sequences]
        saved = shared * (len(rows) - 1) if shared else 0
        keys = sum(lengths) - saved
        first = max(max(lengths) * costs.longest_us, keys * costs.key_us + saved * costs.again_us)
        second = costs.more_us + keys * costs.key_us + saved * costs.shared_us
        return spread if second < first else None

    def _shared(self, sequences: Sequence[SequenceStep]) -> tuple[int, Rows]:
        """As `shared_prefix`. The same tables in the same order share what they did while they have its last page."""
        known, pages, rows = self._last
        ids = [id(s.page_ids) for s in sequences]
        if ids == known:
            held = {sequences[row].page_ids[pages - 1] if sequences[row].start >= pages * self._page_size else -1
                    for row in rows}
            if len(held - {-1}) == len(held) <= 1:
                return pages, rows
        pages, rows = shared_prefix([s.page_ids for s in sequences], [s.start // self._page_size for s in sequences])
        self._last = ids, pages, rows
        return pages, rows


def shared_prefix(tables: Sequence[Sequence[int]], pages: Sequence[int]) -> tuple[int, Rows]:
    """(leading pages, rows that share them), chosen so that most pages are not read twice; (0, []) where none are shared.
    `pages[i]`: whole pages of row i that may be shared."""
    best: tuple[int, Rows] = (0, [])
    rows, depth = list(range(len(tables))), 0
    while True:
        groups: dict[int, Rows] = defaultdict(list)
        for row in rows:
            if pages[row] > depth:
                groups[tables[row][depth]].append(row)
        rows = max(groups.values(), key=len, default=[])
        if len(rows) < 2:
            return best
        depth = _common(tables, rows, depth + 1, min(pages[row] for row in rows))
        if depth * (len(rows) - 1) > best[0] * (len(best[1]) - 1):
            best = depth, rows


def _common(tables: Sequence[Sequence[int]], rows: Rows, low: int, high: int) -> int:
    """How many leading pages of the rows are equal, given that `low` are; at most `high`."""
    first = tables[rows[0]]
    return low + bisect_left(range(low, high), True, key=lambda i: any(tables[row][i] != first[i] for row in rows))
