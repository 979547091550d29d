"""What the engine takes: limits by their true numbers, and refusals by the field they are about."""

import numpy as np
import pytest

from relaxpack.errors import RequestError
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.request import FinishReason
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.engine import GREEDY, idle
from tests.helpers.fakes import FakeRunner


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
