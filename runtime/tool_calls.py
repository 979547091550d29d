"""Tool calls in what a model wrote: `ToolCallParser` splits a text stream into plain text and calls.

Formats: Hermes and Qwen (`<tool_call>{…}</tool_call>`), Llama 3 (bare objects with `name` and `parameters`, with or
without `<|python_tag|>`), Mistral (`[TOOL_CALLS][{…}]` and `[TOOL_CALLS]name[ARGS]{…}`). What is no well-formed call
comes out as text; arguments are not checked against a schema here.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama3", "mistral"]
# Special tokens that the text must show for the parser to see them.
MARKERS = frozenset({"<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})
_OPENERS: Mapping[ToolFormat, str] = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_CLOSERS: Mapping[ToolFormat, tuple[str, ...]] = {"hermes": ("</tool_call>",), "llama3": (";", ","),
                                                  "mistral": (",", "]")}
_NAME_FIRST = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*")
_LONGEST_NAME = 256


@dataclass(frozen=True)
class ToolCall:
    """One finished call; `arguments` is JSON text, as the OpenAI API has it."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a call: the first of an `index` carries `id` and `name`, later ones more of `arguments`."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Event = str | ToolCallDelta


def detect_format(chat_template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches its model, by the markers it writes."""
    source = chat_template or ""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source:
        return "hermes"
    return "llama3" if "tools" in source and "parameters" in source else None


class ToolCallParser:
    """Feed text with `add`, end with `finish`; both give events in order. Finished calls are in `calls`."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._buffer = ""
        self._step: Callable[[list[Event]], bool] = self._read_text
        self._opener = ""                # what stood before the current call, given back if it is no call
        self._call = _Call()
        self._listed = False             # inside Mistral's [ … ]
        self._text_seen = False
        self.calls: list[ToolCall] = []

    def add(self, text: str) -> list[Event]:
        """What this text completes: pieces of plain text and of calls. A marker that may have begun is held back."""
        self._buffer += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """The rest. A call that was cut off is kept if its name was sent; any other rest is text."""
        events: list[Event] = []
        if self._step == self._read_call and self._call.announced:
            self._keep_call()
        elif self._step == self._read_call:
            self._give_back(events)
        elif self._step == self._read_head:
            events.append(self._opener + self._buffer)
        elif self._step == self._read_text and self._buffer:
            events.append(self._buffer)
        self._buffer = ""
        return events

    # Each step takes something off the buffer and may change `_step`; False: more text is needed.

    def _read_text(self, events: list[Event]) -> bool:
        opener = _OPENERS[self._form]
        body = self._buffer.lstrip()
        if self._form == "llama3" and not self._text_seen and body[:1] in ("", "{"):
            if body:
                self._begin(self._buffer[:len(self._buffer) - len(body)], body)
            return bool(body)
        before, found, rest = self._buffer.partition(opener)
        held = "" if found else _prefix_at_end(before, opener)
        if text := before.removesuffix(held) if held else before:
            events.append(text)
            self._text_seen = self._text_seen or not text.isspace()
        if found:
            self._begin(found, rest)
        else:
            self._buffer = held
        return bool(found)

    def _begin(self, opener: str, rest: str) -> None:
        self._opener, self._buffer, self._call, self._listed = opener, rest, _Call(), False
        self._step = self._read_head

    def _read_head(self, events: list[Event]) -> bool:
        """Up to the brace of a call; Mistral may put a list's bracket or the name there."""
        body = self._buffer.lstrip()
        if self._form == "mistral" and not self._listed and body.startswith("["):
            self._listed, self._opener, self._buffer = True, self._opener + "[", body[1:]
            return True
        head, brace, _ = self._buffer.partition("{")
        if self._form == "mistral" and not self._listed:
            name = _NAME_FIRST.fullmatch(head) if brace else None
            self._call.name_before = name[1] if name else None
            failed = bool(head.strip()) and (name is None if brace else len(head) > _LONGEST_NAME)
        else:
            failed = bool(head.strip())
        self._step = self._read_call
        if failed:
            self._give_back(events)
            return True
        if brace:
            self._opener, self._buffer = self._opener + head, self._buffer[len(head):]
            return True
        self._step = self._read_head
        return False

    def _read_call(self, events: list[Event]) -> bool:
        call = self._call
        self._buffer = call.feed(self._buffer)
        if (delta := call.take(len(self.calls))) is not None:
            events.append(delta)
        if call.failed:
            self._give_back(events)
        elif call.done:
            self._keep_call()
        return call.done

    def _read_after(self, events: list[Event]) -> bool:
        """After a call: its closing marker, then perhaps the next call or text again."""
        body = self._buffer.lstrip()
        for closer in _CLOSERS[self._form]:
            if body.startswith(closer):
                self._buffer = body[len(closer):]
                if closer in ",;":
                    listed = self._listed
                    self._begin(closer, self._buffer)
                    self._listed = listed
                else:
                    self._step = self._read_gap
                return True
            if closer.startswith(body):
                return False
        self._step = self._read_gap
        return True

    def _read_gap(self, events: list[Event]) -> bool:
        """White space between calls is nobody's text."""
        self._buffer = self._buffer.lstrip()
        self._text_seen = True
        if self._buffer:
            self._step = self._read_text
        return bool(self._buffer)

    def _give_back(self, events: list[Event]) -> None:
        if text := self._opener + self._call.text:
            events.append(text)
        self._text_seen = True
        self._call, self._step = _Call(), self._read_text

    def _keep_call(self) -> None:
        assert self._call.name is not None
        self.calls.append(ToolCall(len(self.calls), self._call.id, self._call.name, self._call.sent))
        self._step = self._read_after


class _Call:
    """Reads one JSON object character by character and knows name and arguments as soon as they are there."""

    def __init__(self) -> None:
        self.id = f"call_{secrets.token_hex(12)}"
        self.text = ""
        self.name_before: str | None = None   # Mistral's newer form: the object is the arguments
        self.name: str | None = None
        self.sent = ""                        # arguments given out
        self.announced = self.done = self.failed = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._string_start = 0
        self._values: dict[str, tuple[int, int | None]] = {}   # top-level key → span of its value

    def feed(self, text: str) -> str:
        """Take what belongs to the object; the rest is returned."""
        offset = len(self.text)
        self.text += text
        for position in range(offset, len(self.text)):
            self._track(self.text[position], position)
            if self._depth == 0:
                rest, self.text = self.text[position + 1:], self.text[:position + 1]
                self._finish()
                return rest
        return ""

    def _track(self, char: str, position: int) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1 and self._key is None:
                    self._key = self.text[self._string_start + 1:position]
        elif char == '"':
            self._in_string, self._string_start = True, position
        elif char in "{[":
            self._depth += 1
        elif char == ":" and self._depth == 1 and self._key is not None:
            self._values.setdefault(self._key, (position + 1, None))
        elif char in "}],":
            if self._depth == 1 and self._key in self._values:
                start, end = self._values[self._key]
                self._values[self._key] = (start, position if end is None else end)     # of a key that comes twice the first
                self._key = None
            self._depth -= char != ","

    def _value(self, *keys: str) -> tuple[str, bool] | None:
        """Source text of a top-level value and whether it is whole."""
        for key, (start, end) in self._values.items():
            if key in keys:
                return self.text[start:end].strip(), end is not None
        return None

    def _finish(self) -> None:
        streamed = self._known() is not None    # by who reads along; so it is a call, however the text was split
        try:
            self.failed = not streamed and not isinstance(_function(json.loads(self.text)).get("name"), str)
        except (ValueError, RecursionError):
            self.failed = not streamed
        self.done = True

    def take(self, index: int) -> ToolCallDelta | None:
        """What is new for the client."""
        known = None if self.failed else self._known()
        if known is None or (self.announced and known == self.sent):
            return None
        first, new = not self.announced, known[len(self.sent):]
        self.sent, self.announced = known, True
        return ToolCallDelta(index, new, self.id if first else None, self.name if first else None)

    def _known(self) -> str | None:
        """Arguments so far; None while the name is open or the arguments are no object."""
        if self.name_before is not None:
            self.name = self.name_before
            return self.text
        name, arguments = self._value("name"), self._value("arguments", "parameters")
        if not (name and name[1] and name[0].startswith('"') and arguments and arguments[0].startswith("{")):
            return self._unusual() if self.done else None
        if self.name is None:
            try:
                self.name = _whole_characters(json.loads(name[0]))
            except ValueError:
                return None
        return arguments[0]   # without trailing space, which may stand behind the object already

    def _unusual(self) -> str:
        """A finished call of another shape: wrapped in "function", arguments as a string, or none at all."""
        call = _function(json.loads(self.text))
        self.name = _whole_characters(call["name"])
        value = call.get("arguments", call.get("parameters"))
        return _whole_characters(value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False))


def _whole_characters(text: str) -> str:
    """Half a character, which an escape in JSON can be, cannot be sent to anyone."""
    return text.encode("utf-8", "replace").decode()


def _function(value: Any) -> Mapping[str, Any]:
    inner = value.get("function")
    return inner if isinstance(inner, Mapping) else value


def _prefix_at_end(text: str, marker: str) -> str:
    """The longest proper prefix of `marker` that ends `text`."""
    return next((marker[:n] for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), "")


def parse_tool_calls(text: str, form: ToolFormat) -> tuple[str, list[ToolCall]]:
    """A whole answer: its plain text and its calls."""
    parser = ToolCallParser(form)
    events = parser.add(text) + parser.finish()
    return "".join(event for event in events if isinstance(event, str)), parser.calls
