"""Waiting for what must happen, however slow the machine is: a deadline nobody meets by chance, and a gate that stops a
model between two steps, so that a test decides what happens while it is in the middle of an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DEADLINE = 120.0     # seconds; only a test that fails ever takes so long


def eventually(check: Callable[[], object], what: str = "it", seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} seconds"
        time.sleep(0.005)


class Gate:
    """Open, unless a test holds it: `allow(n)` lets n more steps through, then the engine stands before the next one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: int | None = None     # None: any number
        self._waiting = False

    def step(self) -> None:
        """Called by a runner at the start of each step."""
        with self._changed:
            self._waiting = True
            if not self._changed.wait_for(lambda: self._allowed != 0, 3 * DEADLINE):
                raise TimeoutError("the test never opened the gate")
            self._waiting = False
            if self._allowed is not None:
                self._allowed -= 1

    def allow(self, steps: int | None) -> None:
        with self._changed:
            self._allowed = steps
            self._changed.notify_all()

    @property
    def holds(self) -> bool:
        """A step stands before the gate, and all that were allowed are through."""
        with self._changed:
            return self._waiting and self._allowed == 0

    @contextmanager
    def held(self, steps: int = 0) -> Iterator[Gate]:
        """`steps` more, then none until the end of the block."""
        self.allow(steps)
        try:
            yield self
        finally:
            self.allow(None)
