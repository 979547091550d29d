"""/v1/completions, /tokenize, /detokenize and the rest over HTTP, on a model whose output depends on every token."""

from __future__ import annotations

import httpx
import pytest

from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.server.model import ServedModel
from relaxpack.runtime.server.serve import background
from tests.helpers.fakes import FakeRunner
from tests.helpers.server import shared_tokenizer
from tests.helpers.text import ScriptedRunner, answering, chatml, llama2
from tests.helpers.waiting import DEADLINE
from tests.unit.server.conftest import error_of, read_chunks


def complete(session, prompt, status=200, **body):
    response = session.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **body})
    if status != 200:
        return error_of(response, status)
    assert response.status_code == 200, response.text
    return response.json()


def expected(prompt_ids, count):
    return FakeRunner(vocab_size=shared_tokenizer().vocab_size).reference_greedy(prompt_ids, count)


def test_greedy_output_is_the_reference(hash_client):
    tokenizer = shared_tokenizer()
    answer = complete(hash_client, [5, 6, 7], max_tokens=9, cache_salt="of this test")
    assert answer["choices"][0]["text"] == tokenizer.decode(expected([5, 6, 7], 9))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12,
                               "prompt_tokens_details": {"cached_tokens": 0}}
    text = tokenizer.decode([40, 41, 42])
    assert complete(hash_client, text, max_tokens=4)["choices"][0]["text"] == tokenizer.decode(
        expected(tokenizer.encode(text), 4))


def test_several_prompts_with_several_outputs_each(hash_client):
    tokenizer = shared_tokenizer()
    prompts = [[9, 8], [7, 6, 5], [4]]
    texts = [tokenizer.decode(expected(p, 5)) for p in prompts for _ in range(2)]
    answer = complete(hash_client, prompts, max_tokens=5, n=2)
    assert [c["index"] for c in answer["choices"]] == list(range(6)) and [c["text"] for c in answer["choices"]] == texts
    assert answer["usage"]["completion_tokens"] == 30 and answer["usage"]["prompt_tokens"] == 6
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 5, "n": 2, "stream": True}
    chunks = read_chunks(hash_client.post("/v1/completions", json=body))
    for index in range(6):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in own) == texts[index] and own[-1]["finish_reason"] == "length"
    assert all(chunk["object"] == "text_completion" for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_the_prompt_and_its_logprobs(hash_client, stream):
    tokenizer = shared_tokenizer()
    text = "The quick brown fox"
    ids = tokenizer.encode(text)
    body = {"prompt": text, "temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 2}
    if stream:
        chunks = read_chunks(hash_client.post("/v1/completions", json={**body, "stream": True}))
        choices = [chunk["choices"][0] for chunk in chunks]
        logprobs = {key: [x for c in choices for x in c["logprobs"][key]] for key in choices[0]["logprobs"]}
        whole = "".join(c["text"] for c in choices)
    else:
        [choice] = hash_client.post("/v1/completions", json=body).json()["choices"]
        logprobs, whole = choice["logprobs"], choice["text"]
    assert whole.startswith(text)
    assert len({len(column) for column in logprobs.values()}) == 1 and len(logprobs["tokens"]) == len(ids) + 3
    assert logprobs["token_logprobs"][0] is None and all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"][:len(ids)]) == text
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]


@pytest.mark.parametrize("prompt", ["Hello 漢 you", "<|im_start|>漢", [1, 40, 41, 2, 50]])
@pytest.mark.parametrize("written_by", [chatml, llama2])
def test_text_offsets_are_places_in_the_text(prompt, written_by):
    """Behind characters of several tokens, a BOS that the text does not show, and a first space that it leaves out."""
    tokenizer = written_by()
    runner = ScriptedRunner(tokenizer, answering(tokenizer, lambda prompt: " 漢🦊 no more\n", 2))
    model = ServedModel(AsyncEngine(Engine(runner, end_token_ids=(2,)), tokenizer), tokenizer, ["offsets"])
    with background(model) as server, httpx.Client(base_url=server.url, timeout=DEADLINE) as session:
        for echo in (False, True):
            [choice] = complete(session, prompt, echo=echo, logprobs=0)["choices"]
            text, tokens = choice["text"], choice["logprobs"]["tokens"]
            offsets = choice["logprobs"]["text_offset"]
            *_, space, n, o, space_2, m = [offset for token, offset in zip(tokens, offsets, strict=True)
                                           if not token.startswith("bytes:") and offset <= text.index("more")]
            assert text[space:].startswith(" no more") and [n, o, space_2, m] == [space + k for k in (1, 2, 3, 4)]
            assert offsets == sorted(offsets) and offsets[-1] == len(text)


def test_echo_with_no_output_scores_the_prompt(hash_client):
    answer = complete(hash_client, "The quick", echo=True, max_tokens=0, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == "The quick" and "".join(choice["logprobs"]["tokens"]) == "The quick"
    assert answer["usage"]["completion_tokens"] == 0


CONTEXT = 256


@pytest.mark.parametrize(("length", "max_tokens", "words"), [
    (8, CONTEXT - 7, ["8 tokens", f"max_tokens is {CONTEXT - 7}", str(CONTEXT)]), (CONTEXT, None, [str(CONTEXT)]),
    (CONTEXT, 4, [str(CONTEXT), "4"]), (11680, None, ["11680 tokens", str(CONTEXT)]), (8, 10**9, [str(10**9), str(CONTEXT)]),
    (8, 1e9, [str(10**9), str(CONTEXT)]), (8, 0, ["at least 1, got 0", "8 tokens", str(CONTEXT)]),
    (8, -1, ["at least 1, got -1", "8 tokens", str(CONTEXT)])])
def test_c28_what_does_not_fit_is_refused_with_the_numbers(hash_client, length, max_tokens, words):
    error = complete(hash_client, [1] * length, status=400, max_tokens=max_tokens)
    assert all(word in error["message"] for word in words) and error["type"] == "invalid_request_error"
    assert "-7" not in error["message"]


def test_c28_the_last_token_fits_and_no_limit_means_the_rest(hash_client):
    assert complete(hash_client, [1] * (CONTEXT - 1), max_tokens=1)["usage"]["completion_tokens"] == 1
    answer = complete(hash_client, [1] * 50, max_tokens=None)
    assert answer["usage"]["completion_tokens"] == CONTEXT - 50 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [700000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({}, "prompt"),
    ({"prompt": "x", "suffix": "y"}, "suffix"), ({"prompt": "x", "best_of": 3}, "best_of"), ({"prompt": "x", "logprobs": 99},
     "logprobs"), ({"prompt": ["x"] * 300}, "prompt"), ({"prompt": "x", "echo": "yes"}, "echo")])
def test_prompts_that_make_no_sense(hash_client, body, param):
    assert error_of(hash_client.post("/v1/completions", json=body))["param"] == param


def test_seeded_sampling_repeats(hash_client):
    def sampled(seed):
        return complete(hash_client, [3, 4], max_tokens=12, temperature=1.5, seed=seed)["choices"][0]["text"]
    assert sampled(7) == sampled(7) != sampled(8)


def test_logit_bias_and_stop_token_ids(hash_client):
    tokenizer = shared_tokenizer()
    forced = complete(hash_client, [3], max_tokens=3, logit_bias={"65": 100})["choices"][0]["text"]
    assert forced == tokenizer.decode([65] * 3)
    ids = expected([5, 6, 7], 9)
    stopped = complete(hash_client, [5, 6, 7], max_tokens=9, stop_token_ids=[ids[4]])["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["text"] == tokenizer.decode(ids[:ids.index(ids[4])])


def test_bad_words_are_never_written(hash_client):
    """Where the greedy text would begin with one, as it is or behind a space."""
    tokenizer = shared_tokenizer()
    for start in range(3, 200):         # until a text begins with a word that is one token
        [first] = expected([start], 1)
        word = tokenizer.decode([first], continuation=True).strip()
        if word.isalpha() and first in [ids[0] for ids in map(tokenizer.encode, (word, f" {word}")) if len(ids) == 1]:
            break
    else:
        raise AssertionError("no prompt with such an answer")
    assert complete(hash_client, [start], max_tokens=1)["choices"][0]["text"].strip() == word
    banned = complete(hash_client, [start], max_tokens=20, bad_words=[word])["choices"][0]["text"]
    assert banned and word not in banned.split()


SETTINGS = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 4, "n": 2, "min_tokens": 1, "max_tokens": 3,
            "ignore_eos": True, "stop": ["zzz"], "stop_token_ids": [9], "logit_bias": {"3": -1.0}}


@pytest.mark.parametrize("path, body", [("completions", {"prompt": [3]}),
                                        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})])
def test_every_sampling_field_reaches_the_engine(hashed, hash_client, monkeypatch, path, body):
    engine = hashed.state.model.engine
    seen, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda ids, params, **more: seen.append(params) or submit(ids, params, **more))
    response = hash_client.post(f"/v1/{path}", json={**body, **SETTINGS})
    assert response.status_code == 200, response.text
    expected_values = {**SETTINGS, "stop": ("zzz",), "stop_token_ids": (9,), "logit_bias": {3: -1.0}}
    assert {name: getattr(seen[0], name) for name in SETTINGS} == expected_values


def test_tokenize_and_back(hash_client):
    text = "Příliš žluťoučký <|im_end|> kůň 👨‍👩‍👧"
    answer = hash_client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == shared_tokenizer().encode(text) and answer["count"] == len(answer["token_strs"])
    assert hash_client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert error_of(hash_client.post("/detokenize", json={"tokens": [10**6]}))["param"] == "tokens"
    assert error_of(hash_client.post("/tokenize", json={}))["param"] == "prompt"


@pytest.mark.parametrize("generation", [{"temperature": 0.7}, {"do_sample": False}])
def test_a_publisher_who_advises_is_followed_in_chats_too(generation):
    assert ServedModel(None, chatml(generation=generation), ["x"]).chat_advice == {}


def test_models(hash_client):
    [model] = hash_client.get("/v1/models").json()["data"]
    assert model["id"] == "hash" and model["max_model_len"] == CONTEXT
    assert model["default_sampling"] == {"temperature": 1.0} and model["chat_advice"] == {"temperature": 0.6, "top_p": 0.9}
    assert hash_client.get("/v1/models/hash").json()["id"] == "hash"
    assert error_of(hash_client.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_health_and_metrics(hash_client):
    from prometheus_client.parser import text_string_to_metric_families

    assert hash_client.get("/health").json()["status"] == "ok"
    before = complete(hash_client, [11], max_tokens=4)["usage"]
    response = hash_client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert families["relaxpack_output_tokens"].samples[0].value >= before["completion_tokens"]
    answers = {tuple(s.labels.values()): s.value for s in families["relaxpack_http_answers"].samples}
    assert answers["/v1/completions", "200"] >= 1
    buckets = [s.value for s in families["relaxpack_time_to_first_token_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] >= 1


def test_unknown_paths_and_methods(hash_client):
    assert error_of(hash_client.get("/v1/nothing"), 404)["message"].startswith("nothing is at /v1/nothing")
    response = hash_client.get("/v1/completions")
    assert "use POST" in error_of(response, 405)["message"] and response.headers["allow"] == "POST"


def test_the_page_and_its_files_are_served_with_a_strict_policy(hash_client):
    page = hash_client.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name, kind in (("app.js", "javascript"), ("chat.css", "css"), ("favicon.svg", "svg")):
        file = hash_client.get(f"/static/{name}")
        assert file.status_code == 200 and kind in file.headers["content-type"]
    assert hash_client.get("/favicon.ico").content == file.content
    assert "http://" not in page.text and "https://" not in page.text       # nothing from elsewhere
    assert hash_client.get("/static/../app.py").status_code == 404
