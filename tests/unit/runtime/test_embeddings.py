"""Embeddings through the engine over a fake runner: right whatever is chunked, shared, preempted or runs beside them."""

import random

import numpy as np
import pytest

from relaxpack.errors import RequestError
from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.pooling import EmbeddingParams, Pooler
from relaxpack.runtime.request import FinishReason
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.embedding_fake import SIZE, EmbeddingFake, reference
from tests.helpers.engine import GREEDY, prompts_of
from tests.helpers.fakes import FakeRunner

POOLINGS = ("last", "mean")


def embed(engine, prompts, **params):
    """The requests, finished."""
    requests = [engine.admit(engine.prepare_embedding(p, EmbeddingParams(**params))) for p in prompts]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    return requests


def assert_right(request):
    p = request.pooler.params
    expected = reference(request.prompt_ids, p.pooling, p.dimensions, p.normalize)
    assert request.embedding.dtype == np.float32
    np.testing.assert_allclose(request.embedding, expected, rtol=0, atol=1e-6)


def test_the_pooler_takes_each_row_once_however_the_prompt_is_cut():
    rows = np.arange(24, dtype=np.float32).reshape(6, 4) ** 2
    pooler = Pooler(EmbeddingParams(pooling="mean", normalize=False), 6)
    assert pooler.reads_all and pooler.offsets(0, 4) == (0, 1, 2, 3)
    pooler.add(0, 4, rows[:4])
    assert pooler.offsets(0, 5) == (4,)             # from the start again, after a preemption
    pooler.add(0, 5, rows[4:5])
    assert pooler.offsets(5, 1) == (0,)
    pooler.add(5, 1, rows[5:])
    np.testing.assert_allclose(pooler.embedding(), rows.mean(axis=0), rtol=1e-6)
    last = Pooler(EmbeddingParams(normalize=False), 6)
    assert not last.reads_all and last.offsets(0, 5) == () and last.offsets(2, 4) == (3,)


def test_dimensions_are_cut_before_the_length_becomes_1():
    pooler = Pooler(EmbeddingParams(dimensions=2), 1)
    pooler.add(0, 1, np.array([[3.0, 4.0, 12.0]], np.float32))
    np.testing.assert_allclose(pooler.embedding(), [0.6, 0.8], rtol=1e-6)
    nothing = Pooler(EmbeddingParams(), 1)
    nothing.add(0, 1, np.zeros((1, 3), np.float32))
    assert nothing.embedding().tolist() == [0, 0, 0]        # no direction, but no division by zero either


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_equal_to_the_reference(page_size, prefix_caching, pooling):
    engine = Engine(EmbeddingFake(page_size=page_size, num_pages=512 // page_size), prefix_caching=prefix_caching)
    requests = embed(engine, prompts_of([1, 2, 3, 4, 5, 15, 16, 17, 33, 90]), pooling=pooling)
    for request in requests:
        assert_right(request)
        assert request.sequences[0].finish_reason is FinishReason.STOP and request.sequences[0].output_ids == []
    pool = engine.scheduler.pool
    assert pool.available == pool.total
    assert engine.metrics.output_tokens == 0 and engine.metrics.prompt_tokens == sum(len(r.prompt_ids) for r in requests)


def test_beside_running_chats_under_pressure():
    """Pages for few sequences: chats and embeddings preempt each other, and nothing changes in either."""
    runner = EmbeddingFake(page_size=4, num_pages=34, max_batch=6, prefill_chunk=9, max_context=80)
    engine = Engine(runner)
    rng = random.Random(4)
    stem = prompts_of([30], seed=8)[0]
    chats, embeddings = [], []
    for _ in range(60):
        prompt = stem[:rng.randrange(31)] + [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
        chats.append(engine.add(prompt[:30], SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 40))))
        params = EmbeddingParams(pooling=rng.choice(POOLINGS), dimensions=rng.choice([None, 5]),
                                 normalize=rng.random() < 0.5)
        embeddings.append(engine.admit(engine.prepare_embedding(prompt, params)))
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert any(r.sequences[0].preemptions and r.pooler.params.pooling == "mean" for r in embeddings)
    for request in embeddings:
        assert_right(request)
    for request in chats:
        assert request.sequences[0].output_ids == runner.reference_greedy(
            request.prompt_ids, request.token_limit - len(request.prompt_ids))
    pool = engine.scheduler.pool
    assert pool.available == pool.total and pool.num_held == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_lives(seed):
    """A thousand steps each, with cancels, failures and chats in between: page invariants hold, and what ends is right."""
    rng = random.Random(seed)
    runner = EmbeddingFake(page_size=[1, 3, 4][seed], num_pages=[70, 26, 20][seed], max_batch=5, max_context=40,
                           prefill_chunk=[5, 9, 16][seed])
    engine = Engine(runner, prefix_caching=seed != 1, exact=seed != 2)
    stem, live, failed = prompts_of([20], seed)[0], [], 0
    for _ in range(1000):
        while len(live) < 8 and rng.random() < 0.6:
            prompt = stem[:rng.randrange(21)] + [rng.randrange(97) for _ in range(rng.randrange(1, 19))]
            live.append(engine.add(prompt, SamplingParams(max_tokens=rng.randrange(1, 2 + 39 - len(prompt)), seed=1))
                        if rng.random() < 0.4 else engine.admit(engine.prepare_embedding(
                            prompt, EmbeddingParams(pooling=rng.choice(POOLINGS)))))
        if rng.random() < 0.03:
            engine.cancel(live.pop(rng.randrange(len(live)))) if live else None
        if rng.random() < 0.01:
            runner.fail_next = RuntimeError("injected")
        engine.step()
        engine.scheduler.check()
        for request in [r for r in live if r.finished]:
            live.remove(request)
            if request.sequences[0].finish_reason is FinishReason.ERROR:
                failed += 1
            elif request.pooler is not None:
                assert_right(request)
    runner.fail_next = None
    while engine.has_work:
        engine.step()
    pool = engine.scheduler.pool
    assert pool.available == pool.total and pool.num_held == 0
    assert engine.metrics.preemptions > 5 and failed > 0


def test_cached_pages_serve_the_last_token_but_not_a_mean():
    engine = Engine(EmbeddingFake())
    [prompt] = prompts_of([30])
    engine.generate([prompt], GREEDY)
    before = engine.runner.hidden_rows
    [last] = embed(engine, [prompt])
    assert last.cached_tokens >= 24 and engine.runner.hidden_rows == before + 1
    [mean] = embed(engine, [prompt], pooling="mean")
    assert mean.cached_tokens == 0 and engine.runner.hidden_rows == before + 31
    assert_right(last)
    assert_right(mean)
    engine.runner.plans.clear()
    [output] = engine.generate([[*prompt, 5]], GREEDY)       # and a chat continues what an embedding computed
    assert output.cached_tokens >= 28 and output.choices[0].token_ids == engine.runner.reference_greedy([*prompt, 5], 12)


def test_a_chat_step_has_its_token_while_a_long_text_is_embedded():
    engine = Engine(EmbeddingFake(prefill_chunk=16))
    chat = engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
    engine.step()
    request = engine.admit(engine.prepare_embedding(prompts_of([80])[0]))
    while not request.finished:
        before = len(chat.sequences[0].token_ids)
        engine.step()
        assert len(chat.sequences[0].token_ids) == before + 1


@pytest.mark.parametrize("pooling", POOLINGS)
def test_cancel_gives_pages_back_before_the_next_step(pooling):
    engine = Engine(EmbeddingFake(prefill_chunk=8))
    request = engine.admit(engine.prepare_embedding(prompts_of([60])[0], EmbeddingParams(pooling=pooling)))
    engine.step()
    assert engine.metrics.pages_held == 15
    [event] = engine.cancel(request)
    assert event.finish_reason is FinishReason.ABORT and request.embedding is None
    assert engine.metrics.pages_held == 0 and not engine.has_work
    engine.scheduler.check()


def test_a_failing_step_ends_them_with_its_error():
    engine = Engine(EmbeddingFake())
    engine.runner.fail_next = RuntimeError("injected")
    [request] = embed(engine, prompts_of([10]))
    assert request.embedding is None and "injected" in request.sequences[0].error
    [again] = embed(engine, prompts_of([10]))
    assert_right(again)


def test_states_that_are_not_finite_are_an_error_and_no_other_request_is_harmed():
    engine = Engine(EmbeddingFake())
    engine.runner.nan_for = 7
    bad, good = embed(engine, [[1, 2, 7], [1, 2, 3]])
    assert bad.sequences[0].finish_reason is FinishReason.ERROR and "not finite" in bad.sequences[0].error
    assert bad.embedding is None
    assert_right(good)


def test_a_prompt_may_fill_the_context():
    engine = Engine(EmbeddingFake(max_context=64))
    [request] = embed(engine, prompts_of([64]))
    assert_right(request)
    with pytest.raises(RequestError, match="has 65 tokens, but the context holds 64: shorten it by 1"):
        engine.prepare_embedding(prompts_of([65])[0])
    small = Engine(EmbeddingFake(num_pages=5, max_context=64))
    assert_right(embed(small, prompts_of([16]))[0])
    with pytest.raises(RequestError, match="the KV cache holds 16"):
        small.prepare_embedding(prompts_of([17])[0])


@pytest.mark.parametrize("make, words, param", [
    (lambda e: e.prepare_embedding([]), "empty", "prompt"),
    (lambda e: e.prepare_embedding([97]), "from 0 to 96", "prompt"),
    (lambda e: e.prepare_embedding(["a"]), "whole numbers", "prompt"),
    (lambda e: e.prepare_embedding([1], EmbeddingParams(dimensions=SIZE + 1)), f"have {SIZE}", "dimensions"),
    (lambda e: EmbeddingParams(dimensions=0), "from 1 on", "dimensions"),
    (lambda e: EmbeddingParams(pooling="max"), "last, mean", "pooling"),
])
def test_what_makes_no_sense_is_refused_by_name(make, words, param):
    with pytest.raises(RequestError, match=words) as error:
        make(Engine(EmbeddingFake()))
    assert error.value.param == param


def test_what_the_bundle_cannot_do_is_said_with_what_to_build():
    with pytest.raises(RequestError, match="relaxpack build --embeddings"):
        Engine(FakeRunner()).prepare_embedding([1])
    with pytest.raises(RequestError, match="instead of --embeddings-only"):
        Engine(EmbeddingFake(generates=False)).add([1])


def test_a_runner_that_only_embeds():
    engine = Engine(EmbeddingFake(generates=False))
    for request in embed(engine, prompts_of([1, 9, 40])):
        assert_right(request)


def test_threads_get_theirs_from_the_async_engine():
    prompts = prompts_of([3, 50, 20])
    with AsyncEngine(Engine(EmbeddingFake())) as engine:
        assert engine.embedding_size == SIZE and engine.generates
        streams = [engine.submit_embedding(p) for p in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            [piece] = stream.collect()
            assert piece.finish_reason == "stop" and piece.error is None and stream.request.prompt_ids == prompt
            assert_right(stream.request)
