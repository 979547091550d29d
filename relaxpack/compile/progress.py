"""What a front end may show of a build while it runs, and the seconds of its stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Stage = Callable[[str, int | None], AbstractContextManager[None]]


class Progress(Protocol):
    """What a front end may show. `total` counts steps of the stage, or is None where it is one step."""

    def stage(self, name: str, total: int | None = None) -> None: ...
    def advance(self, what: str = "") -> None: ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str, total: int | None = None) -> None:
        return None

    def advance(self, what: str = "") -> None:
        return None


class Stages:
    """Tells `shown` of each stage and adds up its seconds, which two stages of one name share."""

    def __init__(self, shown: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._shown = shown

    @contextmanager
    def __call__(self, name: str, total: int | None = None) -> Iterator[None]:
        self._shown.stage(name, total)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)
