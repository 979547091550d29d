"""Every bad setting is refused with the name of its field."""

import math

import pytest

from relaxpack.errors import RequestError
from relaxpack.runtime.sampling_params import Grammar, SamplingParams


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("temperature", True), ("top_k", -1), ("top_k", 1.5), ("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.1),
    ("min_p", 1.1), ("typical_p", 0.0), ("repetition_penalty", 0.0), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("n", 0), ("n", 1000), ("seed", 2**64), ("seed", "x"), ("max_tokens", 0),
    ("max_tokens", -1), ("max_tokens", 1.0), ("min_tokens", -1), ("stop", ("",)), ("stop", (3,)),
    ("stop_token_ids", (-1,)), ("logprobs", -1), ("prompt_logprobs", True), ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1: 101}), ("logit_bias", {-1: 0}), ("logit_bias", [1]), ("bad_words", ((),)),
    ("bad_words", ((-1,),)),
])
def test_bad_values_name_the_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field and field in str(caught.value)


def test_min_tokens_above_max_tokens():
    with pytest.raises(RequestError, match="min_tokens is 9, more than max_tokens 8"):
        SamplingParams(max_tokens=8, min_tokens=9)


def test_good_values_are_frozen_copies():
    bias = {1: -100, 2: 3.5}
    params = SamplingParams(stop="END", logit_bias=bias, bad_words=[[1, 2]], stop_token_ids=[7], temperature=0)
    bias[3] = 1.0
    assert params.stop == ("END",) and params.bad_words == ((1, 2),) and params.stop_token_ids == (7,)
    assert 3 not in params.logit_bias and params.greedy


@pytest.mark.parametrize(("kind", "source"), [("yaml", ""), ("choice", ()), ("choice", ("",)), ("regex", 3)])
def test_bad_grammars(kind, source):
    with pytest.raises(RequestError):
        Grammar(kind, source)
