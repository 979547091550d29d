"""Servers for tests, without a model: a scripted one that says what a test wants, and a hash model in real pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.server.model import ServedModel
from relaxpack.runtime.structured import GrammarCompiler
from relaxpack.runtime.tokenizer import Tokenizer
from tests.helpers.embedding_fake import EmbeddingFake
from tests.helpers.text import ScriptedRunner, answering, chatml
from tests.helpers.waiting import Gate

# ChatML that knows tools, in Hermes' words.
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '</tools> call with <tool_call>\n{\"name\": ..., \"arguments\": ...}\n</tool_call><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls %}{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


class DelayedRunner(ScriptedRunner):
    delay = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = Gate()

    def forward(self, plan: Any) -> Any:
        self.gate.step()
        if self.delay:
            time.sleep(self.delay)
        return super().forward(plan)


@lru_cache
def shared_tokenizer(tools: bool = False) -> Tokenizer:
    return chatml(chat_template=TOOL_TEMPLATE) if tools else chatml()


def last_question(prompt: str) -> str:
    return prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]


def gate_of(model: ServedModel) -> Gate:
    """Of its runner, whichever of the two it is."""
    return model.engine._engine.runner.gate


def scripted_model(answer: Callable[[str], str], *, delay: float = 0.0, max_context: int = 2048, tools: bool = False,
                   name: str = "scripted", grammar: bool = False) -> ServedModel:
    """A model that gives `answer(rendered prompt)`; `delay`: seconds a step takes."""
    tokenizer = shared_tokenizer(tools)
    runner = DelayedRunner(tokenizer, answering(tokenizer, answer, 2), max_context)
    runner.delay = delay
    compiler = GrammarCompiler(tokenizer.tokenizer_json, tokenizer.vocab_size, [2]) if grammar else None
    return ServedModel(AsyncEngine(Engine(runner, end_token_ids=(2,), make_constraint=compiler), tokenizer), tokenizer,
                       [name, "alias"])


def hash_model(**runner: Any) -> ServedModel:
    """A FakeRunner: its output depends on every token before it, and on every page being right. It also embeds."""
    tokenizer = shared_tokenizer()
    options = {"num_pages": 200, "max_context": 256, **runner}
    fake = EmbeddingFake(vocab_size=tokenizer.vocab_size, **options)
    return ServedModel(AsyncEngine(Engine(fake), tokenizer), tokenizer, ["hash"])
