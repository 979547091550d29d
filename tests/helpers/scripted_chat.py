"""`python -m tests.helpers.scripted_chat ARGS`: `relaxpack chat .` over a scripted model that answers slowly.

For tests of the terminal in a process of its own; no bundle is built or loaded.
"""

from __future__ import annotations

import sys
import time

import relaxpack.cli
import relaxpack.llm
from relaxpack.llm import LLM
from relaxpack.runtime.engine import Engine
from tests.helpers.text import ScriptedRunner, answering, chatml


def answer(prompt: str) -> str:
    question = prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
    return "counting " * 200 if question == "count" else f"You said: {question} ď👨‍👩‍👧"


class SlowRunner(ScriptedRunner):
    def forward(self, plan):
        time.sleep(0.005)
        return super().forward(plan)


def main() -> None:
    tokenizer = chatml()
    runner = SlowRunner(tokenizer, answering(tokenizer, answer, 2), max_context=2048)
    llm = LLM.from_engine(Engine(runner, end_token_ids=(2,)), tokenizer)
    relaxpack.llm.LLM = lambda bundle, **options: llm
    sys.exit(relaxpack.cli.run(["chat", ".", "--temperature", "0", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
