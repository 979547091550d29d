"""What the device knows of a sequence besides its logits: a row with the counts of its tokens and with its edits, which are
biases and bans. Rows are filled when a sequence first needs one; the kernel counts what it draws, and takes back by itself
what a step drew whose result was dropped. The form of a row: `kernel_spec.SamplingSpec`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from relaxpack.kernel_spec import COUNT_BITS, EDIT_BITS, FIRST_EDIT, IN_PROMPT, counts_width
from relaxpack.runtime.sampler import SamplingState

MOST_EDITS = (1 << EDIT_BITS) - FIRST_EDIT


class CountsMemory(Protocol):
    """A model runner whose device has rows of counts, one for each sequence of a batch."""

    max_batch: int
    vocab_size: int

    def write_counts(self, row: int, first: int, count: int, fill: Callable[[np.ndarray], None]) -> None:
        """Start writing `count` words of a row from `first` on, which `fill` makes, int32."""
        ...


def fits(state: SamplingState) -> bool:
    """Whether a row has room for the edits of a sequence."""
    p = state.params
    return len(p.logit_bias) + len(p.bad_words) + (len(state.end_ids) if p.min_tokens else 0) <= MOST_EDITS


def needs_counts(state: SamplingState) -> bool:
    """Whether its draws depend on a row of counts: penalties, biases, bans, or end tokens banned for a while."""
    if not state.edits_logits:
        return False
    p = state.params
    return bool(state.has_penalties or p.logit_bias or p.bad_words or (p.min_tokens and state.end_ids))


def _edited(state: SamplingState) -> np.ndarray:
    """Every token that is ever biased or banned, once."""
    p = state.params
    ids = {*p.logit_bias, *(word[-1] for word in p.bad_words), *(state.end_ids if p.min_tokens else ())}
    return np.array(sorted(ids), np.int64)


@dataclass
class _Row:
    index: int
    position: int                   # output tokens before the draw that used it last
    edited: np.ndarray
    biases: np.ndarray              # float32, of the edited tokens
    banned: list[int] = field(default_factory=list)     # as the device knows it

    def fill_edits(self, words: np.ndarray) -> None:
        values = words.view(np.float32)
        values[:] = self.biases
        values[np.isin(self.edited, self.banned)] = -np.inf


class DeviceCounts:
    """Which row is whose. A row stays with its sequence, also while that waits or is preempted, until another needs it: the
    one unused for longest is taken."""

    def __init__(self, memory: CountsMemory) -> None:
        self._memory = memory
        self._free = list(range(memory.max_batch))
        self._rows: OrderedDict[SamplingState, _Row] = OrderedDict()

    def rows(self, states: Sequence[SamplingState], ahead: int = 0) -> list[int]:
        """A row for each sequence (-1: it needs none) that is up to date for the next draw. `ahead`: output tokens that
        are drawn but not known yet. At most `max_batch` sequences at once."""
        users = [needs_counts(state) for state in states]
        if not any(users):
            return [-1] * len(states)
        for state, uses in zip(states, users, strict=True):
            if uses and state in self._rows:
                self._rows.move_to_end(state)       # no row of this step is given away below
        return [self._ready(state, ahead) if uses else -1 for state, uses in zip(states, users, strict=True)]

    def _ready(self, state: SamplingState, ahead: int) -> int:
        position = state.num_output + ahead
        row = self._rows.get(state)
        if row is None or not row.position <= position <= row.position + 1:
            assert ahead == 0, "a step runs ahead of one that used the row"
            index = row.index if row else self._free.pop() if self._free else self._rows.popitem(last=False)[1].index
            row = self._rows[state] = self._fill(state, index)
        elif state.params.min_tokens or state.params.bad_words:
            banned = state.banned(ahead)
            if banned != row.banned:
                row.banned = banned
                self._memory.write_counts(row.index, self._memory.vocab_size + FIRST_EDIT, len(row.edited), row.fill_edits)
        row.position = position
        return row.index

    def _fill(self, state: SamplingState, index: int) -> _Row:
        vocab, edited = self._memory.vocab_size, _edited(state)
        bias = state.params.logit_bias
        row = _Row(index, state.num_output, edited, np.array([bias.get(i, 0.0) for i in edited.tolist()], np.float32),
                   state.banned())

        def fill(words: np.ndarray) -> None:
            words[:] = 0
            words[state.token_ids[:state.num_prompt]] = IN_PROMPT
            np.add.at(words, state.token_ids[state.num_prompt:], 1)
            words[edited] |= (FIRST_EDIT + np.arange(len(edited), dtype=np.int32)) << COUNT_BITS
            words[vocab:vocab + FIRST_EDIT] = -1        # nothing was drawn yet
            row.fill_edits(words[vocab + FIRST_EDIT:][:len(edited)])

        self._memory.write_counts(index, 0, counts_width(vocab), fill)
        return row
