"""Fakes for engine tests: `FakeRunner`, a toy language model that lives in real pages, and a device that only counts.

FakeRunner's keys are a hash chained over the tokens before, stored in the page slot of each token, and its logits
depend on every slot the sequence can see. So a wrong page, slot, copy or length changes the output, as in a real model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from relaxpack.runtime.step_plan import StepPlan, StepResult, StepSampling
from tests.helpers.waiting import Gate

_MASK = (1 << 62) - 1
_POISON = -987654321


def _chain(previous: int, token_id: int, position: int) -> int:
    x = (previous * 6364136223846793005 + (token_id + 1) * 1442695040888963407 + position) & _MASK
    return x ^ (x >> 29)


class FakeRunner:
    def __init__(
        self, *, page_size: int = 4, num_pages: int = 64, max_batch: int = 8, prefill_chunk: int = 16,
        max_context: int = 256, vocab_size: int = 97, max_logit_rows: int | None = None, delay: float = 0.0,
        decode_twist: int = 0,
    ) -> None:
        """`delay`: seconds a step takes. `decode_twist`: makes keys of decode steps differ from those of prefills, as
        kernels that round differently do, only more."""
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_batch = max_batch
        self.prefill_chunk = prefill_chunk
        self.max_context = max_context
        self.vocab_size = vocab_size
        if max_logit_rows is not None:
            self.max_logit_rows = max_logit_rows
        self.delay = delay
        self.decode_twist = decode_twist
        self.keys = np.full((num_pages, page_size), _POISON, np.int64)
        self.gate = Gate()
        self.plans: deque[StepPlan] = deque(maxlen=1000)      # the latest, so that long tests stay small
        self.fail_next: Exception | None = None
        self.nan_for: int | None = None      # logits are NaN once this token id is the last one

    def forward(self, plan: StepPlan) -> np.ndarray:
        self._check(plan)
        self.plans.append(plan)
        self.gate.step()
        if self.delay:
            time.sleep(self.delay)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        sources = self.keys[[s for s, _ in plan.copies]]
        self.keys[[d for _, d in plan.copies]] = sources
        is_decode = all(len(s.token_ids) == len(s.logit_offsets) == 1 for s in plan.sequences)
        for step in plan.sequences:
            self._write(step.token_ids, step.start, step.page_ids, self.decode_twist if is_decode else 0)
        rows = [
            self._logits(step.page_ids, step.start + offset, step.token_ids[offset])
            for step in plan.sequences for offset in step.logit_offsets
        ]
        return np.stack(rows) if rows else np.empty((0, self.vocab_size), np.float32)

    def _write(self, token_ids: Sequence[int], start: int, page_ids: Sequence[int], twist: int) -> None:
        size = self.page_size
        previous = int(self.keys[page_ids[(start - 1) // size], (start - 1) % size]) if start else 0
        for position, token_id in enumerate(token_ids, start):
            previous = _chain(previous, token_id, position) ^ twist
            self.keys[page_ids[position // size], position % size] = previous

    def _logits(self, page_ids: Sequence[int], position: int, token_id: int) -> np.ndarray:
        positions = np.arange(position + 1)
        seen = self.keys[np.asarray(page_ids)[positions // self.page_size], positions % self.page_size]
        logits = self.logits_of(seen)
        if self.nan_for == token_id:
            logits[:] = np.nan
        return logits

    def logits_of(self, keys: np.ndarray) -> np.ndarray:
        mixed = int((keys.astype(np.uint64) * (np.arange(len(keys), dtype=np.uint64) * np.uint64(2) + np.uint64(1)))
                    .sum())
        phase = (mixed % 1_000_003) / 1_000_003
        return (4 * np.sin(np.arange(1, self.vocab_size + 1) * (1 + phase) * 7.31 + phase * 50)).astype(np.float32)

    def reference_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """What the logits after token_ids must be, without any pages."""
        keys, previous = [], 0
        for position, token_id in enumerate(token_ids):
            previous = _chain(previous, token_id, position)
            keys.append(previous)
        return self.logits_of(np.array(keys, np.int64))

    def reference_greedy(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        token_ids = list(prompt_ids)
        for _ in range(count):
            token_ids.append(int(self.reference_logits(token_ids).argmax()))
        return token_ids[len(prompt_ids):]

    def read_pages(self, page_ids: Sequence[int]) -> np.ndarray:
        return self.keys[list(page_ids)]

    def write_pages(self, page_ids: Sequence[int], values: np.ndarray) -> None:
        self.keys[list(page_ids)] = values

    def _check(self, plan: StepPlan) -> None:
        """The promises of the contract."""
        assert 0 < len(plan.sequences) <= self.max_batch, len(plan.sequences)
        tokens = sum(len(s.token_ids) for s in plan.sequences)
        assert tokens == len(plan.sequences) or tokens <= self.prefill_chunk, tokens
        rows = sum(len(s.logit_offsets) for s in plan.sequences)
        assert rows <= getattr(self, "max_logit_rows", rows), rows
        destinations = [d for _, d in plan.copies]
        assert len(set(destinations)) == len(destinations) and not set(destinations) & {s for s, _ in plan.copies}
        size, written = self.page_size, set(destinations)
        readers: dict[int, int] = {}
        for step in plan.sequences:
            assert len(step.token_ids) > 0 and 0 not in step.page_ids
            end = step.start + len(step.token_ids)
            assert end <= self.max_context and len(step.page_ids) * size >= end
            assert list(step.logit_offsets) == sorted(set(step.logit_offsets))
            for page_id in step.page_ids:
                readers[page_id] = readers.get(page_id, 0) + 1
            written |= set(step.page_ids[step.start // size:-(-end // size)])
        assert all(readers.get(page_id, 1) == 1 for page_id in written), "a page is written that another sequence reads"


class FakeDevice:
    """A StepExecutor that answers at once with token ids from a counter: what is left is the engine's own time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._next = 0

    def submit(self, plan: StepPlan, sampling: StepSampling) -> FakeDevice._Handle:
        self._next += 1
        return FakeDevice._Handle([self._next % self._vocab_size] * len(sampling.rows))

    class _Handle:
        __slots__ = ("_token_ids",)

        def __init__(self, token_ids: list[int]) -> None:
            self._token_ids = token_ids

        def result(self) -> StepResult:
            return StepResult(self._token_ids)
