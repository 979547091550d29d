"""`relaxpack doctor`: prints what `relaxpack.doctor` finds."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.text import Text

from relaxpack.cli.options import json_option
from relaxpack.cli.show import STYLES, console, print_json, table
from relaxpack.errors import EnvironmentProblem


@click.command(short_help="Say what this machine has and what to do next.")
@json_option
def doctor(as_json: bool) -> int:
    """Look at versions, TVM's libraries, CPU, memory, CUDA and extras, say what each means and what to do next. Exits
    with 6 where something keeps bundles from running."""
    from relaxpack.doctor import examine

    findings = examine()
    problems = [finding for finding in findings if finding.status == "problem"]
    if as_json:
        print_json({"ok": not problems, "findings": [asdict(finding) for finding in findings]})
    else:
        out = console()
        out.print(table("", ("area", "what", "", "found", "next step"),
                        [(f.area, f.name, Text(f.status, STYLES[f.status]), f.detail, f.next_step) for f in findings]))
        out.print(Text(f"{len(problems)} problems" if problems else "Bundles can run here.",
                       STYLES["problem" if problems else "ok"]))
    return EnvironmentProblem.exit_code if problems else 0
