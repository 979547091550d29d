"""The terminal chat over a scripted conversation: commands, several lines, errors, pipes."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from relaxpack.errors import RelaxpackError, RequestError
from relaxpack.runtime.chat import TerminalChat
from relaxpack.runtime.conversation import Conversation
from relaxpack.runtime.text_generation import Timings


class Parrot(Conversation):
    """Says everything twice; "fail" fails, "wait" answers until it is stopped."""

    def _answer(self, cancelled):
        text = self.messages[-1]["content"]
        if text == "fail":
            raise RequestError("the prompt has 99 tokens [sic]")
        yield f"{text}, "
        yield text
        n = 0
        while text == "wait" and not cancelled():
            n += 1
            if n == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield "."
        self._count(Timings(12, 4, 3, 0.5, 0.1, 1))


@pytest.fixture
def chat():
    def run(*lines, interactive=False):
        conversation, out, talk = Parrot("parrot"), io.StringIO(), io.StringIO()
        pending = list(lines)

        def read(prompt):
            if not pending:
                raise EOFError
            line = pending.pop(0)
            if isinstance(line, BaseException):
                raise line
            return line
        TerminalChat(conversation, read=read, out=out, talk=Console(file=talk, width=200), interactive=interactive).run()
        return conversation, out.getvalue(), talk.getvalue()
    return run


def test_lines_are_answered_in_order(chat):
    conversation, out, talk = chat("one", "", "two")
    assert out == "one, one\ntwo, two\n" and talk == ""
    assert [m["content"] for m in conversation.messages] == ["one", "one, one", "two", "two, two"]


def test_several_lines_in_one_message(chat):
    conversation, *_ = chat("first \\", "second", '"""', "a", "b", '"""', '"""one line"""', '"""x', 'y"""')
    assert [m["content"] for m in conversation.messages[::2]] == ["first \nsecond", "a\nb", "one line", "x\ny"]


def test_commands(chat, tmp_path):
    file = tmp_path / "saved [x].json"
    conversation, out, talk = chat("/help", "/stats", "/system Be [kind].", "one", "/stats", f"/save {file}", "/reset",
                                   "/system", f"/load {file}", "two")
    assert out == "one, one\ntwo, two\n"
    assert all(name in talk for name in ("/help", "/reset", "/stats", "/system", "/save", "/load", "/exit"))
    assert "nothing answered yet" in talk and "12 prompt tokens (4 cached), 16 tok/s" in talk
    assert "3 output tokens, 20.0 tok/s" in talk
    assert talk.count("Be [kind].") == 1 and "saved 3 messages" in talk and "loaded 3 messages" in talk
    assert [m["content"] for m in conversation.messages] == ["Be [kind].", "one", "one, one", "two", "two, two"]


def test_exit_ends_at_once(chat):
    for word in ("/exit", "/quit", " /exit "):
        assert chat("one", word, "two")[1] == "one, one\n"


def test_unknown_command_and_escaped_slash(chat):
    conversation, out, talk = chat("/stat", "/xyz", "//not a command", "/save")
    assert "did you mean /stats?" in talk and "/help lists them" in talk and "needs a file name" in talk
    assert out == "/not a command, /not a command\n" and len(conversation.messages) == 2


def test_errors_are_shown_and_do_not_end_the_chat(chat):
    conversation, out, talk = chat("fail", "/load /no/such/file", "one", interactive=True)
    assert "the prompt has 99 tokens [sic]" in talk and "cannot load /no/such/file" in talk
    assert out.endswith("one, one\n\n") and len(conversation.messages) == 2


def test_a_script_gets_errors_raised(chat):
    with pytest.raises(RelaxpackError, match="99 tokens"):
        chat("fail", "one")


def test_ctrl_c_stops_the_answer_and_not_the_program(chat):
    before = signal.getsignal(signal.SIGINT)
    conversation, out, talk = chat("wait", "one", interactive=True)
    assert out == "wait, wait...\none, one\n\n" and "(stopped)" in talk
    assert conversation.messages[1]["content"] == "wait, wait..."
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_a_script(chat):
    with pytest.raises(KeyboardInterrupt):
        chat("wait", "one")


def test_ctrl_c_at_the_prompt_says_how_to_leave(chat):
    _, out, talk = chat(KeyboardInterrupt(), "one", interactive=True)
    assert "Ctrl-D leaves" in talk and out == "one, one\n\n"


def test_greeting_only_with_a_terminal(chat):
    assert "parrot" in chat(interactive=True)[2] and chat()[2] == ""


def test_control_characters_of_an_answer_are_not_obeyed(chat):
    assert chat("a\x1b[2J\x07\tb\x9b1m")[1] == "a[2J\tb1m, a[2J\tb1m\n"
