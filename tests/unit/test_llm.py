"""`LLM` over a scripted model: prompts, batches, chats, streams and stop strings, without a compile."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading

import numpy as np
import pytest

from relaxpack.errors import EnvironmentProblem, RequestError, UsageError
from relaxpack.llm import LLM
from relaxpack.runtime.engine import Engine
from tests.helpers.text import CHATML, ScriptedRunner, answering, chatml, llama2
from tests.helpers.waiting import DEADLINE, eventually

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def make(answer, tokenizer=None, end=2, **options):
    tokenizer = tokenizer or chatml()
    runner = ScriptedRunner(tokenizer, answering(tokenizer, answer, end), **options)
    return LLM.from_engine(Engine(runner, end_token_ids=tokenizer.text.end_token_ids), tokenizer)


def upper(text):
    return text.rpartition("user\n")[2].partition("<|im_end|>")[0].upper()


def test_chat_answers_with_the_template():
    llm = make(upper)
    done = llm.chat([{"role": "user", "content": "hello ď"}])
    assert str(done) == "HELLO Ď" and done.finish_reason == "stop" and done.stop == 2
    assert done.token_ids[-1] == 2 and done.prompt_ids == llm.template.encode([{"role": "user", "content": "hello ď"}])
    assert done.timings.prompt_tokens == len(done.prompt_ids)
    assert done.timings.output_tokens == len(done.token_ids)


def test_several_chats_are_batched():
    llm = make(upper)
    texts = ["one", "two two", "three three three", "4", "five", "six"]
    done = llm.chat([[{"role": "user", "content": text}] for text in texts])
    assert [str(completion) for completion in done] == [text.upper() for text in texts]
    longest = max(len(completion.token_ids) for completion in done)
    assert len(llm.engine.runner.computed) < 2 * longest + 6      # far fewer steps than one after the other


def test_raw_prompt_goes_on_with_its_leading_space():
    llm = make(lambda text: "fine, thank you", tokenizer=llama2())
    assert llm.generate("I am").text == " fine, thank you"
    assert llm.chat([{"role": "user", "content": "How?"}]).text == "fine, thank you"


def test_prompts_may_be_token_ids():
    llm = make(lambda text: "yes")
    ids = llm.encode("no")
    assert [str(c) for c in llm.generate([ids, "maybe"])] == ["yes", "yes"]
    assert llm.generate(ids).prompt_ids == ids


def test_numpy_token_ids_are_token_ids():
    llm = make(lambda text: "yes")
    ids = llm.encode("no")
    for given in (np.array(ids), np.array(ids, np.uint16), [np.int64(i) for i in ids]):
        assert str(llm.generate(given)) == "yes"
    assert [str(c) for c in llm.generate([np.array(ids), "maybe"])] == ["yes", "yes"]


@pytest.mark.parametrize("prompt", [None, 5, b"hello", ["a", 3.5], [[]], [True], [None], {"role": "user"}.items()])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(RequestError, match="a prompt is text or a list of token ids, got"):
        make(upper).generate(prompt)


def test_a_text_is_no_chat():
    with pytest.raises(RequestError, match="a chat is a list of messages"):
        make(upper).chat("hello")


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_lists_of_stops_must_be_lists(name):
    with pytest.raises(RequestError, match=f"{name} must be a list, got 5"):
        make(upper).generate("x", **{name: 5})


def test_threads_share_a_model():
    """The engine is in one step at a time, every thread gets its own answer, and prompts of all are batched."""
    llm = make(upper)
    forward, inside, most, served = llm.engine.runner.forward, [], 0, []

    def watched(plan):
        nonlocal most
        assert not inside, "two threads are in the model"
        served.append(len(llm.engine._requests))
        if len(served) == 1:    # the first step lasts until a second thread has come; it must be in the next one
            eventually(lambda: llm.generator._guests or len(llm.engine._requests) > 1)
        inside.append(1)
        most = max(most, len(plan.sequences))
        try:
            return forward(plan)
        finally:
            inside.pop()
    llm.engine.runner.forward = watched
    before, answers, barrier = sys.getswitchinterval(), {}, threading.Barrier(8)

    def ask(number):
        text = f"thread {number} says {'abcdefgh' * number}"
        barrier.wait(DEADLINE)
        if number % 2:
            answers[text] = "".join(llm.stream([{"role": "user", "content": text}]))
        else:
            answers[text] = str(llm.chat([{"role": "user", "content": text}], stop="never"))
    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(8)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    finally:
        sys.setswitchinterval(before)
    assert len(answers) == 8 and all(answer == text.upper() for text, answer in answers.items())
    assert served[1] > 1 and most > 1 and not llm.engine.has_work


def test_another_process_is_refused_rather_than_left_waiting(monkeypatch):
    llm = make(upper)
    for copy_ in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="load its bundle there"):
            copy_(llm)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(EnvironmentProblem, match="do not live on in a fork"):
        llm.generate("x")


def test_unknown_devices_are_named(tmp_path):
    with pytest.raises(UsageError, match="'tpu': known are cpu and cuda"):
        LLM(tmp_path, device="tpu")


def test_stream_gives_the_same_text_in_pieces():
    llm = make(lambda text: "Příliš žluťoučký kůň 👨‍👩‍👧")
    pieces = list(llm.stream([{"role": "user", "content": "x"}]))
    assert "".join(pieces) == "Příliš žluťoučký kůň 👨‍👩‍👧" and len(pieces) > 3


def test_stop_string_ends_the_answer_and_frees_the_sequence():
    llm = make(lambda text: "The quick brown fox jumps")
    done = llm.generate("x", stop=("own fox",))
    assert (done.text, done.finish_reason, done.stop) == ("The quick br", "stop", "own fox")
    assert not llm.engine.has_work


def test_stop_string_across_the_last_token_of_the_limit():
    llm = make(lambda text: "abcdef")
    ids = llm.encode("abcdef")
    for count in range(1, len(ids) + 1):
        done = llm.generate("x", max_tokens=count, stop=("zzz",))
        assert done.text == llm.tokenizer.decode(ids[:count]) and done.finish_reason == "length"


def test_closing_a_stream_cancels_the_request():
    llm = make(lambda text: "many words " * 20)
    stream = llm.stream("x")
    next(stream)
    stream.close()
    assert not llm.engine.has_work


def test_two_streams_may_take_turns():
    llm = make(upper)
    chats = [[{"role": "user", "content": text}] for text in ("one one one one", "two two")]
    streams = [llm.stream(chat) for chat in chats]
    texts = ["", ""]
    while streams != [None, None]:
        for n, stream in enumerate(streams):
            piece = next(stream, None) if stream is not None else None
            texts[n] += piece or ""
            streams[n] = stream if piece is not None else None
    assert texts == ["ONE ONE ONE ONE", "TWO TWO"]


def test_stop_string_of_a_stream_that_was_overtaken():
    llm = make(lambda text: "a b c d e f g h i j")
    slow = llm.stream("x", stop=("e f",), temperature=0.0)
    first = next(slow)
    assert str(llm.generate("y")) == "a b c d e f g h i j"       # steps the engine for both
    assert first + "".join(slow) == "a b c d " and not llm.engine.has_work


def test_n_answers_come_by_prompt_and_index():
    llm = make(lambda text: "a b")
    done = llm.generate(["x", "y"], n=2)
    assert [(c.prompt_index, c.index) for c in done] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {c.text for c in done} == {"a b"}


def test_a_stream_of_several_answers_is_refused_rather_than_mixed():
    with pytest.raises(RequestError, match="a stream is one answer, and n is 2: ask `chat` or `generate`"):
        list(make(lambda text: "a b").stream("x", n=2))


def test_logprobs_are_kept():
    done = make(lambda text: "ok").generate("x", logprobs=2)
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    assert all(len(entry.top) == 2 and entry.logprob == pytest.approx(entry.top[0][1]) for entry in done.logprobs)


def test_prompt_longer_than_the_context_is_refused_with_numbers():
    with pytest.raises(RequestError, match=r"65 tokens.*holds 64"):
        make(lambda text: "", max_context=64).generate([5] * 65)


def test_publishers_advice_is_the_default():
    llm = make(lambda text: "", tokenizer=chatml(generation={"temperature": 0.6, "top_p": 0.9, "do_sample": True}))
    assert (llm.params().temperature, llm.params().top_p, llm.params(temperature=0.1).temperature) == (0.6, 0.9, 0.1)
    llm = make(lambda text: "", tokenizer=chatml(generation={"temperature": 0.6, "do_sample": False}))
    assert llm.params().greedy


def test_tool_calls_are_taken_out_of_the_text():
    source = CHATML + "{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}"
    llm = make(lambda text: 'Look: <tool_call>{"name": "weather", "arguments": {"city": "Brno"}}</tool_call>',
               tokenizer=chatml(chat_template=source))
    done = llm.chat([{"role": "user", "content": "Weather?"}], tools=TOOLS)
    assert done.text == "Look: "
    assert [(call.name, call.arguments) for call in done.tool_calls] == [("weather", '{"city": "Brno"}')]
    assert "<tool_call>" in llm.chat([{"role": "user", "content": "Weather?"}]).text


def test_repr_is_short():
    done = make(lambda text: "ok").generate(["x"])
    assert repr(done) == f"[Completion('ok', finish_reason='stop', {len(done[0].token_ids)} tokens)]"


def test_unknown_parameter_is_named():
    with pytest.raises(RequestError, match=r"unknown sampling parameter temprature: did you mean temperature\?"):
        make(lambda text: "").generate("x", temprature=1)


def test_model_failure_is_raised():
    llm = make(lambda text: 1 / 0)
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        llm.generate("x")
