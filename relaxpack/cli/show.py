"""How commands print: tables and JSON on standard output. Knows no command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxpack.readable import printable

STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


def console() -> Console:
    """A wide console where the output goes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Cells are plain text: what stands in a bundle is never taken for markup. As wide as its title, which would be
    broken over lines otherwise."""
    result = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim",
                   show_header=any(columns), min_width=len(title))
    for index, column in enumerate(columns):
        result.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return result
