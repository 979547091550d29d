"""`HostExecutor`: pairs a model runner with the NumPy sampler, one step at a time.

This is the seam for devices: an executor that samples on the device and returns from `submit` early implements the same
two calls. Masks of constrained sequences are computed on another thread while the model runs.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np

from relaxpack.runtime.sampler import sample
from relaxpack.runtime.step_plan import EmbeddingRunner, ModelRunner, StepPlan, StepResult, StepSampling


class _Done:
    """The handle of a step that is already done."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class HostExecutor:
    def __init__(self, runner: ModelRunner, split_mixed: bool = True) -> None:
        """`split_mixed`: run sequences with one token apart from prefills of the same step.

        The two may go through kernels that round differently; apart, a decoding sequence gets the same numbers
        whatever else is in the step, which keeps greedy outputs the same alone and in a crowd.
        """
        self._runner = runner
        self._split_mixed = split_mixed
        self._mask_thread: ThreadPoolExecutor | None = None

    def submit(self, plan: StepPlan, sampling: StepSampling) -> _Done:
        masks = self._start_masks(sampling)
        hidden = None
        if any(s.hidden for s in plan.sequences):
            hidden, plan = self.forward_hidden(plan)
        expected = sum(len(s.logit_offsets) for s in plan.sequences)
        logits = self._forward(plan) if plan.sequences else np.empty((0, self._runner.vocab_size), np.float32)
        assert logits.shape == (expected, self._runner.vocab_size), (logits.shape, expected)
        result = sample(logits, sampling.rows, sampling.states, sampling.prompt_scores, masks.result() if masks else None)
        result.hidden = hidden
        return _Done(result)

    def forward_hidden(self, plan: StepPlan) -> tuple[np.ndarray, StepPlan]:
        """Hidden states of the sequences that want them, and the rest of the plan."""
        wanted = tuple(s for s in plan.sequences if s.hidden)
        runner = cast(EmbeddingRunner, self._runner)
        hidden = runner.forward_hidden(StepPlan(wanted, plan.copies))
        expected = sum(len(s.logit_offsets) for s in wanted)
        assert hidden.shape == (expected, runner.embedding_size), (hidden.shape, expected)
        return hidden, StepPlan(tuple(s for s in plan.sequences if not s.hidden))

    def _forward(self, plan: StepPlan) -> np.ndarray:
        single = [len(s.token_ids) == len(s.logit_offsets) == 1 for s in plan.sequences]
        if not self._split_mixed or all(single) or not any(single):
            return self._runner.forward(plan)
        decodes = tuple(s for s, alone in zip(plan.sequences, single, strict=True) if alone)
        prefills = tuple(s for s, alone in zip(plan.sequences, single, strict=True) if not alone)
        of_decode = np.repeat(single, [len(s.logit_offsets) for s in plan.sequences])
        first = self._runner.forward(StepPlan(decodes, plan.copies))
        second = self._runner.forward(StepPlan(prefills))
        logits = np.empty((len(of_decode), first.shape[1]), np.float32)
        logits[of_decode] = first
        logits[~of_decode] = second
        return logits

    def _start_masks(self, sampling: StepSampling) -> Future[dict[int, np.ndarray | None]] | None:
        constraints = {i: s.constraint for i, s in enumerate(sampling.states) if s.constraint is not None}
        if not constraints:
            return None
        if self._mask_thread is None:
            self._mask_thread = ThreadPoolExecutor(1, "relaxpack-masks")
        return self._mask_thread.submit(lambda: {i: c.mask() for i, c in constraints.items()})

    def close(self) -> None:
        if self._mask_thread is not None:
            self._mask_thread.shutdown()
