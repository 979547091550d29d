"""The chat in a real terminal (a pty) and over pipes, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pexpect
import pytest

from tests.helpers.waiting import DEADLINE

COMMAND = [sys.executable, "-m", "tests.helpers.scripted_chat"]


@pytest.fixture
def terminal():
    child = pexpect.spawn(COMMAND[0], COMMAND[1:], encoding="utf-8", timeout=DEADLINE, dimensions=(40, 120),
                          env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"})
    yield child
    child.close(force=True)


def test_a_session_in_a_terminal(terminal, tmp_path):
    terminal.expect("/help lists the commands")
    terminal.expect("> ")
    terminal.sendline("hello")
    terminal.expect("You said: hello ď👨‍👩‍👧\r\n.*> ")
    terminal.sendline('"""two')
    terminal.expect(r"\. ")
    terminal.sendline('lines"""')
    terminal.expect("You said: two\r\nlines ď👨‍👩‍👧\r\n.*> ")
    terminal.send("\x1b[200~pasted\ntext\x1b[201~\r")      # as terminals send what is pasted
    terminal.expect("You said: pasted\r\ntext ď👨‍👩‍👧\r\n")
    terminal.sendline("/stats")
    terminal.expect(r"last answer: \d+ prompt tokens \(\d+ cached\).*context: \d+ of 2048 tokens")
    file = tmp_path / "chat.json"
    terminal.sendline(f"/save {file}")
    terminal.expect("saved 6 messages")
    terminal.sendline("/system Be brief.")
    terminal.expect("starts over")
    terminal.sendline(f"/load {file}")
    terminal.expect("loaded 6 messages")
    terminal.sendline("/exit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    terminal.close()
    assert terminal.exitstatus == 0


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(terminal):
    terminal.expect("> ")
    terminal.sendline("count")
    terminal.expect("counting counting")
    terminal.sendintr()
    terminal.expect(r"\(stopped\)")
    terminal.expect("> ")
    terminal.sendline("still there")
    terminal.expect("You said: still there")
    terminal.expect("> ")
    terminal.sendintr()
    terminal.expect("Ctrl-D leaves")
    terminal.expect("> ")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.wait()
    terminal.close()
    assert terminal.exitstatus == 0 and "Traceback" not in terminal.before


def test_questions_from_a_pipe():
    done = subprocess.run(COMMAND, input="one\n\ntwo\n/stats\n", capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "You said: one ď👨‍👩‍👧\nYou said: two ď👨‍👩‍👧\n" and "last answer" in done.stderr


@pytest.mark.parametrize("stdin", ["nothing", "silent"])
def test_nobody_there_answers_a_built_in_question_and_exits(stdin):
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE if stdin == "silent" else subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.wait(timeout=DEADLINE) == 0
    assert process.stdout.read().startswith("You said: What is a compiler?")
    assert "> What is a compiler?" in process.stderr.read()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
