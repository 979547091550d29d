"""The search over a space: everything where that is affordable, else random choices first and then the
neighbourhood of the best. It proposes and is told; who builds and times is someone else's business.

    search = Search(space, trials=64, seed=0)
    while (choice := search.propose()) is not None:
        search.tell(choice, seconds)        # None: the candidate failed
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from .space import Space

EXPLORE = 0.5   # share of the trials that are random where the space is larger than the trials


def frozen(choice: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A choice as a key; lists (from JSON) count as tuples."""
    return tuple(sorted((name, tuple(v) if isinstance(v, list) else v) for name, v in choice.items()))


class Search:
    def __init__(self, space: Space, trials: int, seed: int = 0) -> None:
        self.space, self.trials = space, trials
        self.results: dict[tuple[tuple[str, Any], ...], float | None] = {}
        self._choices: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
        self._rng = random.Random(seed)
        self._asked: set[tuple[tuple[str, Any], ...]] = {frozen(space.default)}
        self._exhaustive = self._everything() if space.size() <= trials else None

    def propose(self) -> dict[str, Any] | None:
        """A choice not asked for before, or None at the end of the trials or of the space."""
        if len(self.results) >= self.trials:
            return None
        source = self._exhaustive if self._exhaustive is not None else self._next()
        for choice in source:
            if frozen(choice) not in self._asked:
                self._asked.add(frozen(choice))
                return choice
        return None

    def tell(self, choice: Mapping[str, Any], seconds: float | None) -> None:
        key = frozen(choice)
        self._asked.add(key)
        self.results[key] = seconds
        self._choices[key] = {name: tuple(v) if isinstance(v, list) else v for name, v in choice.items()}

    def best(self, count: int = 1) -> list[dict[str, Any]]:
        """The fastest choices so far, fastest first."""
        timed = sorted((seconds, repr(key), key) for key, seconds in self.results.items() if seconds is not None)
        return [self._choices[key] for _, _, key in timed[:count]]

    def _everything(self) -> Iterator[dict[str, Any]]:
        return self.space.all()

    def _next(self) -> Iterator[dict[str, Any]]:
        """Random while exploring; then neighbours of the best, the second best, ...; random where all are known."""
        if len(self.results) >= EXPLORE * self.trials:
            for center in [*self.best(8), dict(self.space.default)]:
                yield from self.space.neighbours(center)
        for _ in range(200):
            if (choice := self.space.sample(self._rng)) is not None:
                yield choice
