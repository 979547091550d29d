"""The table of `relaxpack tune` where standard error is no terminal: a line as each task begins, the table at the end."""

from __future__ import annotations

import pytest

from relaxpack.cli.tune_table import TuneTable
from relaxpack.schedules.tuning.family import Part
from relaxpack.schedules.tuning.space import SearchSpace
from relaxpack.tuning.session import Outcome
from relaxpack.tuning.tasks import Task
from relaxpack.tuning_record import Workload

SPACE = SearchSpace({"a": (1, 2, 3)}, {"a": 1})


def task(name: str) -> Task:
    workload = Workload.kernel("family", {"name": name})
    return Task(name, workload, 8, 0.25, 10.0, Part(1, None, SPACE), "f32[t, 4] → f32[t, 8]")


def _run(table: TuneTable, first: Task, second: Task) -> None:
    with table:
        table.planned({first.name: 2, second.name: 2})
        table.started(first)
        table.trial(Outcome(first, "failed", "", 40.0, 25.0, 1, 0), 1)
        table.finished(Outcome(first, "improved", "faster by 50.0%", 40.0, 20.0, 2, 1))
        table.started(second)
        table.finished(Outcome(second, "failed", "the untuned kernel: crashed (SIGSEGV)"))


def test_lines_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = task("linear"), task("norm")
    _run(TuneTable("Tuning for cpu:x into t.sqlite", [first, second]), first, second)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[:2] == ["linear@8: up to 2 trials", "norm@8: up to 2 trials"]
    row = next(line for line in lines if line.startswith("linear@8 "))
    for cell in ("f32[t, 4] → f32[t, 8]", "25.0%", "40.00", "20.00", "2.00x", "50%", "improved: faster by 50.0%, 1 failed"):
        assert cell in row, (cell, row)
    assert "failed: the untuned kernel: crashed" in next(line for line in lines if line.startswith("norm@8 "))


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = task("linear"), task("norm")
    _run(TuneTable("Tuning", [first, second], quiet=True), first, second)
    assert capsys.readouterr() == ("", "")
