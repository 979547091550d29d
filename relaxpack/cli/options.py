"""Arguments and options that several commands have, so that one word means one thing everywhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from relaxpack.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")

bundle_argument = click.argument("bundle", metavar="BUNDLE")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
device_option = click.option("--device", type=click.Choice(["cpu", "cuda"]),
                             help="Kind of target to run; by default the best one of the bundle that fits.")


class Seconds(click.FloatRange):
    """A range alone lets infinity and NaN through, which no timer takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        return seconds if math.isfinite(seconds) else self.fail(f"{seconds} is no number of seconds", param, ctx)


class Location(click.ParamType):
    """Of a database. An empty one is a variable that was never set: not what the default stands for."""

    name = "location"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value or self.fail("it is empty; leave the option out for the default", param, ctx)


def sampling_options(function: F) -> F:
    """Sampling options; one that is not given has the publisher's value, else that of greedy decoding."""
    options = [
        click.option("--max-tokens", "-n", type=click.IntRange(1), metavar="N",
                     help="Most tokens of an answer. Default: the rest of the context."),
        click.option("--temperature", "-t", type=float, metavar="T", help="0 takes the likeliest token each time."),
        click.option("--top-p", type=float, metavar="P", help="Draw from the likeliest tokens that hold this mass."),
        click.option("--top-k", type=int, metavar="K", help="Draw from the K likeliest tokens; 0 is off."),
        click.option("--min-p", type=float, metavar="P",
                     help="Draw from tokens at least P times as likely as the likeliest."),
        click.option("--repetition-penalty", type=float, metavar="R", help="Above 1 makes repetition less likely."),
        click.option("--seed", type=int, help="Same seed, same text."),
        click.option("--stop", multiple=True, metavar="TEXT",
                     help="End before this text; may be given several times."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options that were given, as fields of `SamplingParams`."""
    return {name: options[name] for name in SAMPLING if options.get(name) not in (None, ())}


def parse_ids(text: str) -> list[int]:
    """"1,2,3" or "1 2 3" to token ids."""
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"--prompt-ids {text!r}: expected token ids like 1,2,3")
    return [int(part) for part in parts]


def utf8(text: str, what: str) -> str:
    """`text` of a command line or stream, whose bytes must be UTF-8 whatever the locale says."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeEncodeError:
        return text                          # characters that the locale's encoding lacks, so they were no bytes
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 text (byte {error.start})") from None


def standard_input() -> str:
    """All of standard input. Raises UsageError where it is closed or not UTF-8."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: give the prompt as an argument")
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        return sys.stdin.read()
    try:
        text: str = buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text (byte {error.start})") from None
    return text


def existing_bundle(bundle: str) -> str:
    """Refuse a path where nothing is, before anything heavy is imported. Raises what `Bundle.open` raises there."""
    from relaxpack.dist.store import require_something

    require_something(Path(bundle))
    return bundle
