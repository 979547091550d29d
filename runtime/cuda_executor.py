"""`CudaExecutor`: a step executor that samples on the device. Most steps are one captured graph that draws its own tokens.

Where a grammar or several outputs of one prompt are asked for, the step leaves its logits on the device and `sample` draws
from them, with the very kernel of the captured step: masks of allowed tokens are computed while the model runs. Who samples
a sequence depends on its own settings alone, so that a seed gives the same text whatever else is in the step. The host draws
only for sequences with more biases and bans than a device row holds, and scores prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from relaxpack.kernel_spec import TOP_LOGPROBS
from relaxpack.runtime import sampler
from relaxpack.runtime.cuda_model_runner import CudaModelRunner, FillSampling, SampledTokens
from relaxpack.runtime.device_counts import DeviceCounts, fits
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.sampler import NOT_FINITE, SamplingState, TokenLogprobs, nothing_allowed
from relaxpack.runtime.step_inputs import Arrays
from relaxpack.runtime.step_plan import StepHandle, StepPlan, StepResult, StepSampling


def draws_in_step(state: SamplingState) -> bool:
    """Whether a captured step can draw its token."""
    if (state.params.logprobs or 0) > TOP_LOGPROBS:
        return False
    return not state.edits_logits or (state.constraint is None and fits(state))


def runs_ahead(state: SamplingState) -> bool:
    """Whether its next draw needs nothing of the last token but its count. (A bad word of several tokens does.)"""
    return draws_in_step(state) and all(len(word) == 1 for word in state.params.bad_words)


def _in_step(sampling: StepSampling) -> bool:
    rows = sampling.rows
    return bool(rows) and not sampling.prompt_scores and len(set(rows)) == len(rows) \
        and all(map(draws_in_step, sampling.states))


def _filler(rows: Sequence[int], states: Sequence[SamplingState], counts_rows: Sequence[int], ahead: int = 0,
            masks: Sequence[np.ndarray | None] = ()) -> FillSampling:
    """Writes the settings of each state to its row; `ahead` counts output tokens that are drawn but not known yet.
    `masks`: bits of allowed tokens."""
    settings = [(0.0 if p.greedy else p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty,
                 p.frequency_penalty, p.typical_p) for p in (state.params for state in states)]
    counters = [(s.params.top_k, *_halves(s.key), s.num_output + ahead, counts_row, -1, s.params.logprobs or 0)
                for s, counts_row in zip(states, counts_rows, strict=True)]

    def fill(arrays: Arrays) -> int:
        if rows:
            arrays["settings"][rows, :7] = settings
            arrays["counters"][rows, :7] = counters
        used = 0
        for i, bits in zip(rows, masks, strict=False):
            if bits is not None:
                arrays["counters"][i, 5] = used
                row = arrays["allowed"][used].view(np.uint8)
                row[:len(bits)] = bits
                row[len(bits):] = 0
                used += 1
        return used

    return fill


def _halves(key: int) -> tuple[int, int]:
    """A 64-bit key as two signed 32-bit numbers, low half first."""
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


class CudaExecutor:
    def __init__(self, runner: CudaModelRunner) -> None:
        self._runner = runner
        self._host = HostExecutor(runner)
        self._counts = DeviceCounts(runner)

    def submit(self, plan: StepPlan, sampling: StepSampling) -> StepHandle:
        hidden = None
        if any(s.hidden for s in plan.sequences):
            hidden, plan = self._host.forward_hidden(plan)
        elif _in_step(sampling):
            return self._start(plan, sampling, 0)
        result = self._step(plan, sampling) if plan.sequences else StepResult([])
        result.hidden = hidden
        return _Done(result)

    def submit_ahead(self, plan: StepPlan, sampling: StepSampling) -> StepHandle | None:
        """See `run_ahead.AheadExecutor`."""
        if not _in_step(sampling) or not all(map(runs_ahead, sampling.states)):
            return None
        return self._start(plan, sampling, 1)

    def _start(self, plan: StepPlan, sampling: StepSampling, ahead: int) -> StepHandle:
        states = sampling.states
        fill = _filler(sampling.rows, states, self._counts.rows(states, ahead), ahead)
        source = np.arange(len(plan.sequences), dtype=np.int32) if ahead else None
        tops = any(state.params.logprobs for state in states)
        return _Handle(self._runner.forward_and_sample(plan, fill, source, tops), sampling, tops)

    def _step(self, plan: StepPlan, sampling: StepSampling) -> StepResult:
        """A step whose logits are sampled apart from it."""
        logits = self._runner.start(plan)
        states, rows = sampling.states, sampling.rows
        num_rows = sum(len(s.logit_offsets) for s in plan.sequences)
        on_host = {i for i, s in enumerate(states) if not fits(s)}
        masks = {i: s.constraint.bits() for i, s in enumerate(states) if s.constraint is not None and i not in on_host}
        result = StepResult([-1] * len(states), [None] * len(states))
        for part in _rounds(rows, on_host):
            ours = [states[i] for i in part]
            fill = _filler([rows[i] for i in part], ours, self._counts.rows(ours), masks=[masks.get(i) for i in part])
            tops = any(state.params.logprobs for state in ours)
            drawn = self._runner.sample(logits, num_rows, fill, tops)
            _collect(result, part, drawn, [rows[i] for i in part], ours, tops)
        self._finish_on_host(logits, sampling, on_host, result)
        return result

    def _finish_on_host(self, logits: Any, sampling: StepSampling, on_host: set[int], result: StepResult) -> None:
        """What needs logits on the host: prompt scores, many likeliest tokens, and draws of those in `on_host`."""
        states, rows, scores = sampling.states, sampling.rows, sampling.prompt_scores
        tops = [i for i, s in enumerate(states)
                if (s.params.logprobs or 0) > TOP_LOGPROBS and i not in on_host and i not in result.errors]
        wanted = sorted({*(score.row for score in scores), *(rows[i] for i in tops), *(rows[i] for i in on_host)})
        if not wanted:
            return
        place = {row: i for i, row in enumerate(wanted)}
        values = self._runner.read_rows(logits, wanted)
        result.prompt_logprobs = sampler.score(values, [place[s.row] for s in scores], [s.token_id for s in scores],
                                               [s.top for s in scores])
        found = sampler.score(values, [place[rows[i]] for i in tops], [result.token_ids[i] for i in tops],
                              [states[i].params.logprobs or 0 for i in tops])
        own = sorted(on_host)
        drawn = sampler.sample(values, [place[rows[i]] for i in own], [states[i] for i in own])
        assert result.logprobs is not None
        for i, one in zip(tops, found, strict=True):
            result.logprobs[i] = one
        for k, i in enumerate(own):
            result.token_ids[i] = drawn.token_ids[k]
            result.logprobs[i] = drawn.logprobs[k] if drawn.logprobs else None
            if k in drawn.errors:
                result.errors[i] = drawn.errors[k]

    def close(self) -> None:
        self._host.close()


def _rounds(rows: Sequence[int], without: set[int]) -> Iterator[list[int]]:
    """Indices of states in parts of which no two share a logit row (outputs of one prompt do)."""
    left = [i for i in range(len(rows)) if i not in without]
    while left:
        taken: dict[int, int] = {}
        for i in left:
            taken.setdefault(rows[i], i)
        yield list(taken.values())
        left = [i for i in left if taken[rows[i]] != i]


def _collect(result: StepResult, places: Sequence[int], drawn: SampledTokens, rows: Sequence[int],
             states: Sequence[SamplingState], tops: bool) -> None:
    """Put what was drawn for rows into places of a result. `tops`: likeliest tokens are there too."""
    token_ids, logprobs = drawn.result()
    top_ids, top_logprobs = drawn.tops() if tops else ([], [])
    for place, row, state in zip(places, rows, states, strict=True):
        token_id, wanted = token_ids[row], state.params.logprobs
        if token_id < 0:
            result.errors[place] = NOT_FINITE if token_id == -1 else nothing_allowed(state)
            continue
        result.token_ids[place] = token_id
        if wanted is not None and result.logprobs is not None:
            best = zip(top_ids[row][:wanted], top_logprobs[row][:wanted], strict=True) if wanted else ()
            result.logprobs[place] = TokenLogprobs(token_id, logprobs[row], tuple(best))


class _Handle:
    def __init__(self, tokens: SampledTokens, sampling: StepSampling, tops: bool) -> None:
        self._tokens, self._sampling, self._tops = tokens, sampling, tops

    def result(self) -> StepResult:
        states, rows = self._sampling.states, self._sampling.rows
        wanted = any(state.params.logprobs is not None for state in states)
        result = StepResult([-1] * len(states), [None] * len(states) if wanted else None)
        _collect(result, range(len(states)), self._tokens, rows, states, self._tops)
        return result


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result
