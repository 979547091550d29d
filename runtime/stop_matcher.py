"""`StopMatcher`: ends a text stream at the first stop string, sending nothing of it.

Text is held back only while it could be the beginning of a stop string. Works on characters of decoded
text; end tokens are the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxpack.errors import RequestError


def _failure_table(stop: str) -> list[int]:
    """`table[n]`: length of the longest proper prefix of `stop` that ends `stop[:n]` (Knuth, Morris and
    Pratt)."""
    table = [0] * (len(stop) + 1)
    state = 0
    for n in range(1, len(stop)):
        while state and stop[n] != stop[state]:
            state = table[state]
        state += stop[n] == stop[state]
        table[n + 1] = state
    return table


class StopMatcher:
    """Feed text with `add`; `matched` names the stop string once it was met.

    The result does not depend on how the text is split: the stop that is complete first wins, and of
    several that end at the same character the longest.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop strings must be non-empty strings, got {stop!r}: "
                                   "leave stop out for none", param="stop")
        self._stops = stops
        self._tables = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """The text that may be sent now. After a match everything further is swallowed."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        window = self._held + text
        for n, char in enumerate(text):
            ended = self._advance(char)
            if ended:
                self.matched = max(ended, key=len)
                end = len(self._held) + n + 1
                self._held = ""
                return window[:end - len(self.matched)]
        keep = max(self._states)
        self._held = window[len(window) - keep:]
        return window[:len(window) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> list[str]:
        """Move every state over one character; the stops that are complete now."""
        ended = []
        for index, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = table[state]
            self._states[index] = state + (stop[state] == char)
            if self._states[index] == len(stop):
                ended.append(stop)
        return ended
