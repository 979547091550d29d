"""`AsyncEngine`: one engine in its own thread, shared by any number of threads and asyncio tasks.

Every request gets a `RequestStream` of text pieces, to be read with `for` or `async for`. Whatever happens, a stream ends:
with a finish reason, with an error, or because the engine closed. HTTP is not known here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from relaxpack.errors import RelaxpackError
from relaxpack.runtime.engine import Engine, TokenEvent
from relaxpack.runtime.metrics import EngineMetrics
from relaxpack.runtime.pooling import EmbeddingParams
from relaxpack.runtime.request import FinishReason, Request, SequenceStatus
from relaxpack.runtime.request import Sequence as EngineSequence
from relaxpack.runtime.sampler import TokenLogprobs
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.text_generation import TextStream
from relaxpack.runtime.tokenizer import Tokenizer

T = TypeVar("T")


class EngineClosed(RelaxpackError):
    """The engine takes no more requests: it is closing, or it failed (the message says why)."""


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


class RequestStream:
    """Pieces of one request, as they come. Read it from one thread or one task; leaving the `with` cancels the rest."""

    def __init__(self, owner: AsyncEngine, request: Request, texts: list[TextStream] | None) -> None:
        self.request = request
        self._owner = owner
        self._texts = texts
        # With stop strings the engine must know at once; otherwise text is made where it is read, off its thread.
        self._eager = bool(texts and request.params.stop)
        self._open = request.params.n               # outputs without a last piece, as seen by the reader
        self._stopped: set[int] = set()             # outputs that a stop string has ended; engine thread only
        self._items: deque[Piece | TokenEvent] = deque()
        self._arrived = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None

    @property
    def cached_tokens(self) -> int:
        return self.request.cached_tokens or 0

    def cancel(self) -> None:
        """End what still runs, as "abort". From any thread; pages are back before the next step."""
        self._owner._post(lambda engine: engine.cancel(self.request))

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if not self._open:
            raise StopIteration
        with self._arrived:
            while not self._items:
                self._arrived.wait()
            item = self._items.popleft()
        return self._read(item)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if not self._open:
            raise StopAsyncIteration
        if self._wake is None:
            self._wake = asyncio.Event()
            self._loop = asyncio.get_running_loop()
        while not self._items:
            self._wake.clear()
            if not self._items:         # the engine appends first and wakes then, so nothing is missed
                await self._wake.wait()
        return self._read(self._items.popleft())

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

    def _read(self, item: Piece | TokenEvent) -> Piece:
        piece = item if isinstance(item, Piece) else self._piece(item)
        if piece.finish_reason is not None:
            self._open -= 1
        return piece

    def _piece(self, event: TokenEvent) -> Piece:
        """Text of an event; an end token has none."""
        sequence, reason = event.sequence, event.finish_reason
        piece = Piece(sequence.index, finish_reason=reason.value if reason is not None else None)
        if event.token_id is not None:
            piece.token_ids.append(event.token_id)
            if event.logprobs is not None:
                piece.logprobs.append(event.logprobs)
        stopped_by_token = reason is FinishReason.STOP and sequence.stop_token_id is not None
        if self._texts is not None:
            text = self._texts[sequence.index]
            if event.token_id is not None and not stopped_by_token:
                piece.text = text.add([event.token_id])
            if text.stop is not None:
                piece.finish_reason, piece.stop = FinishReason.STOP.value, text.stop
            elif reason is not None:
                piece.text += text.finish()
        if reason is not None and piece.stop is None:
            piece.error = sequence.error
            piece.stop = sequence.stop_token_id if stopped_by_token else None
        return piece

    def _deliver(self, event: TokenEvent) -> EngineSequence | None:
        """On the engine's thread: queue an event; the sequence when a stop string has just ended it."""
        item: Piece | TokenEvent = event
        ended = None
        if self._eager:
            if event.sequence.index in self._stopped:
                return None             # the engine's own word on what a stop string has ended
            item = self._piece(event)
            if item.finish_reason is not None:
                self._stopped.add(event.sequence.index)
                ended = event.sequence if event.finish_reason is None else None
        self._items.append(item)
        return ended


def _merge(pieces: Iterable[Piece], count: int) -> list[Piece]:
    merged = [Piece(index) for index in range(count)]
    for piece in pieces:
        whole = merged[piece.index]
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.finish_reason, whole.stop, whole.error = piece.finish_reason, piece.stop, piece.error
    return merged


class AsyncEngine:
    def __init__(self, engine: Engine, tokenizer: Tokenizer | None = None) -> None:
        """Starts the thread. Without a tokenizer pieces have token ids only, and stop strings are refused."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._streams: dict[Request, RequestStream] = {}        # engine thread only
        self._commands: deque[Callable[[Engine], list[TokenEvent] | None]] = deque()
        self._changed = threading.Condition()
        self._refusal: str | None = None                        # why no more requests are taken
        self._stop_at: float | None = None                      # when closing must have ended
        self._thread = threading.Thread(target=self._run, name="relaxpack-engine", daemon=True)
        self._thread.start()

    @property
    def metrics(self) -> EngineMetrics:
        return self._engine.metrics

    @property
    def max_tokens(self) -> int:
        return self._engine.max_tokens

    @property
    def max_batch(self) -> int:
        """Sequences that a step may have."""
        return self._engine.runner.max_batch

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding; 0 where the model computes none."""
        return self._engine.embedding_size

    @property
    def generates(self) -> bool:
        """False for a bundle that computes embeddings only."""
        return self._engine.generates

    @property
    def healthy(self) -> bool:
        """Takes requests."""
        return self._refusal is None and self._thread.is_alive()

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams | None = None, *, request_id: str | None = None,
        salt: str = "", continuation: bool = False, show: Iterable[str] = (),
    ) -> RequestStream:
        """Start a request, from any thread. Raises RequestError at once for what can never be answered.

        A new grammar is compiled here, which can take a second: from asyncio call it with `asyncio.to_thread` then.
        `continuation` and `show` as in `Tokenizer.detokenizer`.
        """
        request = self._engine.prepare(prompt_ids, params, request_id=request_id, salt=salt)
        texts = None
        if self._tokenizer is not None:
            show = tuple(show)
            texts = [TextStream(self._tokenizer.detokenizer(continuation=continuation, show=show), request.params.stop)
                     for _ in range(request.params.n)]
        elif request.params.stop:
            raise RelaxpackError("stop strings need an engine with a tokenizer")
        return self._start(RequestStream(self, request, texts))

    def submit_embedding(self, prompt_ids: Sequence[int], params: EmbeddingParams | None = None, *,
                         request_id: str | None = None, salt: str = "") -> RequestStream:
        """Start an embedding of a prompt, from any thread; its one piece is the end, and then `request.embedding` is
        there. Raises RequestError at once for what can never be answered."""
        request = self._engine.prepare_embedding(prompt_ids, params, request_id=request_id, salt=salt)
        return self._start(RequestStream(self, request, None))

    def _start(self, stream: RequestStream) -> RequestStream:
        request = stream.request

        def admit(engine: Engine) -> list[TokenEvent] | None:
            self._streams[request] = stream
            try:
                engine.admit(request)
            except RelaxpackError as error:
                return self._end_all([request], FinishReason.ERROR, str(error))
            return None

        self._post(admit, refuse=True)
        return stream

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps, for what is not safe elsewhere."""
        future: Future[T] = Future()

        def run(engine: Engine) -> None:
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)

        self._post(run, refuse=True)
        return future

    def close(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, let running ones finish for so long, abort the rest, and end the thread."""
        with self._changed:
            self._refusal = self._refusal or "the engine is shutting down"
            self._stop_at = time.monotonic() + drain_seconds
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self.close()

    def _post(self, command: Callable[[Engine], list[TokenEvent] | None], refuse: bool = False) -> None:
        with self._changed:
            if refuse and self._refusal is not None:
                raise EngineClosed(self._refusal)
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._give_up(FinishReason.ABORT, "the engine was shut down")
        except BaseException as error:      # a bug of ours: nobody may wait for ever because of it
            message = f"the engine failed and is stopped: {type(error).__name__}: {error}"
            self._give_up(FinishReason.ERROR, message)
            if not isinstance(error, Exception):
                raise

    def _turn(self) -> bool:
        """Commands, then one step; False when it is time to end."""
        with self._changed:
            while not self._commands and not self._engine.has_work and self._stop_at is None:
                self._changed.wait()
            commands = list(self._commands)
            self._commands.clear()
            stop_at = self._stop_at
        for command in commands:
            self._deliver(command(self._engine) or [])
        if stop_at is not None and (not self._engine.has_work or time.monotonic() >= stop_at):
            return False
        if self._engine.has_work:
            self._deliver(self._engine.step())
        return True

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Hand events to their streams, and wake each reader once."""
        touched: dict[RequestStream, None] = {}
        for event in events:
            stream = self._streams.get(event.request)
            if stream is None:
                continue
            ended = stream._deliver(event)
            if ended is not None:
                self._engine.finish(ended, FinishReason.STOP)
            touched[stream] = None
        for stream in touched:      # only now: a step may end several outputs of one request
            if stream.request.finished:
                self._streams.pop(stream.request, None)
        _wake(touched)

    def _end_all(self, requests: Iterable[Request], reason: FinishReason, message: str) -> list[TokenEvent]:
        """Last events for outputs that have none, made without the engine's help."""
        events = []
        for request in requests:
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason, sequence.error = reason, message
                    sequence.status = SequenceStatus.FINISHED
                    events.append(TokenEvent(request, sequence, None, finish_reason=reason))
        return events

    def _give_up(self, reason: FinishReason, message: str) -> None:
        """End every stream, those included whose requests wait in commands that nobody will run."""
        with self._changed:
            self._refusal = self._refusal if reason is FinishReason.ABORT and self._refusal else message
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            try:
                self._deliver(command(self._engine) or [])
            except Exception as error:
                message = f"{message} ({error})"
        requests = list(self._streams)
        if reason is FinishReason.ABORT:
            for request in requests:
                self._deliver(self._engine.cancel(request))
        self._deliver(self._end_all(requests, reason, message))


def _wake(streams: Iterable[RequestStream]) -> None:
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
