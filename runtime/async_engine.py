"""`AsyncEngine`: one engine in its own thread, shared by any number of threads and asyncio tasks. Every request gets a
`RequestStream`. HTTP is not known here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TypeVar

from relaxpack.errors import RelaxpackError
from relaxpack.runtime.engine import Engine, TokenEvent
from relaxpack.runtime.metrics import EngineMetrics
from relaxpack.runtime.pooling import EmbeddingParams
from relaxpack.runtime.request import FinishReason, Request, SequenceStatus
from relaxpack.runtime.request_stream import RequestStream, wake
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.text_generation import TextStream
from relaxpack.runtime.tokenizer import Tokenizer

T = TypeVar("T")


class EngineClosed(RelaxpackError):
    """The engine takes no more requests: it is closing, or it failed (the message says why)."""


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
        return self._start(request, texts)

    def submit_embedding(self, prompt_ids: Sequence[int], params: EmbeddingParams | None = None, *,
                         request_id: str | None = None, salt: str = "") -> RequestStream:
        """Start an embedding of a prompt, from any thread; its one piece is the end, and then `request.embedding` is
        there. Raises RequestError at once for what can never be answered."""
        request = self._engine.prepare_embedding(prompt_ids, params, request_id=request_id, salt=salt)
        return self._start(request, None)

    def _start(self, request: Request, texts: list[TextStream] | None) -> RequestStream:
        stream = RequestStream(lambda: self._post(lambda engine: engine.cancel(request)), request, texts)

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
        ends: list[RequestStream] = []
        for event in events:
            stream = self._streams.get(event.request)
            if stream is None:
                continue
            ended = stream.deliver(event)
            if ended is not None:
                self._engine.finish(ended, FinishReason.STOP)
            if ended is not None or event.finish_reason is not None:
                ends.append(stream)
            touched[stream] = None
        for stream in ends:         # only now: a step may end several outputs of one request
            if stream.request.finished:
                self._streams.pop(stream.request, None)
        wake(touched)

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
