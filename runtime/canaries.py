"""Run canaries on a loaded model: at build to record the answers, on any machine to compare. Greedy, one sequence at a
time, straight on the model runner: no engine, no tokenizer, no sampling. A model that only embeds answers with the
last hidden state of the prompt instead of logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from relaxpack.dist.canary import HIDDEN, LOGITS, Answer, Canary, CanaryReport, CanarySet, compare
from relaxpack.errors import CompileError
from relaxpack.runtime.step_plan import EmbeddingRunner, ModelRunner, SequenceStep, StepPlan

TOP = 20
GREEDY_STEPS = 16


def _generates(runner: ModelRunner) -> bool:
    return getattr(runner, "generates", True)


def _answer_rows(runner: ModelRunner, prompt_ids: Sequence[int], steps: int) -> Iterator[np.ndarray]:
    """float32 [vocab_size] after the prompt, then after each greedy token; `steps` + 1 rows at most. Of a model that
    only embeds the one row [embedding_size]."""
    hidden = not _generates(runner)
    forward = cast(EmbeddingRunner, runner).forward_hidden if hidden else runner.forward
    pages = -(-(len(prompt_ids) + steps) // runner.page_size)
    page_ids = range(1, 1 + pages)   # page 0 is scratch
    row = None
    for start in range(0, len(prompt_ids), runner.prefill_chunk):
        chunk = list(prompt_ids[start:start + runner.prefill_chunk])
        last = start + len(chunk) == len(prompt_ids)
        step = SequenceStep(chunk, start, page_ids, [len(chunk) - 1] if last else [], hidden)
        rows = forward(StepPlan((step,)))
        row = np.array(rows[0]) if last else None   # a copy: the runner may use the buffer again
    assert row is not None, "a canary has at least one token"
    position = len(prompt_ids)
    yield row
    for _ in range(0 if hidden else steps):
        step = SequenceStep([int(np.argmax(row))], position, page_ids, [0])
        row = np.array(runner.forward(StepPlan((step,)))[0])
        position += 1
        yield row


def record(runner: ModelRunner, prompts: Mapping[str, Sequence[int]], tolerance: float,
           steps: int = GREEDY_STEPS) -> CanarySet:
    """Answers of now to `prompts` (name → token ids), to be stored. Raises CompileError where the model answers with
    numbers that are not finite, for such a bundle must not be shipped."""
    canaries = []
    for name, prompt_ids in prompts.items():
        room = runner.max_context - len(prompt_ids)     # the last greedy token needs no place
        rows = [row.astype(np.float64) for row in _answer_rows(runner, prompt_ids, min(steps - 1, room))]
        if not all(np.isfinite(row).all() for row in rows):
            raise CompileError(f"canary {name!r}: the built model answers with values that are not finite numbers; "
                               "values of a bfloat16 checkpoint may not fit float16: build with --weights f32")
        order = [np.argsort(-row, kind="stable") for row in rows]
        top = order[0][:TOP]
        steps_of = order if _generates(runner) else []
        canaries.append(Canary(name, tuple(prompt_ids), tuple(top.tolist()), tuple(rows[0][top].tolist()),
                               tuple(int(o[0]) for o in steps_of),
                               tuple(float(row[o[0]] - row[o[1]]) for row, o in zip(rows, steps_of, strict=False))))
    return CanarySet(tolerance, tuple(canaries), LOGITS if _generates(runner) else HIDDEN)


def check(runner: ModelRunner, canaries: CanarySet) -> Iterator[CanaryReport]:
    """Answers of now compared with the stored ones, one report a canary."""
    for canary in canaries.canaries:
        rows = list(_answer_rows(runner, canary.prompt_ids, max(0, len(canary.greedy_ids) - 1)))
        greedy = [int(np.argmax(row)) for row in rows][:len(canary.greedy_ids)]
        yield compare(canary, Answer(rows[0], greedy), canaries.tolerance, canaries.values)
