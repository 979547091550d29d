"""Canaries on a model whose context is short: nothing is computed beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from relaxpack.runtime.canaries import check, record
from relaxpack.runtime.step_plan import StepPlan


class Counting:
    """Always prefers the token after the last one, and refuses positions beyond its context."""

    page_size, prefill_chunk, vocab_size = 4, 8, 32

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context

    def forward(self, plan: StepPlan) -> np.ndarray:
        [sequence] = plan.sequences
        assert sequence.start + len(sequence.token_ids) <= self.max_context
        rows = np.zeros((len(sequence.logit_offsets), self.vocab_size), np.float32)
        for row, offset in zip(rows, sequence.logit_offsets, strict=True):
            row[(sequence.token_ids[offset] + 1) % self.vocab_size] = 1
        return rows


@pytest.mark.parametrize("max_context, answers", [(2, 1), (3, 2), (64, 16)])
def test_greedy_tokens_end_with_the_context(max_context: int, answers: int) -> None:
    runner = Counting(max_context)
    canaries = record(runner, {"one": [5, 6]}, 1e-3)   # type: ignore[arg-type]
    assert canaries.canaries[0].greedy_ids == tuple(range(7, 7 + answers))
    [report] = check(runner, canaries)                 # type: ignore[arg-type]
    assert report.ok, report.message
