"""/v1/embeddings over HTTP, on a model whose hidden states depend on every token before them."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading

import httpx
import numpy as np
import openai
import pytest

from relaxpack.runtime.server.limits import Limits
from relaxpack.runtime.server.serve import background
from tests.helpers.embedding_fake import SIZE, reference
from tests.helpers.server import gate_of, hash_model, shared_tokenizer
from tests.helpers.waiting import DEADLINE, eventually
from tests.unit.server.conftest import error_of


def embed(session, given, status=200, **body):
    response = session.post("/v1/embeddings", json={"input": given, **body})
    if status != 200:
        return error_of(response, status)
    assert response.status_code == 200, response.text
    return response.json()


def vectors(answer):
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    assert {item["object"] for item in answer["data"]} == {"embedding"}
    return [item["embedding"] for item in answer["data"]]


def close(values, ids, **how):
    np.testing.assert_allclose(values, reference(ids, **how), rtol=0, atol=1e-6)


def test_text_and_token_ids_one_and_several(hash_client):
    encode = shared_tokenizer().encode
    texts = ["The quick brown fox", "jumps", "over the lazy dog " * 5]
    answer = embed(hash_client, texts, cache_salt="of this test")
    assert answer["object"] == "list" and answer["model"] == "hash"
    count = sum(len(encode(text)) for text in texts)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": {"cached_tokens": 0}}
    for values, text in zip(vectors(answer), texts, strict=True):
        assert len(values) == SIZE and np.linalg.norm(values) == pytest.approx(1, abs=1e-6)
        close(values, encode(text))
    assert vectors(embed(hash_client, texts[0])) == vectors(answer)[:1]
    assert vectors(embed(hash_client, encode(texts[1]))) == vectors(answer)[1:2]
    assert vectors(embed(hash_client, [encode(text) for text in texts])) == vectors(answer)


def test_pooling_dimensions_and_length(hash_client):
    ids = list(range(20, 60))
    close(vectors(embed(hash_client, ids, pooling="mean"))[0], ids, pooling="mean")
    close(vectors(embed(hash_client, ids, dimensions=4))[0], ids, dimensions=4)
    close(vectors(embed(hash_client, ids, normalize=False))[0], ids, normalize=False)
    whole = embed(hash_client, ids, dimensions=4.0, encoding_format="base64")["data"][0]["embedding"]
    close(np.frombuffer(base64.b64decode(whole), "<f4"), ids, dimensions=4)


def test_a_repeated_prefix_is_cached_and_counted(hash_client):
    ids = [50 + i % 7 for i in range(40)]
    embed(hash_client, ids, cache_salt="repeated")
    answer = embed(hash_client, [*ids, 3], cache_salt="repeated")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 36
    close(vectors(answer)[0], [*ids, 3])


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_the_openai_client(hashed, form):
    """Which asks for base64 by itself."""
    with openai.OpenAI(base_url=f"{hashed.url}/v1", api_key="unused", timeout=DEADLINE, max_retries=0) as client:
        options = {} if form is None else {"encoding_format": form}
        answer = client.embeddings.create(model="hash", input=["one", "two"], dimensions=6, **options)
        assert answer.model == "hash" and answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        for item, text in zip(answer.data, ("one", "two"), strict=True):
            values = np.frombuffer(base64.b64decode(item.embedding), "<f4") if form == "base64" else item.embedding
            close(values, shared_tokenizer().encode(text), dimensions=6)
        with pytest.raises(openai.BadRequestError) as error:
            client.embeddings.create(model="hash", input="x " * 300)
        assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("given, body, param, words", [
    ("", {}, "input", "empty"), ([], {}, "input", "empty"), (["a", ""], {}, "input", r"input\[1\] is empty"),
    ([[3], []], {}, "input", r"input\[1\]"), ([10**6], {}, "input", "ids go from 0 to"), ([[3], [-1]], {}, "input", "id -1"),
    ([5] * 257, {}, "input", "257 tokens, but this model's context holds 256: shorten it by 1"),
    (["a"] * 2049, {}, "input", "2049 entries, at most 2048"),
    ("a", {"dimensions": 0}, "dimensions", "from 1 on"), ("a", {"dimensions": SIZE + 1}, "dimensions", f"have {SIZE}"),
    ("a", {"pooling": "max"}, "pooling", "'last' or 'mean'"), ("a", {"encoding_format": "hex"}, "encoding_format", "base64"),
    ("a", {"poolin": "mean"}, "poolin", "did you mean pooling"), (3, {}, "input", "must be"),
    ("a", {"stream": True}, "stream", "not a field"),
])
def test_what_makes_no_sense_is_refused_by_name(hash_client, given, body, param, words):
    error = embed(hash_client, given, 400, **body)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert re.search(words, error["message"]), error["message"]


def test_another_model_is_404_and_a_bundle_without_the_function_says_what_to_build(hash_client, client):
    assert embed(hash_client, "a", 404, model="gpt-4")["code"] == "model_not_found"
    error = embed(client, "a", 400)
    assert "relaxpack build --embeddings" in error["message"] and error["param"] == "model"
    assert hash_client.get("/v1/models").json()["data"][0]["embedding_size"] == SIZE
    assert client.get("/v1/models").json()["data"][0]["embedding_size"] is None


def test_a_bundle_that_only_embeds_refuses_to_chat():
    with background(hash_model(generates=False)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        close(vectors(embed(session, [5, 6, 7]))[0], [5, 6, 7])
        assert session.get("/v1/models").json()["data"][0]["chat"] is False
        for path, body in (("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                           ("completions", {"prompt": "hi"})):
            error = error_of(session.post(f"/v1/{path}", json=body))
            assert "--embeddings-only" in error["message"]


def test_hundreds_at_once_beside_chats_are_those_of_each_alone():
    """With pages for a few sequences."""
    model = hash_model(page_size=4, num_pages=70, max_batch=8)

    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE) as client:
            async def texts(number):
                inputs = [[(number * 7 + i) % 400 + 3 for i in range(1 + (number + k) % 50)] for k in range(4)]
                body = {"input": inputs, "pooling": ["last", "mean"][number % 2]}
                return inputs, body["pooling"], (await client.post("/v1/embeddings", json=body)).json()

            async def chat(number):
                prompt = [(number * 7 + i) % 400 + 3 for i in range(20)]
                body = {"prompt": prompt, "max_tokens": 30, "temperature": 0}
                return prompt, (await client.post("/v1/completions", json=body)).json()
            return await asyncio.gather(*map(texts, range(50))), await asyncio.gather(*map(chat, range(20)))
    with background(model) as server:
        embedded, chats = asyncio.run(main(server.url))
        assert model.engine.metrics.pages_held == 0
    for inputs, pooling, answer in embedded:
        for values, ids in zip(vectors(answer), inputs, strict=True):
            close(values, ids, pooling=pooling)
    runner = model.engine._engine.runner
    for prompt, answer in chats:
        assert answer["choices"][0]["text"] == shared_tokenizer().decode(runner.reference_greedy(prompt, 30))


def test_a_client_that_leaves_frees_the_pages_of_all_its_inputs():
    model = hash_model(prefill_chunk=8)
    with background(model) as server, gate_of(model).held(0) as gate:
        def both_are_in_work():
            """The second one may come while the first one's step stands at the gate."""
            if gate.holds and model.engine._commands:
                gate.allow(1)
            return gate.holds and not model.engine._commands and len(model.engine._engine._requests) == 2

        async def leave():
            async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE) as client:
                task = asyncio.ensure_future(client.post("/v1/embeddings", json={"input": [[3] * 200, [4] * 200]}))
                await asyncio.to_thread(eventually, both_are_in_work)
                task.cancel()
                await asyncio.wait([task])
        asyncio.run(leave())
        eventually(lambda: len(model.engine._commands) >= 2)      # the cancellations
        gate.allow(1)       # the step it was in, and no other
        eventually(lambda: model.engine.metrics.pages_held == 0 and server.state.counts.in_flight == 0)
        assert model.engine.metrics.finished == {"abort": 2} and not gate.holds


def test_thousands_of_inputs_keep_nobody_waiting(monkeypatch):
    """A chat that comes after them is answered before most of them are done."""
    model = hash_model(max_batch=4)
    inputs = [[3, 4 + i % 90] * 10 for i in range(400)]
    submit, submitted = model.engine.submit, threading.Event()
    monkeypatch.setattr(model.engine, "submit", lambda *given, **how: (submit(*given, **how), submitted.set())[0])
    with background(model) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        with gate_of(model).held(3) as gate:
            answers = []
            many = threading.Thread(target=lambda: answers.append(embed(session, inputs)))
            many.start()
            eventually(lambda: gate.holds)
            assert model.engine.metrics.requests <= 16
            with httpx.Client(base_url=server.url, timeout=DEADLINE) as other:
                asked = []
                chat = threading.Thread(target=lambda: asked.append(
                    other.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})))
                chat.start()
                assert submitted.wait(DEADLINE)
                gate.allow(40)      # a step takes 16 tokens: those of 32 inputs at most
                chat.join(DEADLINE)
            assert asked[0].status_code == 200 and not answers
        many.join(DEADLINE)
    assert len(vectors(answers[0])) == 400


def test_time_is_up_and_a_failing_model():
    model = hash_model()
    with background(model, Limits(request_seconds=0.2)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        with gate_of(model).held(0) as gate:
            asked = []

            thread = threading.Thread(target=lambda: asked.append(embed(session, [5] * 100, 504)))
            thread.start()
            eventually(lambda: gate.holds)
            eventually(lambda: model.engine._commands)      # the cancellation
            gate.allow(None)
            thread.join(DEADLINE)
        assert asked[0]["code"] == "timeout"
    model = hash_model()
    with background(model) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        model.engine._engine.runner.fail_next = RuntimeError("injected")
        error = embed(session, "a", 500)
        assert error["code"] == "generation_failed" and "injected" in error["message"]
        assert len(vectors(embed(session, "a"))) == 1


def test_they_count_as_requests_in_work():
    model = hash_model()
    with background(model, Limits(max_concurrent=1)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as session, gate_of(model).held(0):
        with httpx.Client(base_url=server.url, timeout=DEADLINE) as other:
            thread = threading.Thread(target=lambda: embed(other, "a"))
            thread.start()
            eventually(lambda: server.state.counts.in_flight == 1)
            assert embed(session, "b", 429)["code"] == "too_many_requests"
            gate_of(model).allow(None)
            thread.join(DEADLINE)


def test_answers_are_what_openapi_says(hash_client):
    schema = hash_client.get("/openapi.json").json()
    path = schema["paths"]["/v1/embeddings"]["post"]
    assert {"200", "400", "401", "404", "429", "504"} <= path["responses"].keys()
    assert "EmbeddingBody" in json.dumps(path["requestBody"])
