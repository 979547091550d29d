"""`TerminalChat`: a conversation in a terminal, or over a pipe line by line.

Reads messages and commands, streams answers, and stops an answer on Ctrl-C without leaving. Who answers is a
`Conversation`; nothing here knows engines or HTTP.
"""

from __future__ import annotations

import difflib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from relaxpack.errors import RelaxpackError
from relaxpack.runtime.conversation import Conversation
from relaxpack.runtime.text_generation import Timings

QUESTION = "What is a compiler? Answer in one sentence."   # asked when there is nobody to ask
_QUOTES = '"""'
# Everything a terminal would obey rather than show, but line ends and tabs.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TerminalChat:
    """`read` gives the next line for a prompt (and raises EOFError at the end); answers go to `out`, talk to `talk`."""

    def __init__(self, conversation: Conversation, *, read: Callable[[str], str], out: TextIO, talk: Console,
                 interactive: bool) -> None:
        self._conversation = conversation
        self._read, self._out, self._talk, self._interactive = read, out, talk, interactive
        self._prompt, self._more = _prompts(interactive and talk.is_terminal and not talk.no_color)
        self._commands: dict[str, tuple[Callable[[str], Any], str]] = {
            "/help": (self._help, "this list"),
            "/reset": (self._reset, "forget the conversation, keep the system prompt"),
            "/stats": (self._stats, "tokens, speed, and how full the context is"),
            "/system": (self._system, "TEXT: set the system prompt and start over; alone it shows it"),
            "/save": (self._save, "FILE: write the conversation as JSON"),
            "/load": (self._load, "FILE: take up a saved conversation"),
            "/exit": (self._exit, "leave (also Ctrl-D)"),
        }

    def run(self) -> None:
        """Until /exit or the end of input."""
        if self._interactive:
            self._say(f"[bold]{escape(self._conversation.name)}[/bold]\n[dim]/help lists the commands, Ctrl-C stops "
                      "an answer, Ctrl-D leaves[/dim]")
        while True:
            try:
                message = self._read_message()
            except EOFError:
                if self._interactive:
                    self._out.write("\n")
                return
            except KeyboardInterrupt:
                self._say("\n[dim]/exit or Ctrl-D leaves[/dim]")
                continue
            if message.strip() in ("/exit", "/quit"):
                return
            self.handle(message)

    def handle(self, message: str) -> None:
        """One message or command; errors meant for the user are shown and do not end a chat in a terminal. A script
        gets them raised."""
        try:
            if message.startswith("/") and not message.startswith("//"):
                self._command(message)
            elif message.strip():
                self.ask(message.removeprefix("/") if message.startswith("//") else message)
        except RelaxpackError as error:
            if not self._interactive:
                raise
            self._say(f"[red]{escape(str(error))}[/red]")

    def ask(self, message: str) -> None:
        with self._interruptible() as cancelled:
            try:
                for piece in self._conversation.ask(message, cancelled):
                    self._out.write(_CONTROL.sub("", piece))
                    self._out.flush()
            except KeyboardInterrupt:
                cancelled.stop()
            self._out.write("\n")
            self._out.flush()
            if cancelled():
                if not self._interactive:
                    raise KeyboardInterrupt      # nobody is there to go on
                self._say("[dim](stopped)[/dim]")

    def _read_message(self) -> str:
        line = self._read(self._prompt)
        if line.lstrip().startswith(_QUOTES):
            lines = [line.lstrip()[len(_QUOTES):]]
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(self._read(self._more))
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
            return "\n".join(lines).strip("\n")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._read(self._more)
        return line

    @contextmanager
    def _interruptible(self) -> Iterator[_Flag]:
        """Ctrl-C sets a flag, so that the engine is never left in the middle of a step; a second one raises."""
        flag = _Flag()
        if threading.current_thread() is not threading.main_thread() or self._conversation.interrupted_by_exception:
            yield flag
            return

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if flag():
                raise KeyboardInterrupt
            flag.stop()
        before = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield flag
        finally:
            signal.signal(signal.SIGINT, before)

    def _command(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        if name not in self._commands:
            near = difflib.get_close_matches(name, self._commands, n=1)
            self._say(f"no command {escape(name)}: {f'did you mean {near[0]}?' if near else '/help lists them'} "
                      "[dim](// sends a message that starts with /)[/dim]")
            return
        self._commands[name][0](argument.strip())

    def _help(self, argument: str) -> None:
        for name, (_, text) in self._commands.items():
            self._say(f"  [cyan]{name:8}[/cyan] {escape(text)}")
        self._say(f"  [dim]A \\ at the end of a line continues the message; so does {_QUOTES} up to the next {_QUOTES}."
                  "[/dim]")

    def _reset(self, argument: str) -> None:
        self._conversation.start_over(self._conversation.system)
        self._say("[dim]conversation forgotten[/dim]")

    def _system(self, argument: str) -> None:
        if not argument:
            self._say(escape(self._conversation.system or "no system prompt is set; the model's template may have one"))
            return
        self._conversation.start_over(argument)
        self._say("[dim]system prompt set, conversation starts over[/dim]")

    def _stats(self, argument: str) -> None:
        for title, timings in (("last answer", self._conversation.timings), ("all answers", self._conversation.total)):
            if timings is not None and timings.answers:
                self._say(f"  {title}: {describe(timings)}")
        if self._conversation.total.answers == 0:
            self._say("  nothing answered yet")
        if self._conversation.context is not None:
            used, limit = self._conversation.context
            self._say(f"  context: {used} of {limit} tokens")

    def _save(self, argument: str) -> None:
        if self._needs_file(argument, "/save"):
            self._conversation.save(argument)
            self._say(f"[dim]saved {len(self._conversation.messages)} messages to {escape(argument)}[/dim]")

    def _load(self, argument: str) -> None:
        if self._needs_file(argument, "/load"):
            self._conversation.load(argument)
            self._say(f"[dim]loaded {len(self._conversation.messages)} messages from {escape(argument)}[/dim]")

    def _needs_file(self, argument: str, name: str) -> bool:
        if not argument:
            self._say(f"{name} needs a file name: {name} chat.json")
        return bool(argument)

    def _exit(self, argument: str) -> None:
        raise EOFError   # "/exit now"; a bare /exit ends in `run`

    def _say(self, text: str) -> None:
        self._talk.print(text, highlight=False)


class _Flag:
    def __init__(self) -> None:
        self._set = False

    def __call__(self) -> bool:
        return self._set

    def stop(self) -> None:
        self._set = True


def describe(timings: Timings) -> str:
    """Timings in one line."""
    cached = f" ({timings.cached_tokens} cached)" if timings.cached_tokens else ""
    return (f"{timings.prompt_tokens} prompt tokens{cached}, {timings.prefill_rate:.0f} tok/s; "
            f"{timings.output_tokens} output tokens, {timings.decode_rate:.1f} tok/s")


def _prompts(color: bool) -> tuple[str, str]:
    if not color:
        return "> ", ". "
    # \001 and \002 tell readline which characters take no room.
    return "\001\033[1;36m\002> \001\033[0m\002", "\001\033[36m\002. \001\033[0m\002"
