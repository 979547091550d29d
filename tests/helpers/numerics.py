"""Drives a model runner with step plans, without an engine: whole prompts, chunks, decodes, several sequences in a step.

Pages are handed out in a scrambled order, so that a kernel which ignores the page table cannot be right by luck.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from relaxpack.runtime.step_plan import ModelRunner, SequenceStep, StepPlan


class Tape:
    """One sequence on a runner: token ids, the pages they live in, and how many are computed."""

    def __init__(self, runner: ModelRunner, token_ids: Sequence[int], page_ids: Sequence[int]) -> None:
        assert len(page_ids) * runner.page_size >= len(token_ids), (len(page_ids), len(token_ids))
        self.runner, self.token_ids, self.page_ids = runner, list(token_ids), list(page_ids)
        self.computed = 0

    def step(self, count: int, logits: str = "all") -> SequenceStep:
        """The next `count` tokens; logits of "all" of them, the "last" or "none"."""
        start = self.computed
        self.computed += count
        assert self.computed <= len(self.token_ids), "no such tokens"
        offsets = {"all": range(count), "last": [count - 1], "none": []}[logits]
        return SequenceStep(self.token_ids[start:self.computed], start, self.page_ids, list(offsets))


def tapes(runner: ModelRunner, prompts: Iterable[Sequence[int]], seed: int = 0, room: int = 0) -> list[Tape]:
    """A tape for each prompt, with distinct pages in random order and room for more tokens."""
    prompts = [list(p) for p in prompts]
    free = (1 + np.random.default_rng(seed).permutation(runner.num_pages - 1)).tolist()  # page 0 is scratch
    made = []
    for prompt in prompts:
        count = -(-(len(prompt) + room) // runner.page_size)
        made.append(Tape(runner, prompt, [free.pop() for _ in range(count)]))
    return made


def run(runner: ModelRunner, steps: Sequence[SequenceStep]) -> np.ndarray:
    """One step; logits as a copy, because a runner may use the array again."""
    return np.array(runner.forward(StepPlan(tuple(steps))))


def prefill_logits(tape: Tape, until: int, chunk: int | None = None) -> np.ndarray:
    """Logits [until - computed, vocab] of the next tokens, computed in chunks."""
    chunk = min(chunk or tape.runner.prefill_chunk, tape.runner.prefill_chunk)
    rows = []
    while tape.computed < until:
        rows.append(run(tape.runner, [tape.step(min(chunk, until - tape.computed))]))
    return np.concatenate(rows)


def decode_logits(tape: Tape, until: int) -> np.ndarray:
    """Logits of the next tokens, one step each."""
    return np.concatenate([run(tape.runner, [tape.step(1)]) for _ in range(tape.computed, until)])


def greedy(runner: ModelRunner, prompt: Sequence[int], steps: int) -> tuple[np.ndarray, list[int], list[float]]:
    """First-step logits [vocab], `steps` greedy tokens, and by how much each led the second best."""
    (tape,) = tapes(runner, [prompt], room=steps)
    while len(prompt) - tape.computed > runner.prefill_chunk:
        run(runner, [tape.step(runner.prefill_chunk, "none")])
    first = row = run(runner, [tape.step(len(prompt) - tape.computed, "last")])[-1]
    ids, margins = [], []
    while True:
        second, best = np.partition(row, -2)[-2:]
        ids.append(int(row.argmax()))
        margins.append(float(best - second))
        if len(ids) == steps:
            return first, ids, margins
        tape.token_ids.append(ids[-1])
        row = run(runner, [tape.step(1)])[0]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities along the last axis."""
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats along the last axis, from log-probabilities."""
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def greedy_batch(runner: ModelRunner, prompts: Sequence[Sequence[int]],
                 steps: int) -> tuple[list[list[int]], list[np.ndarray]]:
    """`steps` greedy tokens and first-step logits [vocab] of each prompt: prefilled one by one, decoded together."""
    answers: list[list[int]] = []
    first_logits: list[np.ndarray] = []
    for first in range(0, len(prompts), runner.max_batch):
        group = tapes(runner, prompts[first:first + runner.max_batch], room=steps)
        done: list[list[int]] = []
        for tape in group:
            while len(tape.token_ids) - tape.computed > runner.prefill_chunk:
                run(runner, [tape.step(runner.prefill_chunk, "none")])
            first_logits.append(run(runner, [tape.step(len(tape.token_ids) - tape.computed, "last")])[0])
            done.append([int(first_logits[-1].argmax())])
        for _ in range(steps - 1):
            for tape, ids in zip(group, done, strict=True):
                tape.token_ids.append(ids[-1])
            rows = run(runner, [tape.step(1) for tape in group])
            for ids, row in zip(done, rows, strict=True):
                ids.append(int(row.argmax()))
        answers += done
    return answers, first_logits
