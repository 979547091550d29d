"""Grammars: whatever the (fake) model prefers, the output matches; bad grammars are one clear error."""

import json
import re

import pytest

from relaxpack.errors import RequestError
from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.request import FinishReason
from relaxpack.runtime.sampling_params import Grammar, SamplingParams
from relaxpack.runtime.tokenizer import TextInfo, Tokenizer
from tests.helpers.fakes import FakeRunner
from tests.helpers.text import byte_level_json

pytest.importorskip("llguidance")
from relaxpack.runtime.structured import GrammarCompiler

SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["name", "age"],
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
})


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(byte_level_json(), TextInfo())


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(byte_level_json(), tokenizer.vocab_size + 24, [tokenizer.token_id("<|im_end|>")])


def engine_for(tokenizer, compiler, **more):
    """The model's logits are wider than the vocabulary, as padded models' are."""
    runner = FakeRunner(vocab_size=tokenizer.vocab_size + 24, num_pages=500, max_context=400, **more)
    return Engine(runner, end_token_ids=[tokenizer.token_id("<|im_end|>")], make_constraint=compiler)


@pytest.mark.parametrize(("grammar", "check"), [
    (Grammar("choice", ("yes", "no", 'may"be')), lambda text: text in ("yes", "no", 'may"be')),
    (Grammar("regex", "[a-c]{2,5}x"), lambda text: re.fullmatch("[a-c]{2,5}x", text)),
    (Grammar("lark", 'start: "<" /[0-9]{3}/ ">"'), lambda text: re.fullmatch("<[0-9]{3}>", text)),
    (Grammar("json_schema", SCHEMA), lambda text: set(json.loads(text)) == {"name", "age"}
     and 0 <= json.loads(text)["age"] <= 99),
])
def test_every_finished_output_matches(tokenizer, compiler, grammar, check):
    """n outputs each, forked constraints, greedy and sampled, beside a free request, preempted by few pages."""
    engine = engine_for(tokenizer, compiler, page_size=4, max_batch=6)
    params = [SamplingParams(temperature=t, seed=3, n=3, max_tokens=120, grammar=grammar) for t in (0.0, 1.0, 3.0)]
    free = SamplingParams(temperature=0.0, max_tokens=30)
    *outputs, other = engine.generate([[1, 2, 3]] * 3 + [[4]], [*params, free])
    for output in outputs:
        for choice in output.choices:
            ids = choice.token_ids[:-1] if choice.stop_token_id is not None else choice.token_ids
            text = tokenizer.decode(ids)
            if choice.finish_reason is FinishReason.STOP:
                assert check(text), text
            else:
                assert choice.finish_reason is FinishReason.LENGTH and grammar.kind == "json_schema"
    assert other.choices[0].token_ids == engine.runner.reference_greedy([4], 30)
    stopped = [c for o in outputs for c in o.choices if c.finish_reason is FinishReason.STOP]
    assert stopped


def test_json_mode_streams_an_object(tokenizer, compiler):
    with AsyncEngine(engine_for(tokenizer, compiler), tokenizer) as shared:
        text = ""
        for piece in shared.submit([1, 2], SamplingParams(seed=5, max_tokens=200, grammar=Grammar("json"))):
            text += piece.text
    assert text.startswith("{")
    if piece.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_masks_follow_the_grammar_token_by_token(tokenizer, compiler):
    constraint = compiler(Grammar("choice", ("ab", "ac")))
    other = constraint.fork()
    a, b, c = (tokenizer.token_id(x) for x in "abc")
    assert constraint.mask()[a] and not constraint.mask()[b] and len(constraint.mask()) == tokenizer.vocab_size + 24
    assert constraint.accept(a) and constraint.mask()[[b, c]].all() and not constraint.mask()[a]
    assert constraint.accept(b) and constraint.complete
    assert not other.complete and other.mask()[a] and not other.accept(b)


@pytest.mark.parametrize("grammar", [
    Grammar("json_schema", '{"type": 3}'), Grammar("json_schema", "{"), Grammar("regex", "(ab"), Grammar("lark", "foo"),
    Grammar("json_schema", '{"$ref": "#"}'),
])
def test_bad_grammars_are_refused_before_they_run(tokenizer, compiler, grammar):
    with pytest.raises(RequestError, match=f"the {grammar.kind} grammar is not valid") as caught:
        engine_for(tokenizer, compiler).add([1], SamplingParams(grammar=grammar))
    assert caught.value.param == "response_format"


def test_a_dead_end_is_an_error_and_no_end(tokenizer, compiler):
    """The first token is allowed, and then nothing is."""
    schema = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"$ref": "#/$defs/x"}}}
    params = SamplingParams(temperature=0.0, max_tokens=20, grammar=Grammar("json_schema", json.dumps(schema)))
    (output,) = engine_for(tokenizer, compiler).generate([[1, 2]], params)
    assert output.choices[0].finish_reason is FinishReason.ERROR
    assert "no token is allowed here" in output.choices[0].error


def test_an_error_of_a_regex_says_what_is_wrong_in_it(compiler):
    with pytest.raises(RequestError, match="regex parse error: unclosed group"):
        compiler(Grammar("regex", "(ab"))


def test_without_a_compiler_grammars_are_refused():
    with pytest.raises(RequestError, match=r"relaxpack\[grammar\]"):
        Engine(FakeRunner()).add([1], SamplingParams(grammar=Grammar("json")))
