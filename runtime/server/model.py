"""`ServedModel`: what the server serves, gathered once: engine, text side, names and the publisher's advice on sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.chat_template import ChatTemplate
from relaxpack.runtime.conversation import TALK
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.server.errors import ApiError
from relaxpack.runtime.tokenizer import Tokenizer
from relaxpack.runtime.tool_calls import ToolFormat, detect_format


@dataclass
class ServedModel:
    engine: AsyncEngine
    tokenizer: Tokenizer
    names: Sequence[str]                # the first one is reported; requests may use any
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        text = self.tokenizer.text
        return detect_format(text.named_templates.get("tool_use") or text.chat_template
                             or text.named_templates.get("default"))

    @cached_property
    def default_sampling(self) -> dict[str, Any]:
        """The publisher's advice; OpenAI's temperature of 1 where there is none."""
        advice = {k: v for k, v in self.tokenizer.text.generation.items() if v is not None}
        if advice.pop("do_sample", None) is False:
            return {"temperature": 0.0}
        return {"temperature": 1.0, **{k: v for k, v in advice.items() if k in SamplingParams.__dataclass_fields__}}

    @property
    def chat_advice(self) -> dict[str, float]:
        """What the chat page asks for beyond the defaults: the API's temperature of 1 is OpenAI's, not advice for a chat."""
        advice = self.tokenizer.text.generation
        advised = advice.get("temperature") is not None or advice.get("do_sample") is False
        return {} if advised else dict(TALK)

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(404, f"no model {name!r} is served here: use {' or '.join(map(repr, self.names))}, or leave "
                                "model out", param="model", code="model_not_found")

    def describe(self) -> dict[str, Any]:
        """An entry of /v1/models; fields behind owned_by are extensions."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "relaxpack",
                "max_model_len": self.engine.max_tokens, "aliases": list(self.names[1:]),
                "default_sampling": self.default_sampling, "chat_advice": self.chat_advice,
                "chat": bool(self.template) and self.engine.generates,
                "embedding_size": self.engine.embedding_size or None}
