"""Too few pages, failing steps, bad logits, requests that go away: what ends, and that nothing else changes."""

import numpy as np
import pytest

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.request import FinishReason, SequenceStatus
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.engine import GREEDY, idle, prompts_of
from tests.helpers.fakes import FakeRunner


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_50_concurrent_of_500_with_pages_for_8(prefix_caching):
    """Eviction and preemption never stop, nothing is lost, and every output is that of the request alone."""
    runner = FakeRunner(page_size=4, num_pages=1 + 8 * 10, max_batch=50, prefill_chunk=64, max_context=64)
    engine = Engine(runner, prefix_caching=prefix_caching)
    rng = np.random.default_rng(3)
    stems = prompts_of([12, 8], seed=1)
    prompts = [stems[i % 2][:rng.integers(0, 13)] + rng.integers(0, 97, rng.integers(1, 17)).tolist()
               for i in range(500)]
    params = [SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 33))) for _ in prompts]
    outputs = engine.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output.choices[0].token_ids == runner.reference_greedy(prompt, own.max_tokens)
    assert engine.metrics.preemptions > 50
    assert engine.metrics.output_tokens == sum(p.max_tokens for p in params)
    if prefix_caching:
        assert engine.metrics.evictions > 100 and engine.metrics.cached_tokens > 0
    assert idle(engine)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_exact_under_pressure_although_decode_and_prefill_differ(prefix_caching):
    """Every token is computed by the same function as in the run alone, preempted or not, hit or not."""
    sizes = {"page_size": 4, "max_context": 64, "vocab_size": 5003, "decode_twist": 12345}
    rng = np.random.default_rng(4)
    [stem] = prompts_of([12], seed=1, vocab=5003)
    prompts = [stem[:rng.integers(0, 13)] + rng.integers(0, 5003, rng.integers(1, 17)).tolist() for _ in range(100)]
    params = [SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 33)), n=int(rng.integers(1, 3)))
              for _ in prompts]
    crowd = Engine(FakeRunner(num_pages=1 + 5 * 10, max_batch=20, prefill_chunk=21, **sizes),
                   prefix_caching=prefix_caching)
    outputs = crowd.generate(prompts, params)
    assert crowd.metrics.preemptions > 20 and idle(crowd)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        alone = Engine(FakeRunner(num_pages=100, **sizes), prefix_caching=False)
        [expected] = alone.generate([prompt], SamplingParams(temperature=0.0, max_tokens=own.max_tokens))
        assert [c.token_ids for c in output.choices] == [expected.choices[0].token_ids] * own.n


def test_not_exact_recomputes_in_chunks():
    """Fewer steps after a preemption; with kernels that agree the outputs are the same."""
    prompts, steps = prompts_of([9, 9, 9, 9]), {}
    for exact in (True, False):
        runner = FakeRunner(num_pages=15, prefill_chunk=32)
        engine = Engine(runner, exact=exact, prefix_caching=False)
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=30))
        assert [o.choices[0].token_ids for o in outputs] == [runner.reference_greedy(p, 30) for p in prompts]
        assert engine.metrics.preemptions > 0 and idle(engine)
        steps[exact] = engine.metrics.steps
    assert steps[False] < steps[True]


def test_cancel_gives_pages_back_at_once():
    engine = Engine(FakeRunner())
    request = engine.add(prompts_of([40])[0], SamplingParams(n=2))
    waiting = engine.add([1, 2])
    engine.step()
    events = engine.cancel(request)
    assert [e.finish_reason for e in events] == [FinishReason.ABORT] * 2
    engine.cancel(waiting.id)
    assert engine.cancel(request) == [] and engine.cancel("unknown") == []
    assert idle(engine)


def test_nan_logits_end_the_request_and_no_other():
    """C39: never token 0."""
    runner = FakeRunner()
    runner.nan_for = 13
    engine = Engine(runner)
    bad, good = engine.generate([[4, 13], [5, 6]], SamplingParams(temperature=0.0, max_tokens=2))
    assert bad.choices[0].token_ids == [] and bad.choices[0].finish_reason is FinishReason.ERROR
    assert "not finite" in bad.choices[0].error
    assert good.choices[0].token_ids == runner.reference_greedy([5, 6], 2)
    [sampled] = engine.generate([[4, 13]], SamplingParams(temperature=0.8, top_k=5, max_tokens=2, n=2))
    assert all(c.finish_reason is FinishReason.ERROR and c.token_ids == [] for c in sampled.choices)
    assert idle(engine)


def test_a_failing_step_ends_its_sequences_and_poisons_no_cache():
    runner = FakeRunner()
    engine = Engine(runner)
    [prompt] = prompts_of([18])
    engine.generate([prompt], GREEDY)
    runner.fail_next = RuntimeError("device lost")
    turn2 = [*prompt[:17], 3, 4, 5]
    [output] = engine.generate([turn2], GREEDY)     # its partial hit is a copy that never happens
    assert output.choices[0].finish_reason is FinishReason.ERROR and "device lost" in output.choices[0].error
    assert idle(engine)
    [again] = engine.generate([turn2], GREEDY)
    assert again.choices[0].token_ids == runner.reference_greedy(turn2, 12)


def test_a_sequence_admitted_by_a_failing_step_starts_over():
    """It was to decode in the next step, from a copy that the failing step never made. Found by the random test."""
    runner = FakeRunner(page_size=2, num_pages=13, max_batch=2, prefill_chunk=3)
    engine = Engine(runner)
    request = engine.add([24, 16, 0], SamplingParams(temperature=0.0, max_tokens=6, n=3))
    engine.step()
    engine.step()
    third = request.sequences[2]
    assert third.status is SequenceStatus.WAITING       # a batch of 2 has no room for it
    engine.finish(request.sequences[0], FinishReason.STOP)
    runner.fail_next = RuntimeError("device lost")
    engine.step()
    assert runner.plans[-1].copies and third.status is SequenceStatus.WAITING and third.computed == 0
    while engine.has_work:
        engine.step()
    assert third.output_ids == runner.reference_greedy([24, 16, 0], 6)
    assert request.sequences[1].finish_reason is FinishReason.ERROR and idle(engine)


def test_interrupt_during_a_step_leaves_a_working_engine():
    runner = FakeRunner()
    engine = Engine(runner)
    runner.fail_next = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]], GREEDY)
    assert idle(engine)
    assert engine.generate([[1, 2, 3]], GREEDY)[0].choices[0].token_ids == runner.reference_greedy([1, 2, 3], 12)
