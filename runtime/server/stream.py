"""`EngineResponse` and `GenerationResponse`: run requests to their end and answer, whole or as server-sent events.

Whatever ends the connection (the client leaves, time is up, the server shuts down) cancels the requests, so their pages are
free before the next step. What answers look like is `answers.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from relaxpack.runtime.request_stream import Piece, RequestStream
from relaxpack.runtime.sampler import OF_THE_REQUEST
from relaxpack.runtime.server.answers import Head, Json, Output, usage
from relaxpack.runtime.server.errors import ApiError, error_body, response_to
from relaxpack.runtime.server.translate import Job

KEEP_ALIVE_SECONDS = 15.0       # a comment goes out while the first token takes longer, or a proxy may give up
_DONE = b"data: [DONE]\n\n"


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class EngineResponse(Response):
    """Answers from requests that the engine works on, and cancels them when the client leaves or time is up."""

    def __init__(self, requests: Cancellable, timeout: float | None, draining: Callable[[], bool]) -> None:
        """`timeout`: seconds until the requests are ended. `draining`: whether the server is shutting down."""
        self.status_code = 200
        self.background = None
        self._requests, self._timeout, self._draining = requests, timeout, draining
        self._timed_out = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        watch = asyncio.ensure_future(_until_gone(receive))
        watch.add_done_callback(lambda _: self._requests.cancel())
        timer = loop.call_later(self._timeout, self._time_is_up) if self._timeout else None
        try:
            response = await self._answer(send, watch.done)
            if response is not None and not watch.done():
                await response(scope, receive, send)
        finally:
            if timer is not None:
                timer.cancel()
            self._requests.cancel()
            watch.cancel()

    async def _answer(self, send: Send, gone: Callable[[], bool]) -> Response | None:
        """The whole answer, or None where it has been sent piece by piece. `gone`: whether the client has left."""
        raise NotImplementedError

    def _time_is_up(self) -> None:
        self._timed_out = True
        self._requests.cancel()

    def _error(self, piece: Piece) -> ApiError | None:
        """Why an output ended before its end."""
        if piece.finish_reason == "error":
            if piece.error is not None and piece.error.startswith(OF_THE_REQUEST):
                return ApiError(400, piece.error, code="generation_failed")     # a client should not try it again
            return ApiError(500, piece.error or "the model failed", code="generation_failed")
        if piece.finish_reason != "abort":
            return None
        if self._timed_out:
            return ApiError(504, f"the answer took longer than this server's limit of {self._timeout:g} seconds: ask for "
                                 "less, or try again when it is less busy", code="timeout")
        if self._draining():
            return ApiError(503, "the server is shutting down: try again later", code="unavailable",
                            headers={"Retry-After": "5"})
        return ApiError(499, "the request was cancelled", code="cancelled")


class GenerationResponse(EngineResponse):
    def __init__(self, job: Job, head: Head, outputs: Sequence[Output], *, whole_kind: str,
                 timeout: float | None = None, draining: Callable[[], bool] = lambda: False) -> None:
        super().__init__(job, timeout, draining)
        self._job, self._head, self._outputs, self._whole_kind = job, head, outputs, whole_kind
        self._tokens = 0

    async def _answer(self, send: Send, gone: Callable[[], bool]) -> Response | None:
        if not self._job.stream:
            return await self._whole()
        await self._stream(send, gone)
        return None

    async def _whole(self) -> Response:
        async with aclosing(merged(self._job.streams, self._job.params.n)) as pieces:
            async for index, piece in pieces:
                error = self._error(piece)
                if error is not None:
                    return response_to(error)
                self._take(index, piece)
        body = self._head.body([output.whole() for output in self._outputs], self._whole_kind)
        return JSONResponse({**body, "usage": usage(self._job, self._tokens)})

    def _take(self, index: int, piece: Piece) -> list[Json]:
        self._tokens += 0 if self._job.echo_only else len(piece.token_ids)
        return self._outputs[index].add(piece)

    async def _stream(self, send: Send, gone: Callable[[], bool]) -> None:
        async with aclosing(merged(self._job.streams, self._job.params.n)) as pieces:
            await self._send_events(pieces, send, gone)

    async def _send_events(self, pieces: AsyncIterator[tuple[int, Piece]], send: Send, gone: Callable[[], bool]) -> None:
        started, (index, piece) = await self._first(pieces, send)
        if gone():
            return
        error = self._error(piece)
        if error is not None and not started:       # nothing has been sent, so the status can still say it
            await response_to(error)({"type": "http"}, _never, send)
            return
        if not started:
            await send(_start())
        body = self._events([choice for output in self._outputs for choice in output.begin()])
        while True:
            error = self._error(piece)
            if error is not None:
                content = json.dumps(error_body(error.status, str(error), error.param, error.code), ensure_ascii=False)
                await send(_body(body + f"data: {content}\n\n".encode() + _DONE, more=False))
                return
            body += self._events(self._take(index, piece))
            if body:
                await send(_body(body))
                # Neither sending nor reading suspends while there is room and there are pieces, but others want their turn,
                # and that the client has left is only learnt by giving up ours.
                await asyncio.sleep(0)
            body = b""
            try:
                index, piece = await anext(pieces)
            except StopAsyncIteration:
                break
            if gone():
                return
        if self._job.include_usage:
            body = _event({**self._head.body([]), "usage": usage(self._job, self._tokens)})
        await send(_body(body + _DONE, more=False))

    async def _first(self, pieces: AsyncIterator[tuple[int, Piece]], send: Send) -> tuple[bool, tuple[int, Piece]]:
        """The first piece, and whether headers and comments had to be sent while waiting for it."""
        first = asyncio.ensure_future(_next(pieces))
        started = False
        try:
            while not (await asyncio.wait([first], timeout=KEEP_ALIVE_SECONDS))[0]:
                if not started:
                    await send(_start())
                    started = True
                await send(_body(b": waiting\n\n"))
        except BaseException:       # the generator must stand still before it can be closed
            first.cancel()
            await asyncio.wait([first])
            raise
        return started, first.result()

    def _events(self, choices: Sequence[Json]) -> bytes:
        extra: Json = {}
        if self._job.include_usage:
            extra["usage"] = usage(self._job, self._tokens) if self._job.usage_so_far else None
        return b"".join(_event({**self._head.body([choice]), **extra}) for choice in choices)


def _start() -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no")]}


def _body(content: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def _event(chunk: Json) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _next(pieces: AsyncIterator[tuple[int, Piece]]) -> tuple[int, Piece]:
    return await anext(pieces)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> Any:
    raise AssertionError("a finished response reads nothing")


async def merged(streams: Sequence[RequestStream], n: int) -> AsyncGenerator[tuple[int, Piece], None]:
    """(index of the output among all, piece) from several requests with n outputs each, as they come."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield piece.index, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue(1)     # more waits in the streams, which merge it

    async def read(number: int, stream: RequestStream) -> None:
        async for piece in stream:
            await arrived.put((number * n + piece.index, piece))

    readers = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_outputs = len(streams) * n
        while open_outputs:
            index, piece = await arrived.get()
            open_outputs -= piece.finish_reason is not None
            yield index, piece
    finally:
        for reader in readers:
            reader.cancel()
