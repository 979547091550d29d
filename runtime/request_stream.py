"""`RequestStream`: the text pieces of one request, queued on the engine's thread and read with `for` or `async for` on any
other. Whatever happens, a stream ends: with a finish reason, with an error, or because the engine closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from relaxpack.runtime.engine import TokenEvent
from relaxpack.runtime.request import FinishReason, Request, Sequence
from relaxpack.runtime.sampler import TokenLogprobs
from relaxpack.runtime.text_generation import TextStream


@dataclass(slots=True)
class Piece:
    """What is new in one output of a request. The last piece of each output has a finish reason."""

    index: int                                      # which of the n outputs
    text: str = ""                                  # held back while it may begin a stop string or a character
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None                # "stop", "length", "abort", "error"
    stop: str | int | None = None                   # the stop string or token id that ended it
    error: str | None = None

    def extend(self, more: Piece) -> None:
        """Add what came after it in the same output."""
        self.text += more.text
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.finish_reason, self.stop, self.error = more.finish_reason, more.stop, more.error


_BROKEN = (FinishReason.ERROR, FinishReason.ABORT)      # ends; strings of a piece equal them
_MOST = 64      # tokens of a piece: with log-probabilities each costs its reader's loop a while, and others wait for that


class RequestStream:
    """Pieces of one request, as they come. Read it from one thread or one task; leaving the `with` cancels the rest."""

    def __init__(self, cancel: Callable[[], None], request: Request, texts: list[TextStream] | None) -> None:
        """`cancel` ends what still runs, from any thread. `texts`: one for each output; None: token ids only."""
        self.request = request
        self._cancel = cancel
        self._texts = texts
        # With stop strings the engine must know at once; otherwise text is made where it is read, off its thread.
        self._eager = bool(texts and request.params.stop)
        self._open = request.params.n               # outputs without a last piece, as seen by the reader
        self._stopped: set[int] = set()             # outputs that a stop string has ended; engine thread only
        self._waiting: dict[int, list[Piece | TokenEvent]] = {}     # by output, the one that waits longest first
        self._arrived = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None

    @property
    def cached_tokens(self) -> int:
        return self.request.cached_tokens or 0

    def cancel(self) -> None:
        """End what still runs, as "abort". From any thread; pages are back before the next step."""
        self._cancel()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if not self._open:
            raise StopIteration
        with self._arrived:
            while not self._waiting:
                self._arrived.wait()
        return self._next()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if not self._open:
            raise StopAsyncIteration
        if self._wake is None:
            self._wake = asyncio.Event()
            self._loop = asyncio.get_running_loop()
        while not self._waiting:
            self._wake.clear()
            if not self._waiting:       # the engine appends first and wakes then, so nothing is missed
                await self._wake.wait()
        return self._next()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def collect(self) -> list[Piece]:
        """Wait for the end; one merged piece for each output, by index."""
        return _merge(list(self), self.request.params.n)

    async def collect_async(self) -> list[Piece]:
        return _merge([piece async for piece in self], self.request.params.n)

    def _next(self) -> Piece:
        """The next piece: a token of one output, or all of its tokens that wait. So a reader that falls behind, say because
        every piece costs it a chunk on a socket, has fewer pieces to read and never falls behind for good."""
        with self._arrived:
            index = next(iter(self._waiting))
            waiting = self._waiting.pop(index)
            # A broken end stays apart: who reads it drops its text.
            most = min(_MOST, max(1, len(waiting) - (waiting[-1].finish_reason in _BROKEN)))
            items, rest = waiting[:most], waiting[most:]
            if rest:
                self._waiting[index] = rest
        if self._eager:
            piece, *others = cast(list[Piece], items)
            for other in others:
                piece.extend(other)
        else:
            piece = self._piece(cast(list[TokenEvent], items))
        if piece.finish_reason is not None:
            self._open -= 1
        return piece

    def _piece(self, events: list[TokenEvent]) -> Piece:
        """Text of events of one output; an end token has none."""
        sequence, reason = events[-1].sequence, events[-1].finish_reason
        ids = [event.token_id for event in events if event.token_id is not None]
        piece = Piece(sequence.index, "", ids, [event.logprobs for event in events if event.logprobs is not None],
                      reason.value if reason is not None else None)
        stopped_by_token = reason is FinishReason.STOP and sequence.stop_token_id is not None
        if self._texts is not None:
            text = self._texts[sequence.index]
            piece.text = text.add(ids[:-1] if stopped_by_token else ids)
            if text.stop is not None:
                piece.finish_reason, piece.stop = FinishReason.STOP.value, text.stop
            elif reason is not None:
                piece.text += text.finish()
        if reason is not None and piece.stop is None:
            piece.error = sequence.error
            piece.stop = sequence.stop_token_id if stopped_by_token else None
        return piece

    def deliver(self, event: TokenEvent) -> Sequence | None:
        """On the engine's thread: queue an event; the sequence when a stop string has just ended it."""
        item: Piece | TokenEvent = event
        ended = None
        if self._eager:
            if event.sequence.index in self._stopped:
                return None             # the engine's own word on what a stop string has ended
            item = self._piece([event])
            if item.finish_reason is not None:
                self._stopped.add(event.sequence.index)
                ended = event.sequence if event.finish_reason is None else None
        with self._arrived:
            self._waiting.setdefault(event.sequence.index, []).append(item)
        return ended


def _merge(pieces: Iterable[Piece], count: int) -> list[Piece]:
    merged = [Piece(index) for index in range(count)]
    for piece in pieces:
        merged[piece.index].extend(piece)
    return merged


def wake(streams: Iterable[RequestStream]) -> None:
    """The readers of these streams, each once; those of one loop together."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for stream in streams:
        if stream._loop is not None and stream._wake is not None:
            by_loop.setdefault(stream._loop, []).append(stream._wake)
        else:
            with stream._arrived:
                stream._arrived.notify()
    for loop, events in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, events)
        except RuntimeError:        # the loop is closed: its readers are gone
            continue


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
