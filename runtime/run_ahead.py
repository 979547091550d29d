"""`RunAhead`: while the tokens of a decode step are still on their way, the next step already runs.

The next step is predicted: the same sequences, each one token further, fed with the tokens that stay on the device. If
the scheduler then plans just that step, its result is there; if not (a sequence ended, a request arrived), the result is
dropped. A dropped step does no harm: it wrote only to slots behind the sequences' own tokens, in pages that nobody
shares, and whatever is planned afterwards runs afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from relaxpack.runtime.request import Sequence
from relaxpack.runtime.scheduler import ScheduledStep, Scheduler
from relaxpack.runtime.step_plan import SequenceStep, StepExecutor, StepHandle, StepPlan, StepSampling


@runtime_checkable
class AheadExecutor(StepExecutor, Protocol):
    """An executor that can start a step before the tokens it continues are known on the host."""

    def submit_ahead(self, plan: StepPlan, sampling: StepSampling) -> StepHandle | None:
        """Start a decode step whose sequences are row by row those of the step submitted last and continue the tokens
        sampled there; the plan's own token ids are placeholders. None: not possible for these settings."""
        ...


@dataclass
class _Started:
    sequences: list[Sequence]
    starts: list[int]
    pages: list[int]        # page that each sequence's token was written to
    handle: StepHandle

    def serves(self, step: ScheduledStep, page_size: int) -> bool:
        plan = step.plan
        return (step.sequences == self.sequences and step.sampled == self.sequences and not plan.copies
                and [s.start for s in plan.sequences] == self.starts
                and [s.page_ids[s.start // page_size] for s in plan.sequences] == self.pages)


class RunAhead:
    """Submits steps through an executor, one decode step ahead where it may. `used` and `dropped` count predictions."""

    def __init__(self, executor: AheadExecutor, scheduler: Scheduler) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._started: _Started | None = None
        self.used = 0
        self.dropped = 0

    def submit(self, step: ScheduledStep, sampling: StepSampling) -> StepHandle:
        started, self._started = self._started, None
        if started is not None and started.serves(step, self._scheduler.page_size):
            handle = started.handle
            self.used += 1
        else:
            self.dropped += started is not None
            handle = self._executor.submit(step.plan, sampling)
        self._started = self._start_next(step, sampling)
        return handle

    def forget(self) -> None:
        """Drop what runs ahead: the step before it failed."""
        self.dropped += self._started is not None
        self._started = None

    def _start_next(self, step: ScheduledStep, sampling: StepSampling) -> _Started | None:
        scheduler = self._scheduler
        if scheduler.waiting or len(scheduler.running) != len(step.sequences) or step.sampled != step.sequences:
            return None
        steps, starts, pages = [], [], []
        for sequence, now in zip(step.sequences, step.plan.sequences, strict=True):
            page = self._page_of_next(sequence, now)
            if page is None:
                return None
            steps.append(SequenceStep((0,), now.start + 1, sequence.page_ids, (0,)))
            starts.append(now.start + 1)
            pages.append(page)
        handle = self._executor.submit_ahead(StepPlan(tuple(steps)), sampling)
        return None if handle is None else _Started(list(step.sequences), starts, pages, handle)

    def _page_of_next(self, sequence: Sequence, now: SequenceStep) -> int | None:
        """The page that the next token goes to, if the sequence surely may have one and owns the page alone."""
        known: Seq[int] = now.token_ids
        if len(known) != 1 or len(now.logit_offsets) != 1 or now.start + 2 >= sequence.request.token_limit:
            return None
        index, pool = (now.start + 1) // self._scheduler.page_size, self._scheduler.pool
        if index == len(sequence.page_ids):
            if pool.available <= len(self._scheduler.running):
                return None     # pages are scarce: leave them to the scheduler
            sequence.page_ids.append(pool.take())
        elif pool.holders[sequence.page_ids[index]] != 1:
            return None
        return sequence.page_ids[index]
