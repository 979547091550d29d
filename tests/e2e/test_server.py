"""`relaxpack serve` in a process of its own over a real bundle, driven by two real clients: openai and huggingface_hub."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.helpers.waiting import eventually

PATIENCE = 300      # seconds for an answer of the real model, which a busy machine makes slowly
KEY = "test-key"
QUESTION = [{"role": "user", "content": "What is a compiler?"}]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 0,
                                                                                       "maximum": 99}},
          "required": ["colour", "count"], "additionalProperties": False}


class Thing(pydantic.BaseModel):
    kind: Literal["tool", "toy"]
    size: Literal[1, 2]


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    log: list[str]
    reader: threading.Thread


def serve(bundle: Path, *options: str) -> Served:
    """Started, and ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "relaxpack", "serve", str(bundle), "--port", "0", "--api-key", KEY, *options],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    log: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        found = re.search(r"at (http://[\d.:]+)/v1", line)
        if found:
            reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
            reader.start()
            return Served(process, found[1], log, reader)
    process.wait()
    process.stderr.close()
    raise AssertionError("".join(log))


def stop(served: Served) -> int:
    served.process.send_signal(signal.SIGTERM)
    return exit_code(served)


def exit_code(served: Served) -> int:
    """Once it has ended, and all it said is in the log."""
    code = served.process.wait(timeout=PATIENCE)
    served.reader.join()
    assert served.process.stderr is not None
    served.process.stderr.close()
    return code


@pytest.fixture(scope="module")
def smollm2_bundle(request: pytest.FixtureRequest) -> Path:
    """SmolLM2, the real model; RELAXPACK_TEST_BUNDLE saves building it while one works on these tests."""
    given = os.environ.get("RELAXPACK_TEST_BUNDLE")
    return Path(given) if given else request.getfixturevalue("smollm2")("as-is")


@pytest.fixture(scope="module")
def served(smollm2_bundle: Path) -> Iterator[Served]:
    running = serve(smollm2_bundle, "--model-name", "smol", "--model-name", "dummy")   # Hugging Face's client calls it so
    yield running
    assert stop(running) == 0 and "Traceback" not in "".join(running.log)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE) as session:
        yield session


@pytest.fixture(scope="module")
def hub(served: Served) -> Any:
    library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (group reference)")
    return library.InferenceClient(base_url=f"{served.url}/v1", api_key=KEY, timeout=PATIENCE)


def chat(client: openai.OpenAI, **body: object) -> openai.types.chat.ChatCompletion:
    whole = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 12, **body}
    return client.chat.completions.create(**whole)


class TestOpenAI:
    def test_models(self, client):
        assert [model.id for model in client.models.list()] == ["smol"] and client.models.retrieve("smol").id == "smol"

    def test_streaming_equals_the_whole_answer(self, client):
        whole = chat(client)
        assert len(whole.choices[0].message.content) > 10 and whole.usage.completion_tokens == 12
        chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 12 and chunks[-1].usage.prompt_tokens_details.cached_tokens > 0

    def test_completions_with_ids_and_echo(self, client):
        answer = client.completions.create(model="smol", prompt="The sky is", temperature=0, max_tokens=4, echo=True,
                                           logprobs=2)
        assert answer.choices[0].text.startswith("The sky is") and len(answer.choices[0].logprobs.tokens) == 7
        ids = client.completions.create(model="smol", prompt=[504, 5703, 314], temperature=0, max_tokens=4)
        assert ids.usage.prompt_tokens == 3

    def test_logprobs(self, client):
        entries = chat(client, logprobs=True, top_logprobs=2, max_tokens=4).choices[0].logprobs.content
        assert len(entries) == 4 and all(len(e.top_logprobs) == 2 for e in entries)
        assert all(e.logprob == e.top_logprobs[0].logprob for e in entries)

    def test_json_schema(self, client):
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
        value = json.loads(chat(client, response_format=form, max_tokens=120).choices[0].message.content)
        assert value["colour"] in ("red", "blue") and 0 <= value["count"] <= 99

    def test_parsing_into_a_class(self, client):
        answer = client.chat.completions.parse(model="smol", messages=QUESTION, response_format=Thing, temperature=0,
                                               max_tokens=120)
        thing = answer.choices[0].message.parsed
        assert isinstance(thing, Thing) and thing.size in (1, 2)

    def test_stop_seed_and_n(self, client):
        whole = chat(client).choices[0].message.content
        word = whole.split()[3]
        stopped = chat(client, stop=[word]).choices[0]
        assert stopped.message.content == whole[:whole.index(word)] and stopped.finish_reason == "stop"
        both = [[c.message.content for c in chat(client, temperature=1, seed=5, n=2).choices] for _ in range(2)]
        assert both[0] == both[1] and both[0][0] != both[0][1]

    def test_embeddings(self, client):
        texts = ["A cat sat on the mat.", "A kitten sat on a rug.", "The stock market fell sharply on Monday."]
        answer = client.embeddings.create(model="smol", input=texts, extra_body={"pooling": "mean"})
        vectors = [item.embedding for item in answer.data]
        assert [len(v) for v in vectors] == [576] * 3 and answer.usage.prompt_tokens > 15
        near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
        assert near > far
        short = client.embeddings.create(model="smol", input=texts[0], dimensions=64, encoding_format="float")
        assert len(short.data[0].embedding) == 64

    def test_errors_are_the_clients_own_exceptions(self, client, served):
        with pytest.raises(openai.BadRequestError) as error:
            chat(client, max_tokens=10**6)
        assert error.value.code == "context_length_exceeded" and error.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError, match="no place for tools"):
            chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
        with pytest.raises(openai.NotFoundError):
            chat(client, model="gpt-4")
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger, \
                pytest.raises(openai.AuthenticationError):
            chat(stranger)

    def test_leaving_a_stream_frees_the_server(self, client, served):
        stream = chat(client, stream=True, max_tokens=600, extra_body={"ignore_eos": True})
        for _ in range(3):
            next(iter(stream))
        stream.close()
        headers = {"Authorization": f"Bearer {KEY}"}

        def over():
            metrics = httpx.get(f"{served.url}/metrics", headers=headers, timeout=PATIENCE).text
            return 'relaxpack_pages_held{model="smol"} 0.0' in metrics and 'reason="abort"' in metrics
        eventually(over, "the end of the abandoned request", PATIENCE)


class TestHuggingFace:
    """An independent implementation of the same protocol."""

    def test_chat_and_stream(self, hub, client):
        expected = chat(client).choices[0].message.content
        assert hub.chat_completion(QUESTION, temperature=0, max_tokens=12).choices[0].message.content == expected
        pieces = hub.chat_completion(QUESTION, temperature=0, max_tokens=12, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == expected

    def test_schema_and_logprobs(self, hub):
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        answer = hub.chat_completion(QUESTION, response_format=form, temperature=0, max_tokens=120, logprobs=True,
                                     top_logprobs=1)
        assert json.loads(answer.choices[0].message.content).keys() == {"colour", "count"}
        assert answer.choices[0].logprobs.content[0].top_logprobs

    def test_errors(self, hub):
        with pytest.raises(Exception, match="max_tokens"):
            hub.chat_completion(QUESTION, max_tokens=10**6)


def test_relaxpack_chat_talks_to_it(served):
    done = subprocess.run([sys.executable, "-m", "relaxpack", "chat", served.url, "--temperature", "0", "--max-tokens", "8"],
                          input="hello\n", capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, "RELAXPACK_API_KEY": KEY})
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_an_answer_finish_and_keeps_the_prefixes(smollm2_bundle, tmp_path, number):
    """A stream that runs when the signal comes ends as it would have; the next server starts with the cached prefix."""
    first = serve(smollm2_bundle, "--prefix-store", str(tmp_path), "--drain-timeout", str(PATIENCE))
    words = "Tell me about compilers, interpreters and linkers. " * 12
    body = {"model": None, "messages": [{"role": "user", "content": words}], "max_tokens": 60, "temperature": 0,
            "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{first.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        first.process.send_signal(number)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]" and json.loads(events[-2][6:])["usage"]["completion_tokens"] == 60
    assert exit_code(first) == 0 and any("pages saved" in line for line in first.log)
    second = serve(smollm2_bundle, "--prefix-store", str(tmp_path))
    again = {**body, "stream": False, "stream_options": None, "max_tokens": 1}
    answer = httpx.post(f"{second.url}/v1/chat/completions", json=again, headers=headers, timeout=PATIENCE).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert stop(second) == 0


def test_a_second_ctrl_c_ends_it_at_once_and_quietly(smollm2_bundle):
    running = serve(smollm2_bundle)
    body = {"prompt": "Once", "max_tokens": 1000, "temperature": 0, "stream": True, "ignore_eos": True}
    address = running.url.removeprefix("http://").split(":")

    def listens_no_more() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((address[0], int(address[1]))) != 0

    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"},
                      timeout=PATIENCE) as response:
        assert next(response.iter_lines()).startswith("data: ")
        running.process.send_signal(signal.SIGINT)
        eventually(listens_no_more, "the end of listening")
        running.process.send_signal(signal.SIGINT)
        assert exit_code(running) == 0
    assert "Traceback" not in "".join(running.log)


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(served, tmp_path):
    (tmp_path / "x.bundle").mkdir()
    port = served.url.rpartition(":")[2]
    done = subprocess.run([sys.executable, "-m", "relaxpack", "serve", str(tmp_path / "x.bundle"), "--port", port],
                          capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 6 and f"port {port}" in done.stderr and "--port" in done.stderr
