"""Which leading pages the sequences of a step share, and which graph of a bucket a step takes."""

from __future__ import annotations

import random

import pytest

from relaxpack.kernel_spec import SHARED_KEYS
from relaxpack.runtime import spread
from relaxpack.runtime.spread import Chooser, Spread, shared_prefix
from relaxpack.runtime.step_plan import SequenceStep
from relaxpack.spread_costs import SpreadCosts

COMMON = list(range(1, 41))


@pytest.mark.parametrize(("tables", "pages", "expected"), [
    ([[1, 2, 3], [1, 2, 4]], [3, 3], (2, [0, 1])),
    ([[1, 2, 3], [1, 2, 3]], [3, 2], (2, [0, 1])),                                   # the page being written is not shared
    ([[1, 2], [3, 4]], [2, 2], (0, [])),
    ([[1, 2]], [2], (0, [])),
    ([], [], (0, [])),
    ([[1, 2], [1, 2], [3]], [0, 0, 0], (0, [])),
    ([[9, 2], [1, 2, 3], [1, 2, 3], [1, 5, 6]], [2, 3, 3, 3], (3, [1, 2])),          # two with 3 pages beat three with 1
    ([[1, 2, 7], [1, 2, 8], [1, 5, 9], [1, 6, 9], [1, 7, 9]], [3] * 5, (1, [0, 1, 2, 3, 4])),
    ([[1, 2, 3, 4], [5, 6], [1, 2, 3, 9], [5, 6], [1, 2, 8, 9]], [4, 2, 4, 2, 4], (2, [0, 2, 4])),
])
def test_shared_prefix(tables: list[list[int]], pages: list[int], expected: tuple[int, list[int]]) -> None:
    assert shared_prefix(tables, pages) == expected


def test_shared_prefix_saves_what_an_exhaustive_search_along_the_largest_groups_saves() -> None:
    rng = random.Random(4)
    for _ in range(300):
        tables = [[rng.randrange(2)] * rng.randrange(4) + [rng.randrange(3) for _ in range(3)] for _ in range(6)]
        for table in tables:            # ids of a chain of pages: equal only where everything before is
            for i in range(len(table)):
                table[i] = hash(tuple(table[:i + 1]))
        pages = [rng.randrange(len(table) + 1) for table in tables]
        depth, rows = shared_prefix(tables, pages)
        assert all(tables[row][:depth] == tables[rows[0]][:depth] and pages[row] >= depth for row in rows)
        if rows:                        # nobody is left out, and not one page more is common to all
            common = tables[rows[0]][:depth]
            assert rows == [row for row in range(6) if pages[row] >= depth and tables[row][:depth] == common]
            assert any(pages[row] == depth or tables[row][depth] != tables[rows[0]][depth] for row in rows)
        first = [table[0] for table, count in zip(tables, pages, strict=True) if count]
        assert (depth > 0) == (len(first) != len(set(first)))


def steps(starts: list[int]) -> list[SequenceStep]:
    return [SequenceStep([5], start, [*COMMON, 100 + i], [0]) for i, start in enumerate(starts)]


def choose(sequences: list[SequenceStep], page_size: int, costs: SpreadCosts) -> Spread | None:
    return Chooser(page_size).choose(sequences, costs)


SHARING = SpreadCosts(longest_us=0, key_us=1, again_us=1, shared_us=0, more_us=0)


def test_shared_keys_are_whole_tiles_before_every_new_one() -> None:
    """Pages of 16: 40 shared ones are 640 keys, of which 512 are whole tiles of every kernel."""
    sequences = steps([640, 650, 655])
    assert choose(sequences, 16, SHARING) == Spread(512, [0, 1, 2]) and all(512 <= s.start for s in sequences)
    assert choose(steps([640, 300]), 16, SHARING) == Spread(SHARED_KEYS, [0, 1])
    assert choose(steps([640, SHARED_KEYS - 1]), 16, SHARING) is None                 # not one whole tile
    assert choose(steps([640]), 16, SHARING) is None


@pytest.mark.parametrize(("starts", "costs", "expected"), [
    # 512 keys are read once instead of three times: 1024 that cost 0.5 or 0.1 each
    ([640, 650, 655], SpreadCosts(0, 1, 0.5, 0.1, 409), Spread(512, [0, 1, 2])),
    ([640, 650, 655], SpreadCosts(0, 1, 0.5, 0.1, 410), None),
    # the longest of two has 641 of 642 keys: 641 * 2 in its own blocks, 642 spread over all
    ([640, 0], SpreadCosts(2, 1, 1, 0, 639), Spread()),
    ([640, 0], SpreadCosts(2, 1, 1, 0, 641), None),
    ([640], SpreadCosts(1.1, 1, 1, 0, 60), Spread()),
    ([640, 640], SpreadCosts(2, 1, 1, 1, 1), None),                                   # even: all blocks are busy anyway
])
def test_the_cheaper_graph_is_taken(starts: list[int], costs: SpreadCosts, expected: Spread | None) -> None:
    assert choose(steps(starts), 16, costs) == expected


def test_steps_in_a_row_share_what_the_tables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chooser that remembers answers as a new one does, whatever happens to the batch between; the search runs only where
    tables are others or have another page there."""
    searches = []
    monkeypatch.setattr(spread, "shared_prefix", lambda *given: searches.append(1) or shared_prefix(*given))
    tables = [[*COMMON, 100 + i] for i in range(4)]
    chooser, starts = Chooser(16), [640, 641, 650, 655]

    def step(rows: list[int]) -> Spread | None:
        made = [SequenceStep([5], starts[row], tables[row], [0]) for row in rows]
        found = chooser.choose(made, SHARING)
        searched = len(searches)
        assert found == choose(made, 16, SHARING)
        del searches[searched:]
        return found

    assert step([0, 1, 2]) == Spread(512, [0, 1, 2]) and len(searches) == 1
    starts = [start + 1 for start in starts]
    assert step([0, 1, 2]) == Spread(512, [0, 1, 2]) and len(searches) == 1
    assert step([0, 1, 3]) == Spread(512, [0, 1, 2]) and len(searches) == 2          # another sequence
    tables[3][:] = [*range(200, 240), 103]                                          # preempted, and back in other pages
    assert step([0, 1, 3]) == Spread(512, [0, 1]) and len(searches) == 3
    starts[0] = 300                                                                  # computes its tokens once more
    assert step([0, 1, 3]) == Spread(SHARED_KEYS, [0, 1]) and len(searches) == 4
    assert step([3, 3]) is not None and step([3]) is None
