"""`TextGenerator`: prompts in, streamed text out, over an engine in this thread.

Adds to the engine what it does not know: detokenizing, stop strings, timings in words a user reads. Prompts are token
ids here; chat templates and histories are above. Threads may share a generator: whoever needs a token steps the engine
for all. For many clients or HTTP, see `async_engine.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import numpy as np

from relaxpack.errors import EnvironmentProblem, RequestError
from relaxpack.runtime.detokenizer import Detokenizer
from relaxpack.runtime.engine import Engine, TokenEvent
from relaxpack.runtime.pooling import EmbeddingParams
from relaxpack.runtime.request import FinishReason, Request, SequenceStatus
from relaxpack.runtime.sampler import TokenLogprobs
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.stop_matcher import StopMatcher
from relaxpack.runtime.tokenizer import Tokenizer
from relaxpack.runtime.tool_calls import ToolCall

_TURN = 0.002   # seconds that a thread waits for the engine before it looks at its events again


@dataclass(frozen=True)
class Timings:
    """Seconds and token counts of one answer. `prefill_seconds` ends with the first token and includes waiting."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_seconds: float
    decode_seconds: float
    answers: int = 0

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens per second."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Output tokens after the first, per second."""
        return _rate(self.output_tokens - self.answers, self.decode_seconds)

    def plus(self, other: Timings) -> Timings:
        return Timings(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def _rate(count: int, seconds: float) -> float:
    return max(count, 0) / seconds if seconds > 0 else 0.0


@dataclass(repr=False)
class Completion:
    """One answer. `token_ids` includes an end token; `text` has neither it nor a stop string. `str()` is the text."""

    prompt_index: int                       # which of the prompts given together
    index: int                              # which of the n answers to it
    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None     # of prompt_ids[1:]
    finish_reason: str | None = None
    stop: str | int | None = None           # the stop string or token id that ended it
    tool_calls: list[ToolCall] = field(default_factory=list)   # taken out of the text; only where tools were given
    error: str | None = None
    timings: Timings | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Completion({self.text!r}, finish_reason={self.finish_reason!r}, {len(self.token_ids)} tokens)"


class TextStream:
    """One output's text: detokenizer and stop strings in line."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._matcher.matched

    def add(self, ids: Iterable[int]) -> str:
        return self._matcher.add(self._detokenizer.add(ids))

    def finish(self) -> str:
        return self._matcher.add(self._detokenizer.finish()) + self._matcher.finish()


class TextGenerator:
    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._inboxes: dict[str, deque[TokenEvent]] = {}    # by request; streams may take turns stepping the engine
        self._process = os.getpid()
        self._lock = threading.RLock()      # held around every call of the engine, which belongs to one thread at a time
        self._guests: set[object] = set()   # who wants the lock for less than a step
        self._guest_left = threading.Condition()

    def stream(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *,
               continuation: bool = False, show: Iterable[str] = (), salt: str = "",
               cancelled: Callable[[], bool] = lambda: False) -> Iterator[tuple[Completion, str]]:
        """Answer prompts together; gives (completion so far, its new text) for every token, text perhaps empty.

        A completion is done when its `finish_reason` is set. `continuation`: the text goes on after the prompt.
        `cancelled` is asked between steps; then, or when the iterator is closed, what runs ends as "abort".
        """
        self._refuse_fork()
        requests: list[Request] = []
        inbox: deque[TokenEvent] = deque()
        outputs: dict[tuple[str, int], tuple[Completion, TextStream]] = {}
        try:
            for number, prompt_ids in enumerate(prompts):
                with self._as_guest():
                    request = self.engine.add(prompt_ids, params, salt=salt)
                    requests.append(request)
                    self._inboxes[request.id] = inbox
                for index in range(params.n):
                    detokenizer = self.tokenizer.detokenizer(continuation=continuation, show=show)
                    outputs[request.id, index] = (Completion(number, index, request.prompt_ids),
                                                  TextStream(detokenizer, params.stop))
            while self._advance(inbox, requests, cancelled):
                while inbox:
                    event = inbox.popleft()
                    completion, text_stream = outputs[event.request.id, event.sequence.index]
                    if completion.finish_reason is None:     # else more tokens came before its stop string was seen
                        yield self._apply(event, completion, text_stream)
        finally:
            self._drop(requests)

    def embed(self, prompts: Sequence[Sequence[int]], params: EmbeddingParams | None = None, *,
              salt: str = "") -> np.ndarray:
        """float32 [prompts, H]: the pooled last hidden states of prompts, computed together."""
        self._refuse_fork()
        requests: list[Request] = []
        inbox: deque[TokenEvent] = deque()
        try:
            for prompt_ids in prompts:
                with self._lock:
                    request = self.engine.admit(self.engine.prepare_embedding(prompt_ids, params, salt=salt))
                    requests.append(request)
                    self._inboxes[request.id] = inbox
            while self._advance(inbox, requests, lambda: False):
                inbox.clear()
        finally:
            self._drop(requests)
        for number, request in enumerate(requests):
            if request.embedding is None:
                raise RequestError(f"input {number}: {request.sequences[0].error}")
        size = self.engine.embedding_size if params is None or params.dimensions is None else params.dimensions
        return np.array([request.embedding for request in requests], np.float32).reshape(len(requests), size)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise EnvironmentProblem(f"this model was loaded in process {self._process}, and its threads do not live on in "
                                     "a fork: load it in the new process, and start that with multiprocessing's 'spawn'")

    def _advance(self, inbox: deque[TokenEvent], requests: Sequence[Request], cancelled: Callable[[], bool]) -> bool:
        """Step the engine unless events wait already. False where neither events nor unfinished requests are left."""
        while not self._step_lock():
            if inbox:                        # another thread's steps bring this one's events too
                return True
        try:
            if not inbox:
                if all(request.finished for request in requests):
                    return False
                self._deliver(self.engine.step())
                if cancelled():
                    for request in requests:
                        self._deliver(self.engine.cancel(request))
            return True
        finally:
            self._lock.release()

    def _drop(self, requests: Iterable[Request]) -> None:
        """End what still runs of them."""
        with self._as_guest():
            for request in requests:
                self.engine.cancel(request)
                self._inboxes.pop(request.id, None)

    @contextmanager
    def _as_guest(self) -> Iterator[None]:
        """The engine between two steps. A thread that steps would mostly have its lock again before another one wakes up, so
        it lets guests in first; else a new request waited for the end of an answer that runs."""
        guest = object()
        self._guests.add(guest)
        try:
            with self._lock:
                yield
        finally:
            self._guests.discard(guest)
            with self._guest_left:
                self._guest_left.notify_all()

    def _step_lock(self) -> bool:
        """Take the lock for a step, guests first; False where that lasts longer than a turn."""
        with self._guest_left:
            if not self._guest_left.wait_for(lambda: not self._guests, _TURN):
                return False
        return self._lock.acquire(timeout=_TURN)

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            if (inbox := self._inboxes.get(event.request.id)) is not None:
                inbox.append(event)

    def complete(self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, continuation: bool = False,
                 show: Iterable[str] = (), salt: str = "") -> list[Completion]:
        """All answers, by prompt and then by index."""
        pieces = self.stream(prompts, params, continuation=continuation, show=show, salt=salt)
        done = [completion for completion, _ in pieces if completion.finish_reason]
        return sorted(done, key=lambda completion: (completion.prompt_index, completion.index))

    def _apply(self, event: TokenEvent, completion: Completion, stream: TextStream) -> tuple[Completion, str]:
        sequence, text = event.sequence, ""
        if event.token_id is not None:
            completion.token_ids.append(event.token_id)
            if event.logprobs is not None:
                completion.logprobs = [*(completion.logprobs or ()), event.logprobs]
            # The sequence may be ahead of its events: only the last of them can be the end token.
            if event.finish_reason is None or sequence.stop_token_id is None:
                text = stream.add([event.token_id])
        reason = event.finish_reason
        if stream.stop is not None:
            with self._as_guest():
                if sequence.status is not SequenceStatus.FINISHED:
                    self.engine.finish(sequence, FinishReason.STOP)
        if reason is not None:
            text += stream.finish()
        if stream.stop is not None:
            reason = FinishReason.STOP
        completion.text += text
        if reason is not None:
            completion.finish_reason = reason.value
            completion.stop = stream.stop if stream.stop is not None else sequence.stop_token_id
            completion.error = sequence.error
            if event.request.params.prompt_logprobs is not None:
                completion.prompt_logprobs = event.request.prompt_logprobs
            completion.timings = _timings(event.request, len(completion.token_ids))
        return completion, text


def _timings(request: Request, output_tokens: int) -> Timings:
    now = request.finish_time if request.finish_time is not None else time.monotonic()
    first = request.first_token_time if request.first_token_time is not None else now
    return Timings(len(request.prompt_ids), request.cached_tokens or 0, output_tokens,
                   first - request.arrival_time, now - first, answers=1)
