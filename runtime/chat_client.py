"""`RemoteConversation`: a conversation answered by any server with OpenAI's chat API, over the standard library.

Streams server-sent events. The whole history is sent each turn, as that API wants it; the server's prefix cache is what
saves work there.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from relaxpack.errors import EnvironmentProblem, RequestError, UsageError
from relaxpack.runtime.conversation import Conversation
from relaxpack.runtime.text_generation import Timings

_CONNECT_SECONDS, _SILENT_SECONDS = 10.0, 600.0


class RemoteConversation(Conversation):
    interrupted_by_exception = True     # there is no engine to leave in the middle of a step

    def __init__(self, url: str, *, model: str | None = None, system: str | None = None, api_key: str | None = None,
                 sampling: Mapping[str, Any] | None = None) -> None:
        """`sampling`: fields of a chat request, like temperature and max_tokens. Asks for the first model of the
        server where none is named; raises EnvironmentProblem if nobody answers."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no URL of a server: expected something like http://localhost:8000")
        self._url, self._parts = url, parts
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._sampling = dict(sampling or {})
        super().__init__(model or self._first_model(), system)

    def _first_model(self) -> str:
        with closing(self._connect()) as connection:
            body = self._response(connection, "GET", "/models").read()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EnvironmentProblem(f"{self._url} names no model; is it a server with OpenAI's API? "
                                     "Name one with --model") from error

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        connection = kind(self._parts.hostname, self._parts.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(_SILENT_SECONDS)
        except OSError as error:
            raise EnvironmentProblem(f"cannot reach {self._url}: {error}; is the server running?") from error
        return connection

    def _response(self, connection: http.client.HTTPConnection, method: str, path: str,
                  body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        headers = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentProblem(f"{self._url} broke the connection: {error!r}") from error
        if response.status >= 400:
            raise RequestError(f"{self._url} answered {response.status}: {_error_text(response.read())}")
        return response

    def _answer(self, cancelled: Callable[[], bool]) -> Iterator[str]:
        request = {"model": self.name, "messages": self.messages, "stream": True,
                   "stream_options": {"include_usage": True}, **self._sampling}
        started = time.monotonic()
        first: float | None = None
        usage: Mapping[str, Any] = {}
        with closing(self._connect()) as connection:
            for chunk in self._events(self._response(connection, "POST", "/chat/completions", request)):
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        first = first or time.monotonic()
                        yield piece
                if cancelled():
                    break
        self._count(_timings(usage, started, first or time.monotonic()))

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The JSON of each server-sent event, to [DONE]: without it the answer is not whole, whatever ended it."""
        try:
            for line in response:
                name, _, value = line.decode("utf-8").partition(":")
                if name == "data" and value.strip() == "[DONE]":
                    return
                if name == "data":
                    chunk = json.loads(value)
                    if not isinstance(chunk, dict):
                        raise ValueError(f"an event that is no object: {value[:80]}")
                    if "error" in chunk:
                        raise RequestError(f"{self._url}: {_error_text(value.encode())}")
                    yield chunk
            raise ValueError("no [DONE]")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EnvironmentProblem(f"{self._url} broke off in the middle of the answer: {error!r}") from error


def _error_text(body: bytes) -> str:
    """The message in OpenAI's error shape, or the start of whatever came."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", errors="replace").strip() or "no reason given"


def _timings(usage: Mapping[str, Any], started: float, first: float) -> Timings:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Timings(usage.get("prompt_tokens") or 0, cached, usage.get("completion_tokens") or 0,
                   first - started, time.monotonic() - first, answers=1)
