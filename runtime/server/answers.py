"""From pieces of text to the objects of the OpenAI API: whole answers, and chunks of a stream.

One `ChatOutput` or `CompletionOutput` follows each output of a request. They know no connection; see `stream.py`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from relaxpack.runtime.detokenizer import Detokenizer
from relaxpack.runtime.request_stream import Piece
from relaxpack.runtime.sampler import TokenLogprobs
from relaxpack.runtime.server.translate import Job
from relaxpack.runtime.tokenizer import Tokenizer
from relaxpack.runtime.tool_calls import ToolCallParser

Json = dict[str, Any]
_LOWEST = -9999.0       # stands for a probability of zero, which JSON has no logarithm of


class Output(Protocol):
    """One output as it grows."""

    def begin(self) -> list[Json]:
        """Choices of chunks that come before the first piece."""
        ...

    def add(self, piece: Piece) -> list[Json]:
        """Choices of the chunks for one piece."""
        ...

    def whole(self) -> Json:
        """The choice of an answer that is not streamed, after the last piece."""
        ...


@dataclass
class Head:
    """What all chunks of one answer share."""

    prefix: str
    kind: str
    model: str
    id: str = ""
    created: int = 0

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = self.created or int(time.time())

    def body(self, choices: Sequence[Json], kind: str | None = None) -> Json:
        return {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model, "choices": choices}


def usage(job: Job, output_tokens: int) -> Json:
    """The `usage` of an answer: tokens of all prompts and outputs."""
    prompt = sum(map(len, job.prompts))
    cached = sum(stream.cached_tokens for stream in job.streams)
    return {"prompt_tokens": prompt, "completion_tokens": output_tokens, "total_tokens": prompt + output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached}}


def token_label(tokenizer: Tokenizer, token_id: int) -> tuple[str, list[int]]:
    """A token's text and bytes; bytes that are no whole character are spelt out, as OpenAI does."""
    raw = tokenizer.token_bytes[token_id]
    try:
        return raw.decode("utf-8"), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


@dataclass
class ChatOutput:
    index: int
    tokenizer: Tokenizer
    want_logprobs: bool
    parser: ToolCallParser | None = None
    parallel_calls: bool = True
    streamed: bool = False      # log-probabilities have gone out then, and with many likely tokens they are large
    text: str = ""
    logprobs: list[Json] = field(default_factory=list)
    finish_reason: str | None = None
    _calls: list[Json] = field(default_factory=list)

    @classmethod
    def of(cls, index: int, job: Job, tokenizer: Tokenizer) -> ChatOutput:
        parser = ToolCallParser(job.tool_format) if job.tool_format is not None else None
        if parser is not None and job.tool_start:
            parser.add(job.tool_start)
        return cls(index, tokenizer, job.params.logprobs is not None, parser, job.parallel_calls, job.stream)

    def begin(self) -> list[Json]:
        return [self._choice({"role": "assistant", "content": ""})]

    def add(self, piece: Piece) -> list[Json]:
        deltas = self._deltas(piece)
        entries = [self._entry(entry) for entry in piece.logprobs]
        if not self.streamed:
            self.logprobs += entries
        if entries and not deltas:
            deltas = [{"content": ""}]      # text is held back; the log-probabilities are not
        choices = [self._choice(delta) for delta in deltas]
        if entries:
            choices[0]["logprobs"] = {"content": entries, "refusal": None}
        if piece.finish_reason is not None:
            self.finish_reason = "tool_calls" if self._calls and piece.finish_reason == "stop" else piece.finish_reason
            choices.append(self._choice({}, self.finish_reason))
        return choices

    def _deltas(self, piece: Piece) -> list[Json]:
        if self.parser is None:
            self.text += piece.text
            return [{"content": piece.text}] if piece.text else []
        events = self.parser.add(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            events += self.parser.finish()
        deltas: list[Json] = []
        for event in events:
            if isinstance(event, str):
                self.text += event
                deltas.append({"content": event})
            elif self.parallel_calls or event.index == 0:
                if event.id is not None:
                    self._calls.append({"id": event.id, "type": "function",
                                        "function": {"name": event.name, "arguments": ""}})
                    delta = {"index": event.index, "id": event.id, "type": "function",
                             "function": {"name": event.name, "arguments": event.arguments}}
                else:
                    delta = {"index": event.index, "function": {"arguments": event.arguments}}
                self._calls[event.index]["function"]["arguments"] += event.arguments
                deltas.append({"tool_calls": [delta]})
        return deltas

    def _choice(self, delta: Json, finish_reason: str | None = None) -> Json:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": self.text, "refusal": None}
        if self._calls:
            message |= {"content": self.text.strip() or None, "tool_calls": self._calls}
        logprobs = {"content": self.logprobs, "refusal": None} if self.want_logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def _entry(self, entry: TokenLogprobs) -> Json:
        def one(token_id: int, logprob: float) -> Json:
            token, raw = token_label(self.tokenizer, token_id)
            return {"token": token, "logprob": _number(logprob), "bytes": raw}
        return {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]}


@dataclass
class CompletionOutput:
    index: int
    tokenizer: Tokenizer
    want_logprobs: bool
    echo: str | None = None
    echo_only: bool = False
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: Callable[[], Sequence[TokenLogprobs]] = tuple
    special_in_echo: bool = False
    streamed: bool = False
    text: str = ""
    finish_reason: str | None = None
    _offset: int = 0
    _logprobs: Json = field(default_factory=lambda: {"tokens": [], "token_logprobs": [], "top_logprobs": [],
                                                     "text_offset": []})
    _echoed: bool = False

    @classmethod
    def of(cls, index: int, job: Job, tokenizer: Tokenizer) -> CompletionOutput:
        number = index // job.params.n
        request = job.streams[number].request
        return cls(index, tokenizer, job.params.logprobs is not None, job.echo[number] if job.echo else None, job.echo_only,
                   request.prompt_ids, lambda: request.prompt_logprobs, job.special_in_echo, job.stream)

    def begin(self) -> list[Json]:
        return []

    def add(self, piece: Piece) -> list[Json]:
        logprobs = _table() if self.want_logprobs else None
        text = ""
        if self.echo is not None and not self._echoed:
            self._echoed = True
            text = self.echo
            if logprobs is not None:
                echoed = self.tokenizer.detokenizer(skip_special=not self.special_in_echo)
                self._row(logprobs, echoed, self.prompt_ids[0], None, ())
                for entry in self.prompt_logprobs():
                    self._row(logprobs, echoed, entry.token_id, entry.logprob, entry.top)
                self._offset = len(text)
        if not self.echo_only:
            text += piece.text
            for entry in piece.logprobs if logprobs is not None else ():
                self._row(logprobs, self._written, entry.token_id, entry.logprob, entry.top)
        self.text += text
        if logprobs is not None and not self.streamed:
            for name, column in logprobs.items():
                self._logprobs[name] += column
        self.finish_reason = piece.finish_reason
        if not text and piece.finish_reason is None and not (logprobs and logprobs["tokens"]):
            return []
        return [{"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}]

    @cached_property
    def _written(self) -> Detokenizer:
        """Follows the output for its offsets; the text itself may be held back."""
        return self.tokenizer.detokenizer(continuation=True)

    def _row(self, table: Mapping[str, list[Any]] | None, written: Detokenizer, token_id: int, logprob: float | None,
             top: Sequence[tuple[int, float]]) -> None:
        assert table is not None
        table["tokens"].append(token_label(self.tokenizer, token_id)[0])
        table["token_logprobs"].append(None if logprob is None else _number(logprob))
        table["top_logprobs"].append(
            None if logprob is None else {token_label(self.tokenizer, i)[0]: _number(value) for i, value in top})
        table["text_offset"].append(self._offset)
        self._offset += len(written.add([token_id]))     # not of its label: special tokens and half characters have no text

    def whole(self) -> Json:
        return {"index": self.index, "text": self.text, "logprobs": self._logprobs if self.want_logprobs else None,
                "finish_reason": self.finish_reason}


def _table() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
