"""Servers that the tests of this folder share; none needs a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from relaxpack.runtime.server.serve import Running, background
from tests.helpers.server import hash_model, last_question, scripted_model
from tests.helpers.waiting import DEADLINE


@pytest.fixture(scope="session")
def scripted() -> Iterator[Running]:
    """Repeats the last question, with characters that span several tokens."""
    with background(scripted_model(lambda prompt: f"You said: {last_question(prompt)} ďábelské 👨‍👩‍👧 ж漢🦊")) as server:
        yield server


@pytest.fixture(scope="session")
def hashed() -> Iterator[Running]:
    with background(hash_model()) as server:
        yield server


@pytest.fixture
def client(scripted: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=DEADLINE) as session:
        yield session


@pytest.fixture
def hash_client(hashed: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hashed.url, timeout=DEADLINE) as session:
        yield session


class Chat:
    """Shortcuts over one client."""

    def __init__(self, session: httpx.Client, path: str = "/v1/chat/completions") -> None:
        self.session, self.path = session, path

    def __call__(self, *messages: str | dict[str, Any], **body: Any) -> httpx.Response:
        told = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return self.session.post(self.path, json={"messages": told, **body})

    def answer(self, *messages: str | dict[str, Any], **body: Any) -> dict[str, Any]:
        response = self(*messages, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chunks(self, *messages: str | dict[str, Any], **body: Any) -> list[dict[str, Any]]:
        return read_chunks(self(*messages, **{"stream": True, **body}))

    def error(self, *messages: str | dict[str, Any], status: int = 400, **body: Any) -> dict[str, Any]:
        return error_of(self(*messages, **body), status)


def read_chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a finished stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.content.decode("utf-8", errors="strict").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: ") for e in events[:-1])
    return [json.loads(event[6:]) for event in events[:-2]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and 'File "' not in response.text
    return body["error"]


@pytest.fixture
def chat(client: httpx.Client) -> Chat:
    return Chat(client)
