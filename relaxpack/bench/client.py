"""A small asyncio client for OpenAI's streaming API that notes when each piece arrives.

Its own, because load generators are measured too: no library between the socket and the clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from relaxpack.errors import EnvironmentProblem, UsageError


@dataclass
class Sample:
    """One request as its client saw it; times are seconds after the start of the run."""

    number: int
    due: float                      # when it was to be sent
    first: float | None = None      # first text
    last: float | None = None
    pieces: list[float] = field(default_factory=list)      # arrival of each piece of text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first is None else self.first - self.due

    @property
    def time_per_token(self) -> float | None:
        """Mean over the tokens after the first."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)


class LoadClient:
    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600.0,
                 extra: Mapping[str, Any] | None = None) -> None:
        """`extra`: further fields of every request."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"{url!r}: expected something like http://localhost:8000 (no TLS)")
        self._host, self._port = parts.hostname, parts.port or 80
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._headers = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._timeout, self._extra, self._model = timeout, dict(extra or {}), model

    async def describe(self) -> dict[str, Any]:
        """The entry of the model in /v1/models; the first one where none was named."""
        status, lines = await self._send("GET", "/models", None)
        body = "".join([line async for line in lines])
        if status != 200:
            raise EnvironmentProblem(f"http://{self._host}:{self._port} answered {status}: {body[:200]}")
        try:
            found = json.loads(body)["data"]
            entry = next((m for m in found if m["id"] == self._model), found[0]) if self._model else found[0]
        except (ValueError, KeyError, IndexError) as error:
            raise EnvironmentProblem(f"http://{self._host}:{self._port} lists no model: {body[:200]}") from error
        self._model = self._model or entry["id"]
        return dict(entry)

    async def complete(self, number: int, prompt: str | Sequence[int], output_tokens: int, started: float,
                       due: float) -> Sample:
        """Stream one completion of text or token ids. Never raises: what went wrong is in the sample."""
        sample = Sample(number, due)
        body = {"model": self._model, "prompt": prompt, "max_tokens": output_tokens, "stream": True,
                "stream_options": {"include_usage": True}, **self._extra}
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(body, sample, started)
        except (OSError, EnvironmentProblem, ValueError, KeyError, asyncio.IncompleteReadError, TimeoutError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        return sample

    async def _stream(self, body: Mapping[str, Any], sample: Sample, started: float) -> None:
        status, lines = await self._send("POST", "/completions", body)
        if status != 200:
            text = "".join([line async for line in lines])
            raise EnvironmentProblem(f"answered {status}: {text[:300]}")
        done = False
        async for line in lines:
            if not line.startswith("data: "):
                continue
            now = time.perf_counter() - started
            if line.startswith("data: [DONE]"):
                done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise EnvironmentProblem(str(chunk["error"]))
            if any(choice.get("text") for choice in chunk["choices"]):
                sample.first = now if sample.first is None else sample.first
                sample.last = now
                sample.pieces.append(now)
            if usage := chunk.get("usage"):
                sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if not done:
            raise EnvironmentProblem("the stream ended without [DONE]")
        sample.output_tokens = sample.output_tokens or len(sample.pieces)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, AsyncIterator[str]]:
        data = b"" if body is None else json.dumps(body).encode()
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot reach http://{self._host}:{self._port}: {error}; is the server running?") from error
        head = (f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
                f"{self._headers}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n")
        writer.write(head.encode() + data)
        try:
            first = await reader.readline()
            status = int(first.split()[1])
            chunked = False
            while (line := await reader.readline()) not in (b"\r\n", b""):
                chunked |= line.lower().startswith(b"transfer-encoding: chunked")
        except (IndexError, ValueError) as error:
            writer.close()
            raise EnvironmentProblem(f"http://{self._host}:{self._port} does not speak HTTP: {first[:80]!r}") from error
        except BaseException:
            writer.close()
            raise
        return status, _lines(reader, writer, chunked)


async def _lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunked: bool) -> AsyncIterator[str]:
    """Lines of a body, each as soon as it is whole."""
    rest = b""
    try:
        while True:
            if chunked:
                size = int((await reader.readline()).split(b";")[0] or b"0", 16)
                part = (await reader.readexactly(size + 2))[:size]
            else:
                part = await reader.read(65536)
            if not part:
                break
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line.decode() + "\n"
        if rest:
            yield rest.decode()
    finally:
        writer.close()
