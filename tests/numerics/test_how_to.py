"""The how-to pages: every Python block of docs/add_a_*.md runs, page by page, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("add_a_pass.md", "add_a_model.md", "add_a_kernel.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_page_can_be_followed(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = [(m.start(), m.group(1)) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    assert len(blocks) >= 2
    names: dict[str, object] = {"__name__": page}
    for start, block in blocks:
        line = text[:start].count("\n") + 1
        exec(compile("\n" * line + block, str(DOCS / page), "exec", dont_inherit=True), names)


def test_all_pages_are_tested() -> None:
    assert {path.name for path in DOCS.glob("add_a_*.md")} == set(PAGES)
