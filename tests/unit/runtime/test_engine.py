"""The engine over the fake runner: outputs equal the reference whatever is batched, chunked, shared or preempted."""

import numpy as np
import pytest

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.request import FinishReason
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.fakes import FakeRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def prompts_of(lengths, seed=0, vocab=97):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def idle(engine):
    """Nothing runs and every page is free or cached."""
    engine.scheduler.check()
    pool = engine.scheduler.pool
    return not engine.has_work and pool.available == pool.total


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_batched_greedy_equals_reference(page_size, prefix_caching):
    runner = FakeRunner(page_size=page_size, num_pages=512 // page_size)
    engine = Engine(runner, prefix_caching=prefix_caching)
    prompts = prompts_of([1, 3, 4, 5, 15, 16, 17, 40])
    outputs = engine.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.choices[0].token_ids == runner.reference_greedy(prompt, 12)
        assert output.choices[0].finish_reason is FinishReason.LENGTH
    assert idle(engine)
