"""`Scheduler`: decides which sequences compute which tokens in the next step, on integers only.

A sequence has computed tokens and known tokens; a step spends a token budget closing the gap. Decoding sequences come
first, then running prefills, then admissions in order of arrival. When pages run out the latest arrival is preempted:
it gives its pages back and computes its tokens again later. Tensors, text and sampling are not known here.

Decode and prefill kernels may round differently, which can turn a near tie between two tokens. With `exact` every token
is therefore computed the same way whenever it is computed: output tokens one by one, as when they were new, and the last
token of a prompt never alone. Then pressure on pages does not change a greedy output.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from relaxpack.runtime.kv_cache.page_pool import PagePool
from relaxpack.runtime.kv_cache.page_table import PageTables
from relaxpack.runtime.kv_cache.prefix_cache import PrefixCache
from relaxpack.runtime.request import Request, Sequence, SequenceStatus
from relaxpack.runtime.step_plan import PromptScore, SequenceStep, StepPlan

_FIRST = (0,)       # logit offsets of a decode


@dataclass(slots=True)
class ScheduledStep:
    """A step plan, and whose it is: `sequences` and `counts` (tokens) run beside `plan.sequences`."""

    plan: StepPlan
    sequences: list[Sequence]
    counts: list[int]
    sampled: list[Sequence]         # get a token from this step, n > 1 children included
    rows: list[int]                 # logit row of each
    forks: list[tuple[Sequence, Sequence]]
    prompt_scores: list[PromptScore]
    scored: list[Request]           # whose each prompt score is


@dataclass(slots=True)
class _Draft:
    steps: list[SequenceStep] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    prompt_scores: list[PromptScore] = field(default_factory=list)
    scored: list[Request] = field(default_factory=list)
    num_rows: int = 0
    budget: int = 0                 # tokens that prefills may still use


class Scheduler:
    def __init__(
        self, *, page_size: int, num_pages: int, max_batch: int, token_budget: int,
        max_logit_rows: int | None = None, prefix_caching: bool = True, exact: bool = True,
    ) -> None:
        self.page_size = page_size
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_logit_rows = max_logit_rows if max_logit_rows is not None else max(token_budget, max_batch)
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size, prefix_caching)
        self.tables = PageTables(self.pool, self.cache, page_size)
        self.waiting: deque[Sequence] = deque()     # in order of arrival
        self.running: list[Sequence] = []           # in order of arrival
        self.preemptions = 0
        self._exact = exact
        self._least_prefill = 2 if exact and token_budget > 1 else 1    # tokens that a prompt's end takes at once
        self._decoded_last = False

    @property
    def capacity(self) -> int:
        """Most tokens that one sequence alone can have in the pages."""
        return self.pool.total * self.page_size

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def finish(self, sequence: Sequence, computed: bool = True) -> None:
        """Take a sequence out, at any time between two steps. `computed` as in `PageTables.release`."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.tables.release(sequence, computed)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def plan(self) -> ScheduledStep | None:
        """The next step, or None when there is nothing to do. Sequences are as they will be once `update` is called."""
        draft = _Draft()
        if not self._is_prefill_turn():
            self._plan_decodes(draft)
        num_decodes = len(draft.steps)
        self._plan_prefills(draft)
        if not draft.steps:         # a prefill turn, but nothing could be admitted
            self._plan_decodes(draft)
            num_decodes = len(draft.steps)
        self._decoded_last = num_decodes > 0
        if not draft.steps:
            assert not self.has_work, f"{len(self.waiting)} waiting, {len(self.running)} running, but no step possible"
            return None
        plan = StepPlan(tuple(draft.steps), self.tables.take_copies())
        return ScheduledStep(plan, draft.sequences, draft.counts, draft.sampled, draft.rows, draft.forks,
                             draft.prompt_scores, draft.scored)

    def abandon(self, step: ScheduledStep) -> None:
        """The step has failed: its sequences lose their pages, and nothing it was computing is kept."""
        self.tables.release_sources(step.plan.copies)
        for sequence in step.sequences:
            self.finish(sequence, computed=False)
        # Admitted in this step but not part of it: what its copies should have brought is not there.
        destinations = {destination for _, destination in step.plan.copies}
        for sequence in [s for s in self.running if destinations.intersection(s.page_ids)]:
            self._preempt(sequence, computed=False)

    def update(self, step: ScheduledStep) -> None:
        """The step has run: its tokens are computed. New tokens are appended to the sequences by the caller, after."""
        self.tables.release_sources(step.plan.copies)
        size = self.page_size
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            sequence.computed += count
            if count > 1 or sequence.computed % size == 0:
                self.tables.register(sequence)
        for parent, child in step.forks:
            if len(self.running) < self.max_batch:
                self.tables.fork(parent, child)
                child.status = SequenceStatus.RUNNING
                insort(self.running, child, key=_order)
            else:       # it starts alone later, mostly from the prefix cache
                self.add(child)

    def _is_prefill_turn(self) -> bool:
        """Whether decodes must sit out: they leave prefills no budget, and took the last step."""
        most_decodes = self.token_budget - self._least_prefill
        if not self._decoded_last or len(self.running) <= most_decodes:
            return False
        decoding = sum(map(self._decodes, self.running))
        prefills = decoding < len(self.running) or (self.waiting and len(self.running) < self.max_batch)
        return bool(prefills) and decoding > most_decodes

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether the next token of a running sequence is computed alone."""
        start = sequence.computed
        return start >= sequence.num_prompt and (self._exact or len(sequence.token_ids) - start == 1)

    def _plan_decodes(self, draft: _Draft) -> None:
        """Plan one token for every running sequence that lacks output tokens; only the last one is sampled after."""
        size, holders, exact = self.page_size, self.pool.holders, self._exact
        steps, sequences, replayed = draft.steps, draft.sequences, []
        for sequence in tuple(self.running):
            start, token_ids = sequence.computed, sequence.token_ids
            if start < sequence.num_prompt:
                continue        # a prefill, or just preempted
            behind = len(token_ids) - start != 1
            if behind and not exact:
                continue
            index, page_ids = start // size, sequence.page_ids
            if index >= len(page_ids) or holders[page_ids[index]] != 1:
                if not self._make_room(sequence):
                    continue
                page_ids = sequence.page_ids
            if behind:
                replayed.append(len(steps))
            steps.append(SequenceStep(token_ids[start:start + 1], start, page_ids, _FIRST))
            sequences.append(sequence)
        draft.num_rows = len(steps)
        draft.counts = [1] * draft.num_rows
        draft.sampled = list(sequences)
        draft.rows = list(range(draft.num_rows))
        for row in reversed(replayed):
            del draft.sampled[row], draft.rows[row]

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt, latest arrival first, until `sequence` can write its next token or is itself the victim."""
        while not self.tables.make_room(sequence):
            victim = self.running[-1]
            assert victim is not sequence or len(self.running) > 1, "a sequence alone must fit: see Engine.add"
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, computed: bool = True) -> None:
        self.running.remove(sequence)
        self.tables.release(sequence, computed)
        sequence.status = SequenceStatus.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def _plan_prefills(self, draft: _Draft) -> None:
        draft.budget = self.token_budget - len(draft.steps)
        for sequence in self.running:
            if draft.budget <= 0:
                return
            if not self._decodes(sequence):
                self._plan_prefill(draft, sequence)
        self._admit(draft)

    def _admit(self, draft: _Draft) -> None:
        while self.waiting and len(self.running) < self.max_batch and draft.budget > 0:
            if draft.num_rows >= self.max_logit_rows:
                return
            sequence = self.waiting[0]
            # Some pages stay for the sequences that are decoding; without this a new one is soon preempted again.
            reserve = min(len(self.running), self.pool.total // 16)
            if not self.tables.attach(sequence, reserve, self._least_prefill, not _reads_whole_prompt(sequence)):
                return
            self.waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            if sequence.request.cached_tokens is None:
                sequence.request.cached_tokens = sequence.computed
            insort(self.running, sequence, key=_order)
            if not self._decodes(sequence):     # else it has its turn in the next step
                self._plan_prefill(draft, sequence)

    def _plan_prefill(self, draft: _Draft, sequence: Sequence) -> None:
        start, known = sequence.computed, len(sequence.token_ids)
        end = sequence.num_prompt if self._exact else known
        count = min(end - start, draft.budget)
        free_rows = self.max_logit_rows - draft.num_rows
        scores, pooler = _lacks_prompt_scores(sequence), sequence.request.pooler
        if pooler is not None:
            pass                # needs no logits
        elif scores:
            count = min(count, free_rows)
        elif start + count == known and free_rows == 0:
            count -= 1          # its last token waits for a step with a logit row left
        if 0 < end - start - count < self._least_prefill:
            count -= 1
        if count <= 0:
            return
        if pooler is not None:
            draft.steps.append(SequenceStep(sequence.token_ids[start:start + count], start, sequence.page_ids,
                                            pooler.offsets(start, count), hidden=True))
            draft.sequences.append(sequence)
            draft.counts.append(count)
            draft.budget -= count
            return
        samples = start + count == known
        offsets = tuple(range(count)) if scores else (count - 1,) if samples else ()
        draft.steps.append(SequenceStep(sequence.token_ids[start:start + count], start, sequence.page_ids, offsets))
        draft.sequences.append(sequence)
        draft.counts.append(count)
        if scores:
            self._plan_scores(draft, sequence, start, count)
        draft.num_rows += len(offsets)
        draft.budget -= count
        if samples:
            draft.sampled.append(sequence)
            draft.rows.append(draft.num_rows - 1)
            self._plan_forks(draft, sequence, sequence.request)

    @staticmethod
    def _plan_scores(draft: _Draft, sequence: Sequence, start: int, count: int) -> None:
        request = sequence.request
        known = len(request.prompt_logprobs) + 1        # the next prompt token to score; the first has no score
        for offset in range(max(0, known - 1 - start), min(count, sequence.num_prompt - 1 - start)):
            token_id = request.prompt_ids[start + offset + 1]
            top = request.params.prompt_logprobs or 0
            draft.prompt_scores.append(PromptScore(draft.num_rows + offset, token_id, top))
            draft.scored.append(request)

    @staticmethod
    def _plan_forks(draft: _Draft, sequence: Sequence, request: Request) -> None:
        """Where a prompt ends that wants several outputs, all of them sample from its last logits."""
        if len(request.sequences) > 1 and sequence.index == 0 and len(sequence.token_ids) == sequence.num_prompt:
            row = draft.rows[-1]
            for child in request.sequences[1:]:
                if child.status is SequenceStatus.FINISHED:
                    continue
                child.token_ids[:] = sequence.token_ids
                draft.forks.append((sequence, child))
                draft.sampled.append(child)
                draft.rows.append(row)

    def check(self) -> None:
        """Assert the invariants, between two steps: pages are counted right and every hold has an owner."""
        self.pool.check()
        self.cache.check()
        holds = [0] * self.pool.num_pages
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.computed <= len(sequence.token_ids)
            assert len(sequence.page_ids) * self.page_size >= sequence.computed
            for page_id in sequence.page_ids:
                holds[page_id] += 1
        assert holds == self.pool.holders, "holders do not match the pages of the running sequences"
        assert all(s.status is SequenceStatus.WAITING and not s.page_ids for s in self.waiting)
        for sequences in (self.running, self.waiting):
            order = [_order(s) for s in sequences]
            assert order == sorted(order), "sequences must run and wait in order of arrival"
        assert len(self.running) <= self.max_batch


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.arrival, sequence.index


def _reads_whole_prompt(sequence: Sequence) -> bool:
    """Cached pages do not save computing its tokens."""
    pooler = sequence.request.pooler
    return _lacks_prompt_scores(sequence) if pooler is None else pooler.reads_all


def _lacks_prompt_scores(sequence: Sequence) -> bool:
    request = sequence.request
    return (request.params.prompt_logprobs is not None and sequence.index == 0
            and len(request.prompt_logprobs) < sequence.num_prompt - 1)
