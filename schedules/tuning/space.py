"""`SearchSpace`: named parameters with their possible values, and which combinations of them make sense; `ListedSpace`:
choices one by one, where they do not make a grid.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Parameters = Mapping[str, Any]


def _always(parameters: Parameters) -> bool:
    return True


@dataclass(frozen=True)
class SearchSpace:
    """`values`: parameter → its values, in an order in which neighbours are alike. `default` is what the rule uses; it
    need not be on the grid."""

    values: Mapping[str, tuple[Any, ...]]
    default: Parameters
    valid: Callable[[Parameters], bool] = _always

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.values)

    def all(self) -> Iterator[dict[str, Any]]:
        """Every valid choice but the default, in a fixed order."""
        for combination in itertools.product(*self.values.values()):
            choice = dict(zip(self.values, combination, strict=True))
            if choice != dict(self.default) and self.valid(choice):
                yield choice

    def size(self) -> int:
        return sum(1 for _ in self.all())

    def sample(self, rng: random.Random) -> dict[str, Any] | None:
        """A valid choice, or None where luck found none."""
        for _ in range(100):
            choice = {name: rng.choice(values) for name, values in self.values.items()}
            if self.valid(choice):
                return choice
        return None

    def neighbours(self, choice: Parameters) -> Iterator[dict[str, Any]]:
        """Choices that differ in one parameter: one step up or down its values (any value, from outside the grid). A choice
        of a time when there was no such parameter had its default."""
        choice = {**self.default, **choice}
        for name, values in self.values.items():
            if choice[name] in values:
                at = values.index(choice[name])
                near = [values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)]
            else:
                near = list(values)
            for value in near:
                other = {**choice, name: value}
                if self.valid(other):
                    yield other


@dataclass(frozen=True)
class ListedSpace:
    """`choices` in an order in which neighbours are alike. They need not have the same parameters."""

    choices: tuple[Parameters, ...]
    default: Parameters

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for choice in (*self.choices, self.default) for name in choice)

    def all(self) -> Iterator[dict[str, Any]]:
        for choice in self.choices:
            if choice != self.default:
                yield dict(choice)

    def size(self) -> int:
        return sum(1 for _ in self.all())

    def sample(self, rng: random.Random) -> dict[str, Any] | None:
        return dict(rng.choice(self.choices)) if self.choices else None

    def neighbours(self, choice: Parameters) -> Iterator[dict[str, Any]]:
        """The one before and the one after; any of them for a choice that is not listed."""
        known = [dict(one) for one in self.choices]
        if dict(choice) not in known:
            yield from known
            return
        at = known.index(dict(choice))
        yield from (known[i] for i in (at - 1, at + 1) if 0 <= i < len(known))


Space = SearchSpace | ListedSpace
