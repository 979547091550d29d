"""C22: chat templates that stand in files of their own travel into the bundle, and the one for tools is taken where tools
are given.
"""

from __future__ import annotations

import pytest

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.llm import LLM
from tests.helpers.tiny_checkpoints import write_checkpoint

PLAIN = "{% for m in messages %}plain {{ m['content'] }}{% endfor %}"
TOOLS = ("{% for t in tools %}tool {{ t['function']['name'] }} {% endfor %}"
         "{% for m in messages %}{{ m['content'] }}{% endfor %}")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("templates") / "checkpoint", chat_template=None, num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    report = build_bundle(folder, folder.parent / "x.bundle", options=BuildOptions(
        max_context=64, max_batch=1, prefill_chunk=16))
    assert report.can_chat
    return LLM(report.path)


def test_the_file_is_in_the_bundle(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert llm.tokenizer.decode(llm.template.encode(messages)) == "plain hello"
    assert len(llm.chat(messages, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_tools_take_their_own_template(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    ids = llm.template.encode([{"role": "user", "content": "hello"}], tools=tools)
    assert llm.tokenizer.decode(ids) == "tool weather hello"
