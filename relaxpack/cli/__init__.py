"""The command line: `relaxpack COMMAND`. Commands load when they are called, so `--help` imports neither TVM nor NumPy.

`main` turns every error meant for a user into one line on standard error and its exit code. Results go to standard
output, talk to standard error.
"""

from __future__ import annotations

import difflib
import errno
import gc
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
from click.exceptions import NoArgsIsHelpError

from relaxpack import __version__
from relaxpack.cli.signals import Stopped, stoppable
from relaxpack.errors import EnvironmentProblem, RelaxpackError

INTERRUPTED = 130   # 128 + SIGINT, as shells have it
# What the machine refuses, wherever it strikes (a full disk behind standard output, a read-only home): no bug of ours.
_MACHINE = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM,
                      errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP, errno.ESTALE))


class LazyCommand(NamedTuple):
    path: str       # "module:attribute"
    help: str       # one line for the list of commands


COMMANDS: dict[str, LazyCommand] = {
    "build": LazyCommand("relaxpack.cli.build:build", "Compile a checkpoint to a bundle."),
    "chat": LazyCommand("relaxpack.cli.chat:chat", "Talk to a model in the terminal."),
    "generate": LazyCommand("relaxpack.cli.generate:generate", "Complete prompts, for scripts."),
    "serve": LazyCommand("relaxpack.cli.serve:serve", "Serve a bundle over HTTP, OpenAI-compatible."),
    "inspect": LazyCommand("relaxpack.cli.inspect:inspect", "Show what is in a bundle and whether it fits here."),
    "verify": LazyCommand("relaxpack.cli.verify:verify", "Check a bundle's digests and the model's answers."),
    "explain": LazyCommand("relaxpack.cli.explain:explain", "Show kernels, schedules and the memory plan."),
    "diff": LazyCommand("relaxpack.cli.diff:diff", "Compare two bundles."),
    "doctor": LazyCommand("relaxpack.cli.doctor:doctor", "Say what this machine has and what to do next."),
    "bench": LazyCommand("relaxpack.cli.bench:bench", "Measure latency and throughput."),
    "tune": LazyCommand("relaxpack.cli.tune:tune", "Search for faster schedules."),
    "db": LazyCommand("relaxpack.cli.db:db", "Look after the tuning database."),
    "replay": LazyCommand("relaxpack.cli.replay:replay", "Run the failing pass of a crash report again."),
}


class _Interrupted(Exception):
    pass


class LazyGroup(click.Group):
    """Imports a command's module when the command is called, and lists only modules that exist."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, lazy in COMMANDS.items()
                if importlib.util.find_spec(lazy.path.partition(":")[0]) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, attribute = COMMANDS[cmd_name].path.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None     # click would answer with an empty line of its own

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(self.list_commands(ctx))}"
            ctx.fail(f"no command {name!r}: {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "-V", "--version", message="relaxpack %(version)s")
def group() -> None:
    """Compile a language model to a .so on Apache TVM Relax, and serve it with a lean runtime."""


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and answer its exit code."""
    _repair_streams()
    result, ended = None, None               # said below: what the error still holds may write a line when it goes
    try:
        with stoppable():
            result = group.main(args=None if args is None else list(args), prog_name="relaxpack", standalone_mode=False)
            sys.stdout.flush()
    except Stopped as stop:
        ended = str(stop), stop.exit_code
    except click.ClickException as error:
        return _say(_usage(error), error.exit_code)
    except (_Interrupted, click.Abort, KeyboardInterrupt):
        ended = "interrupted", INTERRUPTED
    except RelaxpackError as error:
        return _say(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader went away (`| head`). Nobody wants to hear about it, nor about the flush at exit.
        _discard_output()
        return 1
    except MemoryError as error:
        return _say(f"not enough memory{f': {error}' if str(error) else ''}; close other programs, or ask for less",
                    EnvironmentProblem.exit_code)
    except OSError as error:
        if error.errno not in _MACHINE:
            raise
        _discard_output()
        where = f": {error.filename}" if error.filename is not None else ""
        return _say(f"the system refused: {error.strerror}{where}", EnvironmentProblem.exit_code)
    if ended is not None:
        gc.collect()
        if ended[1] == INTERRUPTED and sys.stderr.isatty():
            print(file=sys.stderr)           # the terminal has shown ^C in this line
        return _say(*ended)
    return result if isinstance(result, int) else 0


def _repair_streams() -> None:
    """Closed streams (`>&-`) swallow output, so that no file takes their place; what a terminal's encoding lacks is
    shown as "?"."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """What is still in the buffer of standard output cannot be written; nobody wants to hear about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: click.ClickException) -> str:
    message = error.format_message()
    if isinstance(error, NoArgsIsHelpError):
        return message
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message.rstrip('.')} (see {error.ctx.command_path} --help)"
    return message


def _say(message: str, exit_code: int) -> int:
    one_line = message if "\n" not in message.strip() or message.startswith("Usage:") else " ".join(message.split())
    prefix = "" if message.startswith("Usage:") else "relaxpack: "
    try:
        print(prefix + one_line, file=sys.stderr)
    except OSError:          # nobody reads it any more: a pipe is closed, a terminal gone
        pass
    return exit_code


def main() -> None:
    sys.exit(run())
