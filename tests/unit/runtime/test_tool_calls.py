"""Tool calls in the formats that models write, whole and in any split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaxpack.runtime.tool_calls import ToolCallDelta, ToolCallParser, detect_format, parse_tool_calls

HERMES = ('Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Brno", "days": [1, {"a": "}"}]}}\n'
          '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
LLAMA3 = '<|python_tag|>{"name": "weather", "parameters": {"city": "Brno"}}; {"name": "time", "parameters": {}}'
MISTRAL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "a, ]"}}, {"name": "time", "arguments": {}}]'
MISTRAL_NEW = 'Now.[TOOL_CALLS]weather[ARGS]{"city": "Brno"}[TOOL_CALLS]time[CALL_ID]abc[ARGS]{}'

BROKEN = ('<tool_call>{"name": "f", "arguments": {"a": x}]</tool_call>',      # what reads along has seen a call begin
          '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": "f", "arguments": {}, "name": 5}',
          '<tool_call>{"name": "f", "parameters": {"a": 1}, "arguments": {}}</tool_call>')


def calls(text, form):
    rest, found = parse_tool_calls(text, form)
    return rest, [(call.name, json.loads(call.arguments)) for call in found]


@pytest.mark.parametrize("text, form, rest, first", [
    (HERMES, "hermes", "Let me look.\n", {"city": "Brno", "days": [1, {"a": "}"}]}),
    (LLAMA3, "llama3", "", {"city": "Brno"}),
    (LLAMA3.removeprefix("<|python_tag|>"), "llama3", "", {"city": "Brno"}),
    (MISTRAL, "mistral", "", {"city": "a, ]"}),
    (MISTRAL_NEW, "mistral", "Now.", {"city": "Brno"}),
])
def test_two_calls(text, form, rest, first):
    assert calls(text, form) == (rest, [("weather", first), ("time", {})])


@pytest.mark.parametrize("text, form, name, arguments", [
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "hermes", "f", {"x": 1}),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "hermes", "f", {"x": 1}),
    ('<tool_call>{"name": "f"}</tool_call>', "hermes", "f", {}),
    ('{"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}', "llama3", "f", {"x": 1}),
    ('\n{"type": "function", "name": "f", "parameters": {"name": "not this"}}', "llama3", "f", {"name": "not this"}),
    ('<tool_call>{"name": "f", "arguments": {"x": "\\"}</tool_call>"}}</tool_call>', "hermes", "f",
     {"x": '"}</tool_call>'}),
])
def test_unusual_shapes(text, form, name, arguments):
    assert calls(text, form) == ("", [(name, arguments)])


@pytest.mark.parametrize("text, form", [
    ("No call here, only 1 < 2 and <tool", "hermes"),
    ("<tool_call>none</tool_call> after", "hermes"),
    ('<tool_call>{"name": "f", "arguments": }</tool_call>', "hermes"),
    ('{"answer": 42} is JSON but no call', "llama3"),
    ("see [TOOL_CALLS] for more", "mistral"),
    ("Text first, then {\"name\": \"f\", \"parameters\": {}}", "llama3"),
    ('<tool_call>{"nam', "hermes"), ("<tool_call>\n", "hermes"), ("  ", "llama3"),
])
def test_text_that_is_no_call_comes_out_unchanged(text, form):
    assert parse_tool_calls(text, form) == (text, [])


@pytest.mark.parametrize("body, arguments", [
    (r'{"name": "f\ud83d", "arguments": {"a": 1}}', {"a": 1}),
    (r'{"function": {"name": "f\ud83d", "arguments": {"a": "\ud800"}}}', {"a": "?"})])
def test_half_a_character_in_a_call_can_be_sent_on(body, arguments):
    assert calls(f"<tool_call>{body}</tool_call>", "hermes") == ("", [("f?", arguments)])


def test_text_after_a_call():
    assert calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.', "hermes") == ("Done.", [("f", {})])


def test_arguments_stream_as_they_come():
    parser = ToolCallParser("hermes")
    pieces = ["<tool_", 'call>{"name": "weather", "arg', 'uments": {"city"', ': "Br', 'no"', "}}", "</tool_call>"]
    events = [parser.add(piece) for piece in pieces]
    assert events[:2] == [[], []]
    first = events[2][0]
    assert isinstance(first, ToolCallDelta) and first.name == "weather" and first.id and first.arguments == '{"city"'
    assert [e[0].arguments for e in events[3:6]] == [': "Br', 'no"', "}"]
    assert events[4][0].id is None and events[6] == [] and parser.finish() == []
    assert parser.calls[0].arguments == '{"city": "Brno"}' and parser.calls[0].id == first.id


def test_call_cut_off_by_the_length_limit_is_kept():
    parser = ToolCallParser("hermes")
    parser.add('<tool_call>{"name": "f", "arguments": {"x": ')
    assert parser.finish() == [] and parser.calls[0].arguments == '{"x":'


@given(st.sampled_from([(HERMES, "hermes"), (LLAMA3, "llama3"), (MISTRAL, "mistral"), (MISTRAL_NEW, "mistral"),
                        ('{"a": 1} x', "llama3"), ("<tool_call>x", "hermes"), *[(text, "hermes") for text in BROKEN]]),
       st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_split_gives_the_same(case, sizes):
    text, form = case
    whole_rest, whole_calls = parse_tool_calls(text, form)
    parser, events, position, n = ToolCallParser(form), [], 0, 0
    while position < len(text):
        size = sizes[n % len(sizes)]
        events += parser.add(text[position:position + size])
        position, n = position + size, n + 1
    events += parser.finish()
    assert "".join(e for e in events if isinstance(e, str)) == whole_rest
    assert [(c.name, c.arguments) for c in parser.calls] == [(c.name, c.arguments) for c in whole_calls]
    for call in parser.calls:
        deltas = [e for e in events if isinstance(e, ToolCallDelta) and e.index == call.index]
        assert "".join(d.arguments for d in deltas) == call.arguments
        assert deltas[0].name == call.name and deltas[0].id == call.id and all(d.name is None for d in deltas[1:])


@pytest.mark.parametrize("template, form", [
    ("{{ '<tool_call>' }}", "hermes"), ("[TOOL_CALLS]", "mistral"), (None, None), ("{{ messages }}", None),
    ('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}', "llama3")])
def test_format_is_read_off_the_template(template, form):
    assert detect_format(template) == form


def test_nesting_without_end_is_no_call() -> None:
    deep = "[" * 5000 + "]" * 5000
    for text in (f"<tool_call>{deep}</tool_call>", f'<tool_call>{{"x": {deep}}}</tool_call>'):
        assert parse_tool_calls(text, "hermes") == (text, [])
