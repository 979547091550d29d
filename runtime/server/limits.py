"""What a client may take: body size, time to send it, and how many requests at once. Also counts what happened.

Pure ASGI, in front of everything that costs. Time limits of the connection itself (headers, reading the answer) are in
`http_protocol.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import Counter
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relaxpack.runtime.server.errors import ApiError, response_to

_log = logging.getLogger("uvicorn.error")       # its format, and --log-level
GENERATES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings"})     # what takes the engine's time
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")      # perhaps half a character, which no tokenizer takes
_DRAIN_SECONDS, _DRAIN_FACTOR = 2.0, 4


@dataclass(frozen=True)
class Limits:
    max_body_bytes: int = 8 << 20
    max_concurrent: int = 256           # generation requests waiting or running
    body_seconds: float = 30.0          # to send the body
    header_seconds: float = 10.0        # to send the headers, first byte of the connection included
    write_seconds: float = 60.0         # that a client may leave a full send buffer unread
    request_seconds: float | None = 600.0       # for a whole answer; None: no limit
    drain_seconds: float = 30.0         # for running answers at shutdown


@dataclass
class HttpCounts:
    """Written by the server's one thread."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)      # by path and status
    in_flight: int = 0                  # generation requests
    refused: int = 0                    # because of max_concurrent
    disconnects: int = 0                # clients that left before their answer was whole


class LimitsMiddleware:
    def __init__(self, app: ASGIApp, limits: Limits, counts: HttpCounts, known_paths: frozenset[str]) -> None:
        self._app, self._limits, self._counts, self._known = app, limits, counts, known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._known else "other"
        counts, sent = self._counts, _Sent(send)
        generates = scope["method"] == "POST" and path in GENERATES
        try:
            if generates and counts.in_flight >= self._limits.max_concurrent:
                counts.refused += 1
                raise ApiError(429, f"{counts.in_flight} requests are in work, which is this server's limit: try again in a "
                                    "moment", code="too_many_requests", headers={"Retry-After": "1"})
            counts.in_flight += generates
            try:
                replay = await self._read_body(scope, receive) if scope["method"] in ("POST", "PUT", "PATCH") else receive
                await self._app(scope, replay, sent)
            finally:
                counts.in_flight -= generates
        except ApiError as error:
            if sent.status is None:
                await response_to(error)(scope, receive, sent)
        except _Gone:
            pass
        except Exception as error:
            # Not raised further: uvicorn would close a connection that its client means to use again.
            _log.exception("an error of the server's own, which is a bug")
            if sent.status is None:
                await response_to(error)(scope, receive, sent)
        finally:
            if sent.status is not None:
                counts.answers[path, sent.status] += 1
            if not sent.complete:
                counts.disconnects += 1

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """The whole body, within size and time; then a `receive` that gives it out again."""
        limit = self._limits.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            await _discard(receive, _DRAIN_FACTOR * limit)
            raise _too_large(int(declared), limit)
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while more and size <= limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._limits.body_seconds:g} seconds: send it faster",
                           code="timeout", headers={"Connection": "close"}) from None
        if size > limit:
            if more:
                await _discard(receive, _DRAIN_FACTOR * limit)
            raise _too_large(None, limit)
        body = b"".join(parts)
        _check_text(body)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return replay


class _Gone(Exception):
    """The client left while it was sending."""


class _Sent:
    """Passes messages on, adds an id to the answer, and remembers what went out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = f"req_{secrets.token_hex(12)}"
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        await self._send(message)


def _too_large(size: int | None, limit: int) -> ApiError:
    given = f"has {size} bytes" if size is not None else "is too large"
    return ApiError(413, f"the body {given}, at most {limit} are allowed: send less, or raise --max-body-mib",
                    code="request_too_large", headers={"Connection": "close"})


async def _discard(receive: Receive, limit: int) -> None:
    """Read a little further, so that a client which is still sending sees the answer and not a broken connection."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while size < limit:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _check_text(body: bytes) -> None:
    if not _SURROGATE.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair (\\ud800 to \\udfff alone), which is no character: send "
                            "whole characters") from None
    except (ValueError, RecursionError):
        return      # no JSON at all: the parser says so better
