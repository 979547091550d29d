"""`EmbeddingFake`: a `FakeRunner` that also computes hidden states, a function of the keys that live in its pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relaxpack.runtime.step_plan import StepPlan
from tests.helpers.fakes import FakeRunner, _chain

SIZE = 12


class EmbeddingFake(FakeRunner):
    """`generates` False: as a bundle that only embeds."""

    def __init__(self, *, generates: bool = True, **options: object) -> None:
        super().__init__(**options)     # type: ignore[arg-type]
        self.generates = generates
        self.embedding_size = SIZE
        self.hidden_rows = 0            # computed so far

    def forward(self, plan: StepPlan) -> np.ndarray:
        assert self.generates and not any(s.hidden for s in plan.sequences)
        return super().forward(plan)

    def forward_hidden(self, plan: StepPlan) -> np.ndarray:
        assert all(s.hidden for s in plan.sequences)
        self._check(plan)
        self.gate.step()
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.keys[[d for _, d in plan.copies]] = self.keys[[s for s, _ in plan.copies]]
        rows = []
        for step in plan.sequences:
            self._write(step.token_ids, step.start, step.page_ids, 0)
            rows += [self._state(step.page_ids, step.start + i, step.token_ids[i]) for i in step.logit_offsets]
        self.hidden_rows += len(rows)
        return np.stack(rows) if rows else np.empty((0, SIZE), np.float32)

    def _state(self, page_ids: Sequence[int], position: int, token_id: int) -> np.ndarray:
        """Depends on every token before, for they are in the key; and on the pages being this sequence's."""
        key = int(self.keys[page_ids[position // self.page_size], position % self.page_size])
        state = hidden_of(key)
        if self.nan_for == token_id:
            state[0] = np.nan
        return state


def hidden_of(key: int) -> np.ndarray:
    return np.sin(np.arange(1, SIZE + 1) * (1 + key % 1_000_003 / 1_000_003) * 5.7).astype(np.float32)


def reference(token_ids: Sequence[int], pooling: str = "last", dimensions: int | None = None,
              normalize: bool = True) -> np.ndarray:
    """What the embedding of a prompt must be, without any pages."""
    states, previous = [], 0
    for position, token_id in enumerate(token_ids):
        previous = _chain(previous, token_id, position)
        states.append(hidden_of(previous))
    pooled = (states[-1] if pooling == "last" else np.mean(states, axis=0, dtype=np.float64))[:dimensions]
    return pooled / np.linalg.norm(pooled) if normalize else pooled
