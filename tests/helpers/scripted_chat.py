"""`python -m tests.helpers.scripted_chat ARGS`: `relaxpack chat .` over a scripted model that answers slowly, and counts
for minutes.

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


class SlowRunner(ScriptedRunner):
    """Brisk for a hundred steps of an answer, then so slow that whoever wants to stop it is in time."""

    steps = 0

    def forward(self, plan):
        self.steps += 1
        time.sleep(0.005 if self.steps < 100 else 0.5)
        return super().forward(plan)

    def answer(self, prompt: str) -> str:
        self.steps = 0
        question = prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
        return "counting " * 200 if question == "count" else f"You said: {question} ď👨‍👩‍👧"


def main() -> None:
    tokenizer = chatml()
    runner = SlowRunner(tokenizer, answering(tokenizer, lambda prompt: runner.answer(prompt), 2), max_context=2048)
    llm = LLM.from_engine(Engine(runner, end_token_ids=(2,)), tokenizer)
    relaxpack.llm.LLM = lambda bundle, **options: llm
    sys.exit(relaxpack.cli.run(["chat", ".", "--temperature", "0", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
