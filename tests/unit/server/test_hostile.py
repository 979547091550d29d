"""Bodies that are broken in a thousand ways: always a clear 4xx, never a stack trace, and the server stays alive."""

from __future__ import annotations

import json
import random

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from relaxpack.runtime.server.limits import Limits
from relaxpack.runtime.server.serve import background
from tests.helpers.server import hash_model
from tests.helpers.waiting import DEADLINE, eventually
from tests.unit.server.conftest import error_of

GOOD = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "Be kind."},
                     {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                     {"role": "assistant", "content": None, "tool_calls": [
                         {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
        "temperature": 0.5, "stop": ["x"], "stream": False, "logprobs": True, "top_logprobs": 2, "n": 1, "max_tokens": 2,
        "logit_bias": {"3": 1}, "seed": 1, "response_format": {"type": "text"}, "user": "me"},
    "/v1/completions": {"prompt": [[1, 2], [3]], "max_tokens": 2, "echo": True, "logprobs": 1, "stop": "a", "n": 1,
                        "stream_options": None},
    "/v1/embeddings": {"input": ["some text", "more"], "encoding_format": "base64", "dimensions": 4, "pooling": "mean",
                       "normalize": True, "user": "me"},
    "/tokenize": {"prompt": "some text"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
STRANGE = [None, True, -1, 0, 1.5, 1e308, -1e308, 10**30, "", "x", "\x00", "\ud800", "x" * 3000, [], {}, [[]], [None],
           {"a": {}}, "‮", ["a"] * 40, {"type": "function"}, [0] * 100, float("nan"), float("inf")]
load_all_checks()
JSON = {"Content-Type": "application/json"}


def mutate(value, rng):
    """One thing somewhere in a body changed to something strange."""
    if isinstance(value, dict) and value and rng.random() < 0.75:
        key = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return {**value, rng.choice(["nonsense", "", "model", "tools", "n", "\ud83d"]): rng.choice(STRANGE)}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.75:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(value[at], rng), *value[at + 1:]]
    return rng.choice(STRANGE)


@pytest.fixture(scope="module")
def session():
    with background(hash_model(max_context=64), Limits(max_body_bytes=200_000)) as server, \
            httpx.Client(base_url=server.url, timeout=DEADLINE) as client:
        yield client
        assert client.get("/health").json()["status"] == "ok"
        metrics = server.state.model.engine.metrics
        eventually(lambda: metrics.pages_held == 0 and metrics.running == 0)


def test_the_unchanged_bodies_are_fine(session):
    for path, body in GOOD.items():
        assert session.post(path, json=body).status_code == 200, path


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_malformed_bodies(session, seed):
    rng = random.Random(seed)
    refused = 0
    for _ in range(100):
        path = rng.choice(sorted(GOOD))
        body = mutate(GOOD[path], rng)
        for _ in range(rng.randrange(3)):
            body = mutate(body, rng)
        raw = json.dumps(body).encode()
        if rng.random() < 0.15:         # and the text of it broken too
            at = rng.randrange(len(raw))
            raw = raw[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(4))) + raw[at + rng.randrange(4):]
        response = session.post(path, content=raw, headers=JSON)
        if response.status_code != 200:
            assert response.status_code in (400, 404), (raw[:300], response.text)
            assert error_of(response, response.status_code)["message"]
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("raw", [
    b"", b"null", b"[]", b"3", b'"x"', b"{", b"\xff\xfe", b"\x00" * 50, b"[" * 50_000, b'{"a":' * 20_000, b"{}{}",
    b"1" * 6000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": "hi"}', b"a=b&c=d",
    b'{"prompt": NaN}', b'{"messages": [], "messages": []}', b"\xef\xbb\xbf{}"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_what_is_no_request_at_all(session, raw, path):
    error = error_of(session.post(path, content=raw, headers=JSON))
    assert error["type"] == "invalid_request_error" and error["message"]


def test_other_content_types_are_told_which_one_is_right(session):
    body = json.dumps(GOOD["/v1/chat/completions"]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        error = error_of(session.post("/v1/chat/completions", content=body, headers={"Content-Type": kind}))
        assert "application/json" in error["message"]


@pytest.fixture(scope="module")
def described():
    with background(hash_model(max_context=40), Limits(request_seconds=DEADLINE)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=DEADLINE)
        yield {operation.label: operation for operation in (result.ok() for result in schema.get_all_operations())}


@pytest.mark.filterwarnings("ignore")       # of schemathesis' own dependencies
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize("label", [
    "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings", "POST /tokenize", "POST /detokenize",
    "GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /metrics"])
def test_our_openapi_description_holds(described, label, mode):
    """schemathesis makes requests from /openapi.json, right and wrong ones, and checks every answer against it."""
    operation = described[label]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return      # a path or no input at all: every value is right
    names = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
    names += ["negative_data_rejection"] if mode is GenerationMode.NEGATIVE else []
    checks = CHECKS.get_by_names(names)

    @settings(max_examples=20, deadline=None, phases=[Phase.generate], derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(checks=checks, timeout=DEADLINE)
    check()
