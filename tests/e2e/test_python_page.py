"""docs/python.md: every block runs, in order, on the real SmolLM2."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_page_can_be_followed(smollm2: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    (tmp_path / "my.bundle").symlink_to(smollm2("as-is"))
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    blocks = [(m.start(), m.group(1)) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    assert len(blocks) >= 7
    names: dict[str, object] = {"__name__": PAGE.name}
    for start, block in blocks:
        exec(compile("\n" * (text[:start].count("\n") + 1) + block, str(PAGE), "exec", dont_inherit=True), names)
    printed = capsys.readouterr().out
    assert "were there already" in printed and "but the context holds" in printed
    assert len(names["both"]) == 2 and all(names["both"])       # type: ignore[arg-type]
    assert names["vectors"].shape == (2, 576) and names["mean"].shape == (128,)     # type: ignore[attr-defined]
