"""`Conversation`: the messages of one chat and who answers them; `LocalConversation` answers with an engine.

A local conversation keeps the token ids of earlier turns as they were computed and generated, so that only the new part
of a turn is prefilled. How it looks in a terminal is `chat.py`; answering over HTTP is `chat_client.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relaxpack.errors import RelaxpackError, RequestError, UsageError
from relaxpack.runtime.chat_template import ChatTemplate
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.text_generation import Completion, TextGenerator, Timings

FORMAT, FORMAT_VERSION = "relaxpack-chat", 1
# How chats sample where the publisher gives no temperature; greedy answers of small models run in circles.
TALK = {"temperature": 0.6, "top_p": 0.9}
_ROLES = ("system", "user", "assistant")


class Conversation(ABC):
    """Messages in OpenAI's form. `timings` are those of the last answer, `total` adds up all of them."""

    interrupted_by_exception = False     # whether Ctrl-C may raise inside `ask`; else it must set `cancelled`

    def __init__(self, name: str, system: str | None = None) -> None:
        self.name = name                 # of the model, for people
        self.messages: list[dict[str, Any]] = []
        self.timings: Timings | None = None
        self.total = Timings(0, 0, 0, 0.0, 0.0)
        self.start_over(system)

    @property
    def system(self) -> str | None:
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    @property
    def context(self) -> tuple[int, int] | None:
        """Tokens used and tokens that there are, if known."""
        return None

    def start_over(self, system: str | None = None) -> None:
        """Forget every turn; `system` is the new system message."""
        self.messages = [{"role": "system", "content": system}] if system else []
        self._forget()

    def ask(self, text: str, cancelled: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Pieces of the answer. What was said before an interruption stays; a turn without an answer is forgotten."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._answer(cancelled):
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def save(self, path: str | Path) -> None:
        """Write messages and the model's name as JSON. Raises UsageError where the file cannot be written."""
        document = {"format": FORMAT, "version": FORMAT_VERSION, "model": self.name, "messages": self.messages}
        try:
            Path(path).write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot save to {path}: {error.strerror}") from error

    def load(self, path: str | Path) -> None:
        """Take up a saved conversation; nothing changes if the file is not one."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot load {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not a saved conversation: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise UsageError(f"{path} is not a saved conversation: it lacks \"format\": \"{FORMAT}\"")
        if document.get("version") != FORMAT_VERSION:
            raise UsageError(f"{path} has version {document.get('version')!r}, this program reads {FORMAT_VERSION}")
        messages = document.get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise UsageError(f"{path}: messages must be objects with a role ({', '.join(_ROLES)}) and a content")
        self.start_over()
        self.messages = [{"role": message["role"], "content": message["content"]} for message in messages]

    def _count(self, timings: Timings | None) -> None:
        self.timings = timings
        if timings is not None:
            self.total = self.total.plus(timings)

    @abstractmethod
    def _answer(self, cancelled: Callable[[], bool]) -> Iterator[str]:
        """Answer `messages`, whose last is the user's."""

    def _forget(self) -> None:   # noqa: B027 (optional)
        """Drop what belongs to the turns."""


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)


class LocalConversation(Conversation):
    def __init__(self, name: str, generator: TextGenerator, template: ChatTemplate, params: SamplingParams,
                 system: str | None = None) -> None:
        self._generator, self._template, self._params = generator, template, params
        self._known_ids: list[int] = []     # of all turns so far, as computed and generated
        self._known = 0                     # messages they stand for
        super().__init__(name, system)

    @property
    def token_ids(self) -> list[int]:
        """Ids of all turns so far."""
        return list(self._known_ids)

    @property
    def context(self) -> tuple[int, int]:
        return len(self._known_ids), self._generator.engine.max_tokens

    def _forget(self) -> None:
        self._known_ids, self._known = [], 0

    def _answer(self, cancelled: Callable[[], bool]) -> Iterator[str]:
        ids = self._template.encode_next(self.messages, self._known_ids, self._known)
        completion: Completion | None = None
        try:
            for current, piece in self._generator.stream([ids], self._params, cancelled=cancelled):
                completion = current
                if piece:
                    yield piece
        except RequestError as error:
            raise self._with_hint(error, len(ids)) from error
        finally:
            if completion is not None and completion.text:
                self._known_ids, self._known = ids + completion.token_ids, len(self.messages) + 1
                self._count(completion.timings)
        if completion is not None and completion.error is not None:
            raise RelaxpackError(completion.error)

    def _with_hint(self, error: RequestError, length: int) -> RequestError:
        if length < self._generator.engine.max_tokens or not self._known:
            return error
        return RequestError(f"{error}; /reset starts over", error.param)
