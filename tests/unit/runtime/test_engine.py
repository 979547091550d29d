"""The engine over the fake runner: outputs equal the reference whatever is batched, chunked, shared or preempted."""

import numpy as np
import pytest

from relaxpack.errors import RequestError
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.request import FinishReason, SequenceStatus
from relaxpack.runtime.sampler import SamplingState
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import SequenceStep, StepPlan, StepSampling
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


def test_tokens_stream_in_order_and_on_event_sees_all():
    runner = FakeRunner()
    seen = []
    [output] = Engine(runner).generate([[5, 6, 7]], GREEDY, on_event=seen.append)
    assert [e.token_id for e in seen] == output.choices[0].token_ids
    assert [e.finish_reason for e in seen] == [None] * 11 + [FinishReason.LENGTH]


def test_long_prompt_never_stalls_a_running_stream():
    """While an 80-token prompt is prefilled in chunks of 16, the running stream gets a token in every step."""
    runner = FakeRunner(prefill_chunk=16)
    engine = Engine(runner)
    first = engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
    engine.step()
    second = engine.add(prompts_of([80])[0], GREEDY)
    steps = 0
    while not second.sequences[0].output_ids:
        before = len(first.sequences[0].token_ids)
        engine.step()
        steps += 1
        assert len(first.sequences[0].token_ids) == before + 1
    assert steps == 6       # 15 tokens a step beside one decode
    assert all(sum(len(s.token_ids) for s in plan.sequences) <= 16 for plan in runner.plans)


def test_decodes_and_prefills_of_a_step_run_apart():
    """Each through its own function, and every logit row back at its place, whichever kind comes first."""
    runner = FakeRunner(max_logit_rows=16)
    executor = HostExecutor(runner)
    steps = (SequenceStep([7], 0, [1], (0,)), SequenceStep([1, 2, 3], 0, [2], (0, 2)), SequenceStep([9], 0, [3], (0,)),
             SequenceStep([4, 5], 0, [4], ()))
    states = [SamplingState(SamplingParams(temperature=0.0, logprobs=0), 0, [0], 1) for _ in range(4)]
    result = executor.submit(StepPlan(steps, ((5, 6),)), StepSampling(range(4), states)).result()
    prompts = [[7], [1], [1, 2, 3], [9]]
    assert result.token_ids == [int(runner.reference_logits(p).argmax()) for p in prompts]
    assert [[len(s.token_ids) for s in plan.sequences] for plan in runner.plans] == [[1, 1], [3, 2]]
    assert [plan.copies for plan in runner.plans] == [((5, 6),), ()]


def test_decodes_that_fill_the_budget_take_turns_with_prefills():
    runner = FakeRunner(prefill_chunk=4, max_batch=8)
    engine = Engine(runner)
    prompts = prompts_of([3] * 8 + [9] * 4)
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.choices[0].token_ids == runner.reference_greedy(prompt, 20)
    assert idle(engine)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("offset", ["1", "page-1", "page", "page+1", "2*page"])
def test_513_copies_of_one_prompt(page_size, offset):
    """C30: equal prompts around a page boundary; a full hit still computes the last token."""
    length = max(1, eval(offset, {"page": page_size}))
    runner = FakeRunner(page_size=page_size, num_pages=40 * 64 // page_size, max_batch=16, prefill_chunk=128)
    engine = Engine(runner)
    [prompt] = prompts_of([length])
    outputs = engine.generate([prompt] * 513, SamplingParams(temperature=0.0, max_tokens=3))
    expected = runner.reference_greedy(prompt, 3)
    assert all(o.choices[0].token_ids == expected for o in outputs)
    assert outputs[-1].cached_tokens == max(0, length - 2)      # a prompt's end takes two tokens
    assert idle(engine)


def test_second_turn_prefills_only_its_new_part():
    """C33: the ids of turn 1 are the beginning of turn 2, up to the middle of a page."""
    runner = FakeRunner(page_size=4)
    engine = Engine(runner)
    [turn1] = prompts_of([10])
    [first] = engine.generate([turn1], SamplingParams(temperature=0.0, max_tokens=9))
    history = turn1 + first.choices[0].token_ids
    turn2 = [*history, 11, 12, 13]
    runner.plans.clear()
    [second] = engine.generate([turn2], GREEDY)
    # 19 tokens of history; the last output token was never computed: it and 3 new ones are left.
    assert second.cached_tokens == 18
    assert len(runner.plans[0].sequences[0].token_ids) == 4 and runner.plans[0].sequences[0].start == 18
    assert second.choices[0].token_ids == runner.reference_greedy(turn2, 12)


def test_prefix_hit_stops_at_the_first_differing_token():
    runner = FakeRunner(page_size=4, num_pages=256)
    engine = Engine(runner)
    [prompt] = prompts_of([16])
    engine.generate([prompt], GREEDY)
    for place in range(16):
        other = [*prompt[:place], (prompt[place] + 1) % 97, *prompt[place + 1:]]
        [output] = engine.generate([other], GREEDY)
        assert output.cached_tokens >= min(place, 14)
        assert output.choices[0].token_ids == runner.reference_greedy(other, 12)


def test_salt_separates_caches():
    engine = Engine(FakeRunner())
    [prompt] = prompts_of([20])
    assert engine.generate([prompt], GREEDY, salt="a")[0].cached_tokens == 0
    assert engine.generate([prompt], GREEDY, salt="b")[0].cached_tokens == 0
    assert engine.generate([prompt], GREEDY, salt="a")[0].cached_tokens == 18


def test_shared_prefix_saves_90_percent_of_prefill():
    runner = FakeRunner(page_size=16, num_pages=400, prefill_chunk=512, max_context=5000)
    engine = Engine(runner)
    shared, *tails = prompts_of([4096, 7, 20, 33])
    engine.generate([shared + tails[0]], GREEDY)
    for tail in tails[1:]:
        runner.plans.clear()
        [output] = engine.generate([shared + tail], SamplingParams(temperature=0.0, max_tokens=1))
        assert sum(len(s.token_ids) for plan in runner.plans for s in plan.sequences) == len(tail)
        assert output.cached_tokens == 4096


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


def test_n_outputs_fork_and_copy_on_write():
    runner = FakeRunner(page_size=4)
    engine = Engine(runner)
    [prompt] = prompts_of([6])
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10)
    [output] = engine.generate([prompt], params)
    assert sum(len(s.token_ids) for s in runner.plans[0].sequences) == 6        # the prompt is computed once
    assert len(runner.plans[1].copies) == 2                                     # its open page copied for two
    alone = [Engine(FakeRunner(page_size=16)).generate([prompt], params)[0].choices[i].token_ids for i in range(3)]
    assert [c.token_ids for c in output.choices] == alone
    assert len({tuple(c.token_ids) for c in output.choices}) == 3
    assert idle(engine)


def test_n_larger_than_the_batch():
    runner = FakeRunner(max_batch=2)
    engine = Engine(runner)
    [output] = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(temperature=0.0, n=5, max_tokens=8))
    assert [c.token_ids for c in output.choices] == [runner.reference_greedy([1, 2, 3, 4, 5], 8)] * 5
    assert idle(engine)


def test_seed_gives_same_text_alone_and_in_a_crowd():
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=20)
    [prompt] = prompts_of([9])
    [alone] = Engine(FakeRunner()).generate([prompt], params)
    crowd = prompts_of([5, 17, 30, 2, 8, 21, 13], seed=5)
    engine = Engine(FakeRunner(num_pages=24, max_batch=5))
    outputs = engine.generate([*crowd, prompt], [*[SamplingParams(temperature=1.5, max_tokens=30)] * 7, params])
    assert engine.metrics.preemptions > 0
    assert outputs[-1].choices[0].token_ids == alone.choices[0].token_ids
    [other] = Engine(FakeRunner()).generate([prompt], SamplingParams(temperature=0.9, top_p=0.9, seed=12, max_tokens=20))
    assert other.choices[0].token_ids != alone.choices[0].token_ids


def test_end_tokens_stop_tokens_and_min_tokens():
    runner = FakeRunner()
    [prompt] = prompts_of([6])
    free = runner.reference_greedy(prompt, 12)
    end = free[3]
    assert end not in free[:3]
    engine = Engine(runner, end_token_ids=[end])
    [output] = engine.generate([prompt], GREEDY)
    assert output.choices[0].token_ids == free[:4] and output.choices[0].stop_token_id == end
    assert output.choices[0].finish_reason is FinishReason.STOP
    [output] = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert output.choices[0].token_ids == free and output.choices[0].stop_token_id is None
    [output] = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(free[1],)))
    assert output.choices[0].token_ids == free[:2]
    [output] = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8))
    assert end not in output.choices[0].token_ids[:8] and len(output.choices[0].token_ids) >= 8


def test_logprobs_are_the_models_own():
    runner = FakeRunner()
    [prompt] = prompts_of([7])
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=5, logprobs=3, repetition_penalty=1.3)
    [output] = Engine(runner).generate([prompt], params)
    token_ids = list(prompt)
    for own in output.choices[0].logprobs:
        logits = runner.reference_logits(token_ids).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert own.logprob == pytest.approx(expected[own.token_id], abs=1e-5)
        assert [t for t, _ in own.top] == np.argsort(-expected, kind="stable")[:3].tolist()
        assert [lp for _, lp in own.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-5)
        token_ids.append(own.token_id)
    assert token_ids[7:] == output.choices[0].token_ids


@pytest.mark.parametrize("max_logit_rows", [None, 4])
def test_prompt_logprobs(max_logit_rows):
    """Chunked, beside decodes, under preemption, and although the prefix is cached."""
    runner = FakeRunner(max_batch=4, num_pages=20, max_logit_rows=max_logit_rows)
    engine = Engine(runner)
    prompts = prompts_of([30, 1, 9, 25])
    engine.generate(prompts, GREEDY)
    outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2, n=2))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [p.token_id for p in output.prompt_logprobs] == prompt[1:]
        for place, own in enumerate(output.prompt_logprobs, 1):
            logits = runner.reference_logits(prompt[:place]).astype(np.float64)
            expected = logits - np.log(np.exp(logits).sum())
            assert own.logprob == pytest.approx(expected[prompt[place]], abs=1e-5)
            assert len(own.top) == 2
        assert [c.token_ids for c in output.choices] == [runner.reference_greedy(prompt, 12)] * 2
    assert idle(engine)


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


@pytest.mark.parametrize(("length", "max_tokens", "words"), [
    (8, 2045, ["8 tokens", "2045", "2053", "2048", "2040"]),
    (2048, None, ["2048 tokens", "shorten", "by 1"]),
    (11680, None, ["11680 tokens", "2048", "by 9633"]),
    (8, 1_000_000_000, ["1000000000", "2048", "at most 2040"]),
])
def test_limits_name_the_true_numbers(length, max_tokens, words):
    """C28."""
    engine = Engine(FakeRunner(max_context=2048, num_pages=4096))
    with pytest.raises(RequestError) as caught:
        engine.add([1] * length, SamplingParams(max_tokens=max_tokens))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.param == ("max_tokens" if max_tokens else "prompt")


def test_last_token_of_the_window_and_absent_max_tokens():
    """C28: 2047 + 1 works; without max_tokens the window is filled and the reason is length."""
    runner = FakeRunner(max_context=2048, num_pages=520, prefill_chunk=512)
    [output] = Engine(runner).generate([[1] * 2047], SamplingParams(temperature=0.0, max_tokens=1))
    assert len(output.choices[0].token_ids) == 1
    [output] = Engine(FakeRunner(max_context=32)).generate([[1] * 8], SamplingParams(temperature=0.0))
    assert len(output.choices[0].token_ids) == 24 and output.choices[0].finish_reason is FinishReason.LENGTH


def test_a_pool_smaller_than_the_context_limits_a_request_by_name():
    engine = Engine(FakeRunner(num_pages=5, page_size=4, max_context=256))
    with pytest.raises(RequestError, match="the KV cache holds 16"):
        engine.add([1] * 16)
    [output] = engine.generate([[1] * 5], SamplingParams(temperature=0.0))
    assert len(output.choices[0].token_ids) == 11
    for _ in range(3):      # a full pool with a partial hit: no page is left for the copy
        assert len(engine.generate([[1] * 5 + [2]], SamplingParams(temperature=0.0))[0].choices[0].token_ids) == 10
    assert idle(engine)


@pytest.mark.parametrize(("prompt", "params", "param"), [
    ([], {}, "prompt"),
    ([97], {}, "prompt"),
    ([-1], {}, "prompt"),
    ([1.5], {}, "prompt"),
    ("text", {}, "prompt"),
    ([1], {"logit_bias": {97: 1.0}}, "logit_bias"),
    ([1], {"stop_token_ids": (500,)}, "stop_token_ids"),
    ([1], {"bad_words": ((1, 97),)}, "bad_words"),
    ([1], {"logprobs": 98}, "logprobs"),
])
def test_bad_requests_name_the_field(prompt, params, param):
    with pytest.raises(RequestError) as caught:
        Engine(FakeRunner()).add(prompt, SamplingParams(**params))
    assert caught.value.param == param


def test_numpy_prompts_are_plain_integers_inside():
    runner = FakeRunner()
    [output] = Engine(runner).generate([np.array([3, 4, 5], np.int32)], GREEDY)
    assert output.prompt_ids == [3, 4, 5] and {type(t) for t in output.prompt_ids} == {int}
    assert output.choices[0].token_ids == runner.reference_greedy([3, 4, 5], 12)


def test_repeated_request_id_is_refused_while_it_runs():
    engine = Engine(FakeRunner())
    engine.add([1], GREEDY, request_id="a")
    with pytest.raises(RequestError, match="'a'"):
        engine.add([1], GREEDY, request_id="a")


def test_metrics_tell_the_truth():
    engine = Engine(FakeRunner())
    prompts = prompts_of([20, 20, 7])
    engine.generate(prompts, GREEDY)
    engine.generate(prompts[:1], GREEDY)
    m = engine.metrics
    assert (m.requests, m.prompt_tokens, m.cached_tokens, m.output_tokens) == (4, 67, 18, 48)
    assert m.computed_tokens == 67 - 18 + 4 * 11        # the last output token is never computed
    assert m.finished == {"length": 4} and m.time_to_first_token.count == 4 and m.time_per_token.count == 4
    assert m.pages_free + m.pages_cached == m.pages_total and m.pages_held == 0
    assert m.to_json()["time_to_first_token"]["sum"] > 0
