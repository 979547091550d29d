"""`relaxpack chat`: talk to a bundle, or to any server that speaks OpenAI's API, in the terminal."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from relaxpack.cli.options import device_option, existing_bundle, sampling, sampling_options, utf8
from relaxpack.errors import UsageError

if TYPE_CHECKING:
    from relaxpack.runtime.conversation import Conversation

_WAIT = 2.0   # seconds that a pipe may stay silent before nobody is assumed to be there
_DEMO = {"temperature": 0.0, "max_tokens": 128}


@click.command(short_help="Talk to a model in the terminal.")
@click.argument("bundle", metavar="BUNDLE|URL")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--load", "saved", metavar="FILE", help="Take up a conversation that /save wrote.")
@click.option("--model", metavar="NAME", help="Model of the server; by default its first (with a URL).")
@sampling_options
@device_option
def chat(bundle: str, device: str | None, system: str | None, saved: str | None, model: str | None,
         **options: Any) -> None:
    """Talk to the model in BUNDLE, or at URL, a server with an OpenAI-compatible API (key: RELAXPACK_API_KEY).

    Without a terminal it answers each line of standard input, or one built-in question if there is none.
    """
    from rich.console import Console

    from relaxpack.runtime.chat import QUESTION, TerminalChat, describe

    interactive = sys.stdin is not None and sys.stdin.isatty()
    talk = Console(stderr=not interactive, soft_wrap=not interactive)
    open_conversation = _remote(bundle, model, system) if _is_url(bundle) else _local(bundle, device, system, talk)
    first = None if interactive else _first_line()
    conversation = open_conversation({**(_DEMO if not interactive and first is None else {}), **sampling(options)})
    if saved is not None:
        conversation.load(saved)
    terminal = TerminalChat(conversation, read=_line_reader(first) if not interactive else _terminal_reader(),
                            out=sys.stdout, talk=talk, interactive=interactive)
    if interactive or first is not None:
        terminal.run()
        return
    talk.print(f"> {QUESTION}", highlight=False)
    terminal.ask(QUESTION)
    if conversation.timings is not None:
        talk.print(f"[dim]{describe(conversation.timings)}[/dim]", highlight=False)


def _local(bundle: str, device: str | None, system: str | None,
           talk: Any) -> Callable[[dict[str, Any]], Conversation]:
    existing_bundle(bundle)
    from relaxpack import llm as api
    from relaxpack.runtime.conversation import TALK, LocalConversation

    with talk.status("loading") as status:
        llm = api.LLM(bundle, device=device, progress=lambda done, total: status.update(
            f"loading: {done / 1e9:.1f} of {total / 1e9:.1f} GB are on the GPU"))
    if not llm.engine.generates:
        raise UsageError(f"{bundle} computes embeddings only: build it with --embeddings instead of --embeddings-only "
                         "to chat")
    name = llm.info.name if llm.info is not None else bundle

    def make(given: dict[str, Any]) -> Conversation:
        advice = {} if llm.tokenizer.text.generation.get("temperature") is not None else TALK
        return LocalConversation(name, llm.generator, llm.template, llm.params(**{**advice, **given}), system)
    return make


def _remote(url: str, model: str | None, system: str | None) -> Callable[[dict[str, Any]], Conversation]:
    from relaxpack.env import api_key
    from relaxpack.runtime.chat_client import RemoteConversation

    return lambda given: RemoteConversation(url, model=model, system=system, api_key=api_key(), sampling=given)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _first_line() -> str | None:
    """The first line of a pipe or file; None where it is at its end, closed, or stays silent (as in CI)."""
    try:
        if sys.stdin is None or not select.select([sys.stdin], [], [], _WAIT)[0]:
            return None
    except (OSError, ValueError):   # closed, or nothing that can be waited for
        return None
    line = _read_line()
    return line.rstrip("\n") if line else None


def _read_line() -> str:
    try:
        return utf8(sys.stdin.readline(), "standard input")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text (byte {error.start})") from None


def _line_reader(first: str | None) -> Callable[[str], str]:
    pending = [] if first is None else [first]

    def read(prompt: str) -> str:
        if pending:
            return pending.pop()
        line = _read_line()
        if not line:
            raise EOFError
        return line.rstrip("\n")
    return read


def _terminal_reader() -> Callable[[str], str]:
    try:
        import readline  # gives input() line editing and history
    except ImportError:
        return input
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message
    return input
