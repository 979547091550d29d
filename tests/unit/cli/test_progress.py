"""The bar while weights go to a GPU: on a terminal only, gone at the end, and never where JSON is printed. A build says in
a log where it is."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from relaxpack.cli import progress as module
from relaxpack.cli.progress import StageBars, counting


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, io.StringIO]:
    stream = io.StringIO()

    def console(**options: Any) -> Console:
        return Console(file=stream, force_terminal=request.param, width=100)
    monkeypatch.setattr(module, "Console", console)
    return request.param, stream


def test_a_bar_on_a_terminal_only(terminal: tuple[bool, io.StringIO]) -> None:
    shown, stream = terminal
    with counting("weights to the GPU", transfer=True) as update:
        assert stream.getvalue() == "", "nothing before the first bytes: a CPU maps its weights"
        for done in (1_000_000, 2_000_000, 4_000_000):
            update(done, 4_000_000)
    text = stream.getvalue()
    assert ("weights to the GPU" in text and "4.0/4.0 MB" in text) is shown and (text == "") is not shown


def test_quiet_is_quiet_everywhere(terminal: tuple[bool, io.StringIO]) -> None:
    with counting("weights to the GPU", quiet=True, transfer=True) as update:
        update(1, 2)
    assert terminal[1].getvalue() == ""


def test_graphs_are_counted(terminal: tuple[bool, io.StringIO]) -> None:
    shown, stream = terminal
    with pytest.raises(ValueError), counting("CUDA graphs") as update:
        update(3, 19)
        raise ValueError("a bar ends with its error")
    assert ("CUDA graphs" in stream.getvalue() and "3/19" in stream.getvalue()) is shown


@pytest.mark.parametrize("quiet", [False, True])
def test_a_build_names_its_long_stages_in_a_log(terminal: tuple[bool, io.StringIO], capsys: pytest.CaptureFixture[str],
                                                quiet: bool) -> None:
    shown, stream = terminal
    with StageBars(quiet=quiet) as bars:
        bars.stage("checkpoint")
        bars.stage("compile", 6)
        bars.advance("graph")
    assert capsys.readouterr().err == ("" if shown or quiet else "compile ...\n")
    assert ("compile" in stream.getvalue()) is (shown and not quiet)
