"""`Engine`: the step loop. It plans, runs, samples and updates, and reports every new token as an event.

Token ids in, token ids out: text, HTTP and threads live in the layers above. An engine belongs to one thread; see
`async_engine` for sharing it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relaxpack.errors import RequestError
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.metrics import EngineMetrics
from relaxpack.runtime.pooling import EmbeddingParams
from relaxpack.runtime.request import FinishReason, Request, Sequence, SequenceStatus
from relaxpack.runtime.request_maker import RequestMaker
from relaxpack.runtime.run_ahead import AheadExecutor, RunAhead
from relaxpack.runtime.sampler import Constraint, TokenLogprobs
from relaxpack.runtime.sampling_params import Grammar, SamplingParams
from relaxpack.runtime.scheduler import ScheduledStep, Scheduler
from relaxpack.runtime.spread import SPREAD
from relaxpack.runtime.step_plan import ModelRunner, StepExecutor, StepResult, StepSampling

if TYPE_CHECKING:
    import numpy as np


HIDDEN_NOT_FINITE = ("the model returned hidden states that are not finite; its activations overflowed or its weights are "
                     "damaged (run `relaxpack verify` on the bundle)")


@dataclass(slots=True)
class TokenEvent:
    """Something happened to one sequence: a new token, its end, or both.

    `token_id` is None when it ended without a new token (abort, error). A token that ends the output by its id is
    reported, with `sequence.stop_token_id` set: the text layer leaves it out. An embedding request has one event, its
    end.
    """

    request: Request
    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Choice:
    index: int
    token_ids: list[int]                    # the token that ended it by its id included
    finish_reason: FinishReason
    stop_token_id: int | None
    logprobs: list[TokenLogprobs] | None
    error: str | None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt_ids: list[int]
    choices: list[Choice]
    cached_tokens: int                      # prompt tokens found in the prefix cache
    prompt_logprobs: list[TokenLogprobs] | None     # of prompt_ids[1:]
    time_to_first_token: float | None       # seconds since the request was added
    seconds: float                          # until its last token


class Engine:
    def __init__(
        self, runner: ModelRunner, *, end_token_ids: Iterable[int] = (), executor: StepExecutor | None = None,
        prefix_caching: bool = True, token_budget: int | None = None, exact: bool = True,
        make_constraint: Callable[[Grammar], Constraint] | None = None,
    ) -> None:
        """`token_budget`: most tokens in a step that prefills, at most and by default the runner's prefill_chunk.

        `exact`: the same greedy output under any load, also where decode and prefill kernels round differently, at the
        price that a preempted sequence computes its output tokens again one by one (see `scheduler`).

        `make_constraint` compiles `SamplingParams.grammar`; without it such requests are refused.
        """
        if token_budget is not None and not 1 <= token_budget <= runner.prefill_chunk:
            raise RequestError(f"token_budget must be from 1 to {runner.prefill_chunk}, got {token_budget}")
        max_logit_rows = getattr(runner, "max_logit_rows", None)
        if max_logit_rows is not None and max_logit_rows < runner.max_batch:
            raise ValueError(f"runner has {max_logit_rows} logit rows for a batch of {runner.max_batch}")
        self.runner = runner
        self.executor = executor if executor is not None else HostExecutor(runner)
        self.end_token_ids = frozenset(end_token_ids)
        self.scheduler = Scheduler(
            page_size=runner.page_size, num_pages=runner.num_pages, max_batch=runner.max_batch,
            token_budget=token_budget or runner.prefill_chunk, max_logit_rows=max_logit_rows,
            prefix_caching=prefix_caching, exact=exact)
        self._ahead = RunAhead(self.executor, self.scheduler) if isinstance(self.executor, AheadExecutor) else None
        self._maker = RequestMaker(runner, self.scheduler.capacity, self.end_token_ids, make_constraint)
        self.metrics = EngineMetrics(pages_total=self.scheduler.pool.total)
        self._requests: dict[str, Request] = {}
        self._update_gauges()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding; 0 where the runner computes none."""
        return self._maker.embedding_size

    @property
    def generates(self) -> bool:
        """False for a bundle that computes embeddings only."""
        return self._maker.generates

    @property
    def max_tokens(self) -> int:
        """Most tokens a sequence may have, prompt included."""
        return self._maker.max_tokens

    def add(
        self, prompt_ids: Seq[int], params: SamplingParams | None = None, *, request_id: str | None = None,
        salt: str = "",
    ) -> Request:
        """Queue a request. Raises RequestError when it can never be answered."""
        return self.admit(self.prepare(prompt_ids, params, request_id=request_id, salt=salt))

    def prepare(
        self, prompt_ids: Seq[int], params: SamplingParams | None = None, *, request_id: str | None = None,
        salt: str = "",
    ) -> Request:
        """Check a request and compile its grammar. Changes nothing, so any thread may call it; then `admit` it."""
        return self._maker.generation(prompt_ids, params, request_id, salt)

    def prepare_embedding(
        self, prompt_ids: Seq[int], params: EmbeddingParams | None = None, *, request_id: str | None = None,
        salt: str = "",
    ) -> Request:
        """As `prepare`, for the pooled last hidden states of a prompt: `admit` it, and when it is finished its
        `embedding` is there."""
        return self._maker.embedding(prompt_ids, params, request_id, salt)

    def admit(self, request: Request) -> Request:
        """Queue a prepared request."""
        if request.id in self._requests:
            raise RequestError(f"a request with id {request.id!r} is already running: choose another id")
        self._requests[request.id] = request
        self.scheduler.add(request.sequences[0])        # the others fork from it where the prompt ends
        self.metrics.requests += 1
        self._update_gauges()
        return request

    def cancel(self, request: Request | str) -> list[TokenEvent]:
        """Abort a request, between two steps; unknown and finished ones are ignored."""
        found = self._requests.get(request if isinstance(request, str) else request.id)
        if found is None or (isinstance(request, Request) and found is not request):
            return []
        return [self.finish(s, FinishReason.ABORT) for s in found.sequences if s.status is not SequenceStatus.FINISHED]

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """End one sequence from outside, between two steps: a stop string was met, the client left."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._end(sequence, reason, error)
            self._update_gauges()
        return TokenEvent(sequence.request, sequence, None, finish_reason=reason)

    def step(self) -> list[TokenEvent]:
        """Run one step; an error of the runner ends the sequences that were in the step, with that error."""
        step = self.scheduler.plan()
        if step is None:
            return []
        started = time.monotonic()
        sampling = StepSampling(step.rows, [s.sampling for s in step.sampled], step.prompt_scores)
        try:
            submit = self._ahead.submit(step, sampling) if self._ahead else self.executor.submit(step.plan, sampling)
            result = submit.result()
        except Exception as error:
            return self._fail(step, error)
        except BaseException as error:      # Ctrl-C: what the step was computing must not be reused
            self._fail(step, error)
            raise
        events = self._update(step, result)
        self.metrics.step_seconds.add(time.monotonic() - started)
        return events

    def _update(self, step: ScheduledStep, result: StepResult) -> list[TokenEvent]:
        self.scheduler.update(step)
        for scored, prompt_logprobs in zip(step.scored, result.prompt_logprobs, strict=True):
            scored.prompt_logprobs.append(prompt_logprobs)
        now = time.monotonic()
        events = []
        logprobs_of = result.logprobs
        for i, (sequence, token_id) in enumerate(zip(step.sampled, result.token_ids, strict=True)):
            request = sequence.request
            if token_id < 0:
                self._end(sequence, FinishReason.ERROR, result.errors[i])
                events.append(TokenEvent(request, sequence, None, finish_reason=FinishReason.ERROR))
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            logprobs = logprobs_of[i] if logprobs_of is not None else None
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            if request.first_token_time is None:
                self._first_token(request, now)
            event = TokenEvent(request, sequence, token_id, logprobs)
            if token_id in request.end_ids:
                sequence.stop_token_id = token_id
                event.finish_reason = FinishReason.STOP
            elif len(token_ids) >= request.token_limit:
                event.finish_reason = FinishReason.LENGTH
            error = None
            constraint = sequence.sampling.constraint
            if constraint is not None and event.finish_reason is not FinishReason.STOP:
                error = _refusal(constraint, token_id)
                if error is not None:
                    event.finish_reason = FinishReason.ERROR
                elif constraint.complete:
                    event.finish_reason = FinishReason.STOP
            if event.finish_reason is not None:
                self._end(sequence, event.finish_reason, error)
            events.append(event)
        outputs = len(events) - len(result.errors)
        if result.hidden is not None:
            events += self._pool(step, result.hidden)
        metrics = self.metrics
        metrics.steps += 1
        metrics.output_tokens += outputs
        metrics.computed_tokens += sum(step.counts)
        self._update_gauges()
        return events

    def _pool(self, step: ScheduledStep, hidden: np.ndarray) -> list[TokenEvent]:
        """Give hidden states to the embedding requests of a step; the ends of those that are complete."""
        events, row = [], 0
        for sequence, part in zip(step.sequences, step.plan.sequences, strict=True):
            if not part.hidden:
                continue
            request, rows = sequence.request, len(part.logit_offsets)
            assert request.pooler is not None
            request.pooler.add(part.start, len(part.token_ids), hidden[row:row + rows])
            row += rows
            if sequence.computed < sequence.num_prompt:
                continue
            request.embedding = request.pooler.embedding()
            failed = request.embedding is None
            reason = FinishReason.ERROR if failed else FinishReason.STOP
            self._count_prompt(request)
            self._end(sequence, reason, HIDDEN_NOT_FINITE if failed else None)
            events.append(TokenEvent(request, sequence, None, finish_reason=reason))
        return events

    def _first_token(self, request: Request, now: float) -> None:
        request.first_token_time = now
        self.metrics.time_to_first_token.add(now - request.arrival_time)
        self._count_prompt(request)

    def _count_prompt(self, request: Request) -> None:
        self.metrics.prompt_tokens += len(request.prompt_ids)
        self.metrics.cached_tokens += request.cached_tokens or 0

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.finish(sequence)
        sequence.finish_reason = reason
        sequence.error = error
        request, metrics = sequence.request, self.metrics
        metrics.finished[reason.value] = metrics.finished.get(reason.value, 0) + 1
        outputs = len(sequence.token_ids) - sequence.num_prompt
        if outputs > 1 and request.first_token_time is not None:
            metrics.time_per_token.add((time.monotonic() - request.first_token_time) / (outputs - 1))
        if request.finished:
            request.finish_time = time.monotonic()
            self._requests.pop(request.id, None)

    def _fail(self, step: ScheduledStep, error: BaseException) -> list[TokenEvent]:
        if self._ahead:
            self._ahead.forget()
        self.metrics.failed_steps += 1
        message = f"the model failed while computing this step: {type(error).__name__}: {error}"
        self.scheduler.abandon(step)
        involved = dict.fromkeys([*step.sequences, *step.sampled])
        involved |= dict.fromkeys(s for first in step.sequences for s in first.request.sequences
                                  if first.index == 0 and len(first.token_ids) == first.num_prompt)
        for sequence in involved:
            self._end(sequence, FinishReason.ERROR, message)
        self._update_gauges()
        return [TokenEvent(s.request, s, None, finish_reason=FinishReason.ERROR) for s in involved]

    def _update_gauges(self) -> None:
        scheduler, metrics = self.scheduler, self.metrics
        pool = scheduler.pool
        metrics.running, metrics.waiting = len(scheduler.running), len(scheduler.waiting)
        metrics.pages_free, metrics.pages_cached, metrics.pages_held = pool.num_free, pool.num_cached, pool.num_held
        metrics.preemptions, metrics.evictions = scheduler.preemptions, pool.evictions
        # A runner without graphs counts neither.
        graph_steps: dict[str, int] = getattr(self.runner, "graph_steps", {})
        metrics.graph_steps, metrics.spread_steps = sum(graph_steps.values()), graph_steps.get(SPREAD, 0)
        metrics.eager_steps = sum(getattr(self.runner, "eager_steps", {}).values())

    def generate(
        self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams] | None = None, *, salt: str = "",
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer several prompts together, in their order. `on_event` sees every event as it happens."""
        each = params if isinstance(params, list | tuple) else [params] * len(prompts)
        requests: list[Request] = []
        try:
            for prompt_ids, own in zip(prompts, each, strict=True):
                requests.append(self.add(prompt_ids, own, salt=salt))
            while not all(r.finished for r in requests):
                for event in self.step():
                    if on_event is not None:
                        on_event(event)
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return [output_of(r) for r in requests]


def _refusal(constraint: Constraint, token_id: int) -> str | None:
    """Why the output ends with this token, though the mask had allowed it."""
    try:
        return None if constraint.accept(token_id) else f"the grammar does not allow token {token_id}"
    except RequestError as error:
        return str(error)


def output_of(request: Request) -> RequestOutput:
    """The result of a finished request."""
    wants = request.params.logprobs is not None
    choices = [
        Choice(s.index, s.output_ids, s.finish_reason or FinishReason.ERROR, s.stop_token_id,
               s.logprobs if wants else None, s.error)
        for s in request.sequences
    ]
    first = request.first_token_time
    return RequestOutput(
        request_id=request.id, prompt_ids=request.prompt_ids, choices=choices,
        cached_tokens=request.cached_tokens or 0,
        prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs is not None else None,
        time_to_first_token=None if first is None else first - request.arrival_time,
        seconds=(request.finish_time or time.monotonic()) - request.arrival_time)
