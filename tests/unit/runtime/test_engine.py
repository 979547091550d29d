"""The engine over the fake runner: outputs equal the reference whatever is batched, chunked, shared or preempted."""

import numpy as np
import pytest

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.request import FinishReason
from relaxpack.runtime.sampler import SamplingState
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import SequenceStep, StepPlan, StepSampling
from tests.helpers.engine import GREEDY, idle, prompts_of
from tests.helpers.fakes import FakeRunner


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
