"""The engine over a compiled model: pressure on pages, cached prefixes and restarts change no greedy output."""

from __future__ import annotations

import numpy as np
import pytest

from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.load import load_model
from relaxpack.runtime.prefix_store import load_prefixes, save_prefixes
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.numerics import decode_logits, prefill_logits, tapes
from tests.helpers.tvm_threads import on_threads


@pytest.fixture(scope="module")
def runner(tiny_bundle):
    return load_model(tiny_bundle).runner


@pytest.fixture(scope="module")
def small_runner(tiny_bundle):
    """Pages for two and a half of the four sequences that run together."""
    return load_model(tiny_bundle, num_pages=1 + 12).runner


@pytest.fixture(scope="module")
def load(runner):
    """50 requests with shared beginnings, and what each gives alone without a cache."""
    rng = np.random.default_rng(2)
    vocab = runner.vocab_size
    stem = rng.integers(3, vocab, 40).tolist()
    prompts = [stem[:rng.integers(0, 41)] + rng.integers(3, vocab, rng.integers(1, 25)).tolist() for _ in range(50)]
    params = [SamplingParams(temperature=0.0, max_tokens=int(rng.integers(2, 40))) for _ in prompts]
    alone = [Engine(runner, prefix_caching=False).generate([p], own)[0].choices[0].token_ids
             for p, own in zip(prompts, params, strict=True)]
    return prompts, params, alone


def test_a_second_thread_changes_nothing(runner):
    ids = np.random.default_rng(3).integers(3, runner.vocab_size, 90).tolist()

    def logits():
        (tape,) = tapes(runner, [ids])
        return np.concatenate([prefill_logits(tape, 75), decode_logits(tape, 90)])

    np.testing.assert_array_equal(on_threads(2, logits), on_threads(1, logits))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_outputs_under_pressure_equal_the_run_alone(small_runner, load, prefix_caching):
    prompts, params, alone = load
    engine = Engine(small_runner, prefix_caching=prefix_caching)
    outputs = engine.generate(prompts, params)
    assert [o.choices[0].token_ids for o in outputs] == alone
    assert engine.metrics.preemptions > 5
    assert (engine.metrics.cached_tokens > 300) == prefix_caching
    engine.scheduler.check()
    assert engine.scheduler.pool.available == engine.scheduler.pool.total


@pytest.mark.parametrize("token_budget", [2, 5, 16, 31])
def test_chunked_prefill_equals_whole(runner, load, token_budget):
    prompts, params, alone = load
    outputs = Engine(runner, token_budget=token_budget, prefix_caching=False).generate(prompts[:12], params[:12])
    assert [o.choices[0].token_ids for o in outputs] == alone[:12]


def test_threads_share_the_model(small_runner, load):
    prompts, params, alone = load
    with AsyncEngine(Engine(small_runner)) as shared:
        streams = [shared.submit(p, own) for p, own in zip(prompts, params, strict=True)]
        assert [s.collect()[0].token_ids for s in streams] == alone


def test_forks_of_a_greedy_request_agree(runner, load):
    prompts, params, alone = load
    own = SamplingParams(temperature=0.0, max_tokens=params[0].max_tokens, n=3)
    [output] = Engine(runner).generate(prompts[:1], own)
    assert [c.token_ids for c in output.choices] == [alone[0]] * 3


def test_pages_of_a_real_model_survive_a_restart(tiny_bundle, runner, load, tmp_path):
    prompts, params, alone = load
    engine = Engine(runner)
    engine.generate(prompts[:6], params[:6])
    assert save_prefixes(engine, tmp_path, "tiny").pages > 6
    fresh = Engine(load_model(tiny_bundle).runner)
    assert load_prefixes(fresh, tmp_path, "tiny").pages > 6
    outputs = fresh.generate(prompts[:6], params[:6])
    assert [o.choices[0].token_ids for o in outputs] == alone[:6]
    assert all(o.cached_tokens >= len(o.prompt_ids) - 2 for o in outputs)
