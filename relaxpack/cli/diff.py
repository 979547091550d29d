"""`relaxpack diff`: how two bundles differ, or two builds of one model."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from relaxpack.cli.options import json_option
from relaxpack.cli.show import console, print_json, table
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.diff import diff as compare
from relaxpack.errors import UsageError
from relaxpack.explain.bundle_diff import step_differences
from relaxpack.readable import human_bytes

_MOST = 40   # fields shown; --json has all
_LONG = 30   # options that are no title of a column any more
_OUTPUT = "OUTPUT"   # build wants one
_NOT_COMPARED = {"targets": "both sides are built for diff's own --target",
                 **dict.fromkeys(("databases", "gpu"), "no tuning record is read; build both and compare the bundles"),
                 **dict.fromkeys(("dump", "timing", "force", "as_json"), "nothing is built; leave it out")}


@click.command(short_help="Compare two bundles, or one model built with two sets of options.")
@click.argument("left", metavar="BUNDLE")
@click.argument("right", metavar="OTHER", required=False)
@click.option("--left", "left_options", metavar="OPTIONS", help="Options of build for the left side of a model.")
@click.option("--right", "right_options", metavar="OPTIONS", help="And for the right side; none are the defaults.")
@click.option("--target", default="cpu", show_default=True, help="What both sides of a model are built for.")
@json_option
def diff(left: str, right: str | None, left_options: str | None, right_options: str | None, target: str,
         as_json: bool) -> int:
    """Show which facts, kernels and members differ between BUNDLE and OTHER. Exits with 0 where they are equal and
    with 1 where they are not.

    With --left or --right, BUNDLE is a model as build takes it, which goes through the passes with either set of options;
    no code is generated and no weight is read.

    \b
    relaxpack diff old.bundle new.bundle
    relaxpack diff smollm2 --left "-O0" --right "--weights q8"
    """
    if left_options is None and right_options is None:
        if right is None:
            raise UsageError("nothing to compare with: give another bundle, or --left and --right with options of build")
        return _diff_bundles(left, right, as_json)
    if right is not None:
        raise UsageError(f"{right!r} beside --left and --right: they compare two builds of one model")
    return _diff_options(left, left_options or "", right_options or "", target, as_json)


def _diff_options(model: str, left: str, right: str, target: str, as_json: bool) -> int:
    from relaxpack.explain.option_diff import option_differences

    found = option_differences(model, _build_options(left), _build_options(right), target)
    if as_json:
        print_json(found)
    elif not any(found.values()):
        click.echo("equal")
    else:
        out = console()
        names = (left or "defaults", right or "defaults") if max(len(left), len(right)) < _LONG else ("left", "right")
        out.print(table("Options", ("", *names), [(n, *map(_text, values)) for n, values in found["options"].items()]))
        out.print()
        _print_step(found, *names)
    return int(any(found.values()))


def _build_options(text: str) -> Any:
    """What `relaxpack build` would make of these options. Raises UsageError as it does."""
    from relaxpack.cli.build import build
    from relaxpack.compile import BuildOptions

    try:
        context = build.make_context("build", ["MODEL", "-o", _OUTPUT, *shlex.split(text)])
    except ValueError as error:
        raise UsageError(f"options {text!r}: {error}") from None
    except click.UsageError as error:
        raise UsageError(f"options {text!r}: {error.format_message()}") from None
    given = context.params
    for parameter in build.params:
        name = parameter.name or ""
        if name in _NOT_COMPARED and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"options {text!r}: {parameter.opts[-1]} is not compared: {_NOT_COMPARED[name]}")
    if str(given["output"]) != _OUTPUT:
        raise UsageError(f"options {text!r}: -o is not compared: nothing is written; leave it out")
    same = {field.name for field in dataclasses.fields(BuildOptions)} & set(given)
    return BuildOptions(**{name: given[name] for name in same - {"embeddings"}}, embeddings=given["embeddings"] or "none",
                        disabled_passes=frozenset(given["disabled"]), enabled_passes=frozenset(given["enabled"]),
                        ignore_config_keys=given["ignored"])


def _diff_bundles(left: str, right: str, as_json: bool) -> int:
    with Bundle.open(left) as a, Bundle.open(right) as b:
        found = compare(a, b)
        found |= {"step": step_differences(a, b)} if not found["equal"] else {}
    if as_json:
        print_json(found)
    elif found["equal"]:
        click.echo("equal")
    else:
        out = console()
        rows = _field_rows(found["fields"], *({entry.target.name for entry in x.manifest.targets} for x in (a, b)))
        if rows:
            hidden = len(rows) - _MOST
            title = "Facts" + (f" (the first {_MOST} of {len(rows)}; --json has all)" if hidden > 0 else "")
            out.print(table(title, ("", left, right), rows[:_MOST]))
            out.print()
        _print_step(found["step"], left, right)
        members = [(name, *("absent" if size is None else human_bytes(size) for size in sizes))
                   for name, sizes in found["members"].items()]
        if members:
            out.print(table("Members that differ", ("", left, right), members))
    return 0 if found["equal"] else 1


def _field_rows(fields: dict[str, Any], left: set[str], right: set[str]) -> list[tuple[str, str, str]]:
    """Names and both values; a target that one side lacks is one row instead of all its facts."""
    only = {f"targets.{name}": ("in it" if name in left else None, "in it" if name in right else None)
            for name in left ^ right}
    shown = {path: values for path, values in fields.items() if not path.startswith(tuple(f"{path}." for path in only))}
    return [(path, _text(values[0]), _text(values[1])) for path, values in sorted({**shown, **only}.items())]


def _print_step(step: dict[str, Any], left: str, right: str) -> None:
    out = console()
    if step["facts"]:
        out.print(table("One step (context 1024 or what both allow)", ("", left, right), [
            (name, *_numbers(name, values)) for name, values in step["facts"].items()]))
        out.print()
    if step["kernels"]:
        out.print(table("Kernels of a decode step that differ, by calls", ("", left, right), [
            (name, *map(str, calls)) for name, calls in step["kernels"].items()]))
        out.print()


def _numbers(name: str, values: Sequence[object]) -> list[str]:
    """Both values of a fact in a unit that can be read; with all digits where they would look alike."""
    shown = [_number(name, value) for value in values]
    return shown if len({*shown}) > 1 else [_text(value) for value in values]


def _number(name: str, value: object) -> str:
    if not isinstance(value, int | float):
        return _text(value)
    if name.endswith(" bytes") or "memory: " in name:
        return human_bytes(value)
    return f"{value / 1e9:.4g} G" if name.endswith("flops") else str(value)


def _text(value: object) -> str:
    return "absent" if value is None else str(value)
