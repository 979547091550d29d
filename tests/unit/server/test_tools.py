"""Tools and structured output over HTTP: calls in whole answers and in streams, forced calls, JSON schemas, round trips."""

from __future__ import annotations

import json

import httpx
import pytest

from relaxpack.runtime.server.serve import background
from tests.helpers.server import last_question, scripted_model
from tests.helpers.waiting import DEADLINE
from tests.unit.server.conftest import Chat

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
                   "additionalProperties": False}}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"],
    "additionalProperties": False}}}
ONE = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Žilina"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "utc"}}\n</tool_call>'


def answer(prompt: str) -> str:
    if "tool\n" in prompt:
        return "It is sunny in " + json.loads(prompt.rpartition("tool\n")[2].partition("<|im_end|>")[0])["city"]
    return {"two": TWO, "none": "No tool needed."}.get(last_question(prompt), ONE)


@pytest.fixture(scope="module")
def chat():
    # The name that Hugging Face's client gives every model of a server.
    with background(scripted_model(answer, tools=True, grammar=True, name="dummy")) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        yield Chat(session)


def joined(chunks):
    """Content and calls, put together as clients do."""
    text, calls = "", {}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        text += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] += part.get("id", "")
            call["name"] += part["function"].get("name", "")
            call["arguments"] += part["function"]["arguments"]
    return text, [calls[index] for index in sorted(calls)]


def test_a_call_in_a_whole_answer(chat):
    [choice] = chat.answer("one", tools=[WEATHER])["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me look."
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"]) == {"city": "Žilina"}


def test_a_cut_answer_with_calls_says_so_in_both_modes(chat):
    tokens = chat.answer("two", tools=[WEATHER, TIME])["usage"]["completion_tokens"]
    [choice] = chat.answer("two", tools=[WEATHER, TIME], max_tokens=tokens - 25)["choices"]
    first, second = (call["function"] for call in choice["message"]["tool_calls"])
    assert choice["finish_reason"] == "length" and json.loads(first["arguments"]) == {"city": "Žilina"}
    with pytest.raises(json.JSONDecodeError):
        json.loads(second["arguments"])
    chunks = chat.chunks("two", tools=[WEATHER, TIME], max_tokens=tokens - 25)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [call["arguments"] for call in joined(chunks)[1]] == [first["arguments"], second["arguments"]]


def test_calls_are_streamed_in_parts(chat):
    chunks = chat.chunks("two", tools=[WEATHER, TIME])
    text, calls = joined(chunks)
    assert text.strip() == "Let me look." and "tool_call" not in text
    assert [call["name"] for call in calls] == ["get_weather", "get_time"] and len({call["id"] for call in calls}) == 2
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Žilina"}, {"zone": "utc"}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    parts = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert len(parts) > 4       # arguments come as they are written, not at the end


def test_at_most_one_call_where_parallel_ones_are_off(chat):
    [choice] = chat.answer("two", tools=[WEATHER, TIME], parallel_tool_calls=False)["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]


def test_the_model_may_choose_not_to_call_and_none_hides_the_tools(chat):
    message = chat.answer("none", tools=[WEATHER])["choices"][0]["message"]
    assert message["content"] == "No tool needed." and "tool_calls" not in message
    hidden = chat.answer("one", tools=[WEATHER], tool_choice="none")
    assert hidden["choices"][0]["finish_reason"] == "stop" and "<tool_call>" in hidden["choices"][0]["message"]["content"]
    shown = chat.answer("one", tools=[WEATHER])
    assert hidden["usage"]["prompt_tokens"] < shown["usage"]["prompt_tokens"]


def test_call_result_and_answer_make_a_round_trip(chat):
    message = chat.answer("one", tools=[WEATHER])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"city": "Žilina"}'}
    final = chat.answer("one", message, result, tools=[WEATHER])["choices"][0]
    assert final["message"]["content"] == "It is sunny in Žilina" and final["finish_reason"] == "stop"


# The scripted model wants to say something else, so what comes out is the grammar's doing.

@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_whatever_the_model_wants(chat, stream):
    choice = {"type": "function", "function": {"name": "get_time"}}
    if stream:
        text, [call] = joined(chat.chunks("none", tools=[WEATHER, TIME], tool_choice=choice, temperature=0))
    else:
        [whole] = chat.answer("none", tools=[WEATHER, TIME], tool_choice=choice, temperature=0)["choices"]
        assert whole["finish_reason"] == "tool_calls"
        text, call = whole["message"]["content"] or "", whole["message"]["tool_calls"][0]["function"]
    assert text == "" and call["name"] == "get_time" and json.loads(call["arguments"])["zone"] in ("utc", "cet")


def test_required_calls_some_tool(chat):
    [choice] = chat.answer("none", tools=[WEATHER, TIME], tool_choice="required", temperature=0, max_tokens=400)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] in ("get_weather", "get_time")


def test_a_tool_that_is_not_there_cannot_be_chosen(chat):
    error = chat.error("x", tools=[TIME], tool_choice={"type": "function", "function": {"name": "fly"}})
    assert error["param"] == "tool_choice" and "'fly'" in error["message"] and "get_time" in error["message"]


SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "maximum": 99,
                                                                                       "minimum": 0}},
          "required": ["colour", "count"], "additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_holds_whatever_the_model_wants(chat, stream):
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    body = {"response_format": form, "temperature": 0, "max_tokens": 300}
    if stream:
        text = joined(chat.chunks("none", **body))[0]
    else:
        text = chat.answer("none", **body)["choices"][0]["message"]["content"]
    value = json.loads(text)
    assert value.keys() == {"colour", "count"} and value["colour"] in ("red", "blue") and 0 <= value["count"] <= 99


@pytest.mark.parametrize(("grammar", "check"), [
    ({"regex": "[ab]{3}x"}, lambda text: len(text) == 4 and set(text[:3]) <= set("ab") and text[3] == "x"),
    ({"choice": ["north", "south"]}, lambda text: text in ("north", "south")),
    ({"json": SCHEMA}, lambda text: json.loads(text)["colour"] in ("red", "blue")),
    ({"grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no"))])
def test_structured_outputs(chat, grammar, check):
    [choice] = chat.answer("none", structured_outputs=grammar, temperature=0, max_tokens=300)["choices"]
    assert choice["finish_reason"] == "stop" and check(choice["message"]["content"])


@pytest.mark.parametrize("body", [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"grammar": "start: nowhere"}},
    {"structured_outputs": {"json": "{"}}, {"structured_outputs": {"json": {"type": "banana"}}},
    {"structured_outputs": {"choice": []}}])
def test_a_grammar_that_is_none_is_a_400(chat, body):
    assert chat.error("x", **body)["param"] == next(iter(body))


def test_two_grammars_are_one_too_many(chat):
    error = chat.error("x", response_format={"type": "json_object"}, structured_outputs={"choice": ["a"]})
    assert error["param"] == "response_format" and "give one of them" in error["message"]


@pytest.mark.parametrize(("words", "message"), [
    ({"structured_outputs": {"choice": ["z"]}, "bad_words": ["z"]}, "the grammar, bans and biases exclude all"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "too complex to be followed any further: lexer error")])
def test_a_grammar_without_a_way_on_is_the_request_s_fault(chat, words, message):
    error = chat.error("x", **words)        # 400: what a client tries again on a 500 would end the same way
    assert message in error["message"] and error["code"] == "generation_failed"
    assert chat.answer("x")["choices"]


def test_tools_and_a_response_format_exclude_each_other(chat):
    assert chat.error("x", tools=[TIME], response_format={"type": "json_object"})["param"] == "response_format"
    assert chat.error("x", tools=[TIME], tool_choice="required", response_format={"type": "json_object"})["param"] == \
        "tool_choice"


QUESTION = [{"role": "user", "content": "one"}]


def test_the_openai_client_calls_tools(chat):
    import openai

    with openai.OpenAI(base_url=f"{str(chat.session.base_url).rstrip('/')}/v1", api_key="x", max_retries=0) as client:
        ask = client.chat.completions
        message = ask.create(model="dummy", messages=QUESTION, tools=[WEATHER]).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Žilina"}
        with ask.stream(model="dummy", messages=QUESTION, tools=[WEATHER]) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds and final.finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"city": "Žilina"}'}
        history = [*QUESTION, message.model_dump(exclude_none=True), result]
        answered = ask.create(model="dummy", messages=history, tools=[WEATHER]).choices[0]
        assert answered.message.content == "It is sunny in Žilina" and answered.finish_reason == "stop"


def test_the_hugging_face_client_calls_tools(chat):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (group test)")
    client = hub.InferenceClient(base_url=f"{str(chat.session.base_url).rstrip('/')}/v1", api_key="x", timeout=DEADLINE)
    [call] = client.chat_completion(QUESTION, tools=[WEATHER]).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Žilina"}
    parts = [part for chunk in client.chat_completion(QUESTION, tools=[WEATHER], stream=True)
             for part in chunk.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(part.function.arguments for part in parts)) == {"city": "Žilina"}
