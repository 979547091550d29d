"""Sampling of a whole bundle on the GPU: each setting against the host sampler over the same logits, counts after dropped
steps, and draws against their probabilities. RELAXPACK_GPU_BUNDLE names a bundle that was built elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaxpack.dist.bundle import Bundle
from relaxpack.kernel_spec import FIRST_EDIT, counts_width
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.load import load_runner
from relaxpack.runtime.sampler import SamplingState
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import SequenceStep, StepPlan, StepSampling
from tests.gpu.test_whole_bundle import bundle  # noqa: F401
from tests.helpers import sampling_case
from tests.helpers.sampling_requests import PENALTIES, check_counts, check_greedy, engine, settings

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runner(bundle: Path) -> CudaModelRunner:  # noqa: F811
    made = load_runner(Bundle.open(bundle), "cuda", 512)
    assert isinstance(made, CudaModelRunner)
    return made


def prompts(runner: CudaModelRunner, count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(8, runner.vocab_size, 3 + i).tolist() for i in range(count)]


@pytest.mark.parametrize("name", settings(100))
def test_greedy_tokens_equal_those_of_the_host(runner: CudaModelRunner, name: str) -> None:
    device, host, plain = engine(runner), engine(runner, on_device=False), engine(runner)
    check_greedy(device, host, plain, prompts(runner, 4), name)


def test_counts_on_the_device_are_those_of_the_tokens(runner: CudaModelRunner) -> None:
    made = engine(runner)
    params = replace(PENALTIES, temperature=0.9, seed=4, max_tokens=60, logit_bias={2: 0.5})
    first = made.add(prompts(runner, 1)[0], params)
    made.step()
    for step in range(30):
        if step in (4, 10, 17):
            made.add(prompts(runner, 2)[1], replace(params, max_tokens=3, n=2))
        made.step()
        check_counts(made, first.sequences[0])
    assert made._ahead is not None and made._ahead.dropped >= 3 and made._ahead.used >= 10


DRAWN = {
    "typical_p": SamplingParams(typical_p=0.8),
    "typical_p after others": SamplingParams(temperature=1.3, top_k=200, top_p=0.95, min_p=0.001, typical_p=0.6),
    "penalties": SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.4, presence_penalty=0.5,
                                frequency_penalty=0.7),
    "bias and bans": SamplingParams(temperature=1.2, top_k=30, logit_bias={50: 6.0, 51: 5.5, 9: -100.0}, bad_words=((50,),)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_have_their_probabilities(runner: CudaModelRunner, name: str) -> None:
    """Thousands of draws at one place of a text, each with a key of its own, against float64 over the step's logits."""
    executor, params, batch = CudaExecutor(runner), DRAWN[name], runner.max_batch
    tokens = [11, 12, 13, 12, 50, 12, 13, 50, 60]
    plan = StepPlan((SequenceStep(tokens[:-1], 0, [1, 2], [len(tokens) - 2]),))
    runner.forward(plan)                                    # a prompt of 3 tokens and 6 that followed
    step = StepPlan(tuple(SequenceStep(tokens[-1:], len(tokens) - 1, [1, 2], [0]) for _ in range(batch)))
    logits = runner.forward(step)[0]
    rng, draws = np.random.default_rng(5), []
    while len(draws) < 4000:
        states = [SamplingState(params, int(key), tokens, 3) for key in rng.integers(0, 2**63, batch)]
        draws += executor.submit(step, StepSampling(range(batch), states)).result().token_ids
    words = _words(runner.vocab_size, params, tokens)
    row = np.array([params.temperature, params.top_p, params.min_p, params.repetition_penalty, params.presence_penalty,
                    params.frequency_penalty, params.typical_p, 0], np.float32)
    z = sampling_case.adjusted(logits, row, 0, words)
    keep = sampling_case.kept(z, params.top_k, params.top_p, params.min_p, params.typical_p)
    p = np.where(keep, np.exp(z - z[keep].max()), 0.0)
    p /= p.sum()
    hits = np.bincount(draws, minlength=len(p))
    # A token exactly at a border may fall on either side; together such ones are rare.
    assert hits[~keep].sum() <= 0.002 * len(draws)
    # Groups of neighbours by likelihood, of about equal mass: some of one token, some of thousands where logits are flat.
    order = np.argsort(-p)
    group = np.minimum((np.cumsum(p[order]) - p[order] / 2) * 24, 23).astype(np.int64)
    expected = np.bincount(group, p[order], 24) * len(draws)
    observed = np.bincount(group, hits[order], 24)
    used = expected >= 5
    chi = float((((observed - expected) ** 2) / np.maximum(expected, 1e-9))[used].sum())
    freedom = int(used.sum()) - 1
    assert freedom >= 2 and chi < freedom + 5 * (2 * freedom) ** 0.5, (chi, freedom)


def _words(vocab: int, params: SamplingParams, tokens: list[int]) -> np.ndarray:
    """The row of counts that these settings mean, made apart from `device_counts`."""
    words = np.zeros(counts_width(vocab), np.int32)
    words[tokens[:3]] = sampling_case.IN_PROMPT
    np.add.at(words, tokens[3:], 1)
    edits = {**params.logit_bias, **{word[-1]: -np.inf for word in params.bad_words}}
    for number, (token, value) in enumerate(edits.items(), FIRST_EDIT):
        words[token] |= number << sampling_case.COUNT_BITS
        words[vocab + number] = np.float32(value).view(np.int32)
    words[vocab + 1] = -1
    return words
