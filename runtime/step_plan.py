"""What the engine asks of a model in one step, and what comes back.

These types are the whole contract between planning (integers only) and execution (devices only): the scheduler builds a
`StepPlan`, a `ModelRunner` turns it into logits, and a `StepExecutor` turns it into token ids. Nothing here knows
requests, text or TVM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from relaxpack.runtime.sampler import SamplingState, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step.

    `page_ids` may be the engine's own list: it covers at least `start + len(token_ids)` tokens, may be longer, and must
    only be read while the step runs.
    """

    token_ids: Sequence[int]        # tokens to compute now: 1 for decode, a chunk for prefill
    start: int                      # computed tokens before this step = position of token_ids[0]
    page_ids: Sequence[int]         # pages of the sequence, in order
    logit_offsets: Sequence[int]    # which of token_ids need logits, ascending; usually the last one or none
    hidden: bool = False            # they need last hidden states instead


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`copies` are (source page, destination page), done before anything of the step is written. No destination is
    also a source, and no destination occurs twice, so they may run in any order or all at once."""

    sequences: tuple[SequenceStep, ...]
    copies: tuple[tuple[int, int], ...] = ()


class ModelRunner(Protocol):
    """A loaded model with its pages. Page 0 is scratch: the engine never uses it, so padded rows may write there.

    Every step keeps to: at most `max_batch` sequences; a step in which any sequence has more than one token holds at
    most `prefill_chunk` tokens. Optional members, looked up by name: `max_logit_rows: int` (most logit rows in a step;
    default: no limit), `read_pages(page_ids) -> array [n, ...]` with `write_pages(page_ids, array)` for a persistent
    prefix cache, `embedding_size: int` (not 0) with `forward_hidden` below for embeddings, and `generates: bool` (False:
    no `forward`).
    """

    page_size: int
    num_pages: int        # scratch page included
    max_batch: int
    prefill_chunk: int
    max_context: int
    vocab_size: int

    def forward(self, plan: StepPlan) -> np.ndarray:
        """float32 [total logit rows, vocab_size], rows in plan order. No sequence of the plan is `hidden`."""
        ...


class EmbeddingRunner(ModelRunner, Protocol):
    embedding_size: int

    def forward_hidden(self, plan: StepPlan) -> np.ndarray:
        """float32 [total rows, embedding_size] after the final norm, rows in plan order. All sequences are `hidden`."""
        ...


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Asks for the log-probability of a known token at a logit row (prompt logprobs)."""

    row: int
    token_id: int
    top: int


@dataclass(frozen=True, slots=True)
class StepSampling:
    """Which logit rows of a step are sampled, each for one sequence; several sequences may share a row (n > 1)."""

    rows: Sequence[int]
    states: Sequence[SamplingState]
    prompt_scores: Sequence[PromptScore] = ()


@dataclass(slots=True)
class StepResult:
    """One entry per sampled row. A failed row has token id -1 and its reason in `errors`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    hidden: np.ndarray | None = None        # rows of the sequences that are `hidden`, in plan order


class StepHandle(Protocol):
    def result(self) -> StepResult: ...


class StepExecutor(Protocol):
    """Runs steps. A device executor may return from `submit` before the step is done and sample on the device."""

    def submit(self, plan: StepPlan, sampling: StepSampling) -> StepHandle: ...
