"""`CudaExecutor`: a step executor that samples on the device. Requests that need what the device kernel does not do
(biases, bans, grammars, typical_p, top logprobs, penalties) take the host sampler, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from relaxpack.runtime.cuda_model_runner import CudaModelRunner, SampledTokens
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.sampler import NOT_FINITE, SamplingState, TokenLogprobs
from relaxpack.runtime.step_inputs import Arrays
from relaxpack.runtime.step_plan import StepHandle, StepPlan, StepResult, StepSampling


def samples_on_device(state: SamplingState) -> bool:
    p = state.params
    return not state.edits_logits and p.typical_p == 1.0 and p.logprobs in (None, 0)


def _on_device(sampling: StepSampling) -> bool:
    one_each = list(sampling.rows) == list(range(len(sampling.rows)))
    return bool(sampling.rows) and not sampling.prompt_scores and one_each \
        and all(map(samples_on_device, sampling.states))


def _filler(states: Sequence[SamplingState], ahead: int) -> Callable[[Arrays], None]:
    """Writes the settings of each row; `ahead` counts output tokens that are drawn but not known yet."""
    def fill(arrays: Arrays) -> None:
        for i, state in enumerate(states):
            p = state.params
            arrays["settings"][i, :3] = (p.temperature, p.top_p, p.min_p)
            arrays["counters"][i, :4] = (p.top_k, *_halves(state.key), state.num_output + ahead)

    return fill


def _halves(key: int) -> tuple[int, int]:
    """A 64-bit key as two signed 32-bit numbers, low half first."""
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


class CudaExecutor:
    def __init__(self, runner: CudaModelRunner) -> None:
        self._runner = runner
        self._host = HostExecutor(runner)

    def submit(self, plan: StepPlan, sampling: StepSampling) -> StepHandle:
        if not _on_device(sampling) or any(s.hidden for s in plan.sequences):
            return self._host.submit(plan, sampling)
        tokens = self._runner.forward_and_sample(plan, _filler(sampling.states, 0))
        return _Handle(tokens, sampling.states)

    def submit_ahead(self, plan: StepPlan, sampling: StepSampling) -> StepHandle | None:
        """See `run_ahead.AheadExecutor`."""
        if not _on_device(sampling):
            return None
        source = np.arange(len(plan.sequences), dtype=np.int32)
        tokens = self._runner.forward_and_sample(plan, _filler(sampling.states, 1), source)
        return _Handle(tokens, sampling.states)

    def close(self) -> None:
        self._host.close()


class _Handle:
    def __init__(self, tokens: SampledTokens, states: Sequence[SamplingState]) -> None:
        self._tokens, self._states = tokens, states

    def result(self) -> StepResult:
        token_ids, logprobs = self._tokens.result()
        result = StepResult(token_ids)
        result.errors = {i: NOT_FINITE for i, token in enumerate(token_ids) if token < 0}
        if any(s.params.logprobs is not None for s in self._states):
            result.logprobs = [
                TokenLogprobs(token, logprob, ()) if s.params.logprobs is not None else None
                for s, token, logprob in zip(self._states, token_ids, logprobs, strict=True)]
        return result

