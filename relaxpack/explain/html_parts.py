"""Small pieces of HTML that the report of `relaxpack explain` is made of; every text is escaped unless it is `Html`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from relaxpack.readable import printable


class Html(str):
    """Text that is HTML already."""


def text(value: Any) -> str:
    return escape(printable(str(value)))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Iterable[int] = ()) -> str:
    """Cells that are not `Html` are escaped; columns in `numbers` stand to the right."""
    right = set(numbers)

    def cell(tag: str, i: int, value: Any) -> str:
        return f'<{tag}{" class=n" if i in right else ""}>{value if isinstance(value, Html) else text(value)}</{tag}>'

    head = "".join(cell("th", i, column) for i, column in enumerate(columns))
    lines = "".join("<tr>" + "".join(cell("td", i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
