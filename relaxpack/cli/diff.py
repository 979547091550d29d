"""`relaxpack diff`: how two bundles differ."""

from __future__ import annotations

import click

from relaxpack.cli.options import json_option
from relaxpack.cli.show import console, human_bytes, print_json, table
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.diff import diff as compare
from relaxpack.explain_diff import step_differences

_MOST = 40   # fields shown; --json has all


@click.command(short_help="Compare two bundles.")
@click.argument("left", metavar="BUNDLE")
@click.argument("right", metavar="OTHER")
@json_option
def diff(left: str, right: str, as_json: bool) -> int:
    """Show which facts, kernels and members differ between BUNDLE and OTHER. Exits with 0 where they are equal and
    with 1 where they are not."""
    with Bundle.open(left) as a, Bundle.open(right) as b:
        found = compare(a, b)
        found |= {"step": step_differences(a, b)} if not found["equal"] else {}
    if as_json:
        print_json(found)
    elif found["equal"]:
        click.echo("equal")
    else:
        out = console()
        rows = [(path, _text(values[0]), _text(values[1])) for path, values in found["fields"].items()]
        if rows:
            hidden = len(rows) - _MOST
            title = "Facts" + (f" (the first {_MOST} of {len(rows)}; --json has all)" if hidden > 0 else "")
            out.print(table(title, ("", left, right), rows[:_MOST]))
            out.print()
        step = found["step"]
        if step["facts"]:
            out.print(table("One step (context 1024 or what both allow)", ("", left, right), [
                (name, *map(_text, values)) for name, values in step["facts"].items()]))
            out.print()
        if step["kernels"]:
            out.print(table("Kernels of a decode step that differ, by calls", ("", left, right), [
                (name, *map(str, calls)) for name, calls in step["kernels"].items()]))
            out.print()
        members = [(name, *("absent" if size is None else human_bytes(size) for size in sizes))
                   for name, sizes in found["members"].items()]
        if members:
            out.print(table("Members that differ", ("", left, right), members))
    return 0 if found["equal"] else 1


def _text(value: object) -> str:
    return "absent" if value is None else str(value)
