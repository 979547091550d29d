"""The live table of `relaxpack tune`: one row a task, on stderr; lines instead where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from relaxpack.tuning.session import Outcome
    from relaxpack.tuning.tasks import Task

_STYLES = {"improved": "green", "kept": "", "known": "dim", "busy": "yellow", "stopped": "yellow", "failed": "red"}


class TuneTable:
    """An observer of a `TuningSession`; use as a context manager."""

    def __init__(self, title: str, tasks: Sequence[Task], quiet: bool = False) -> None:
        self._title, self._tasks, self._quiet = title, tasks, quiet
        self._outcomes: dict[str, Outcome] = {}
        self._left: dict[str, int] = {}
        self._done: set[str] = set()
        self._console = Console(stderr=True)
        self._live = (Live(self._render(), console=self._console, refresh_per_second=4)
                      if self._console.is_terminal and not quiet else None)

    def __enter__(self) -> TuneTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()
        elif not self._quiet:
            Console(stderr=True, width=160, highlight=False).print(self._render())

    def planned(self, budgets: Mapping[str, int]) -> None:
        self._left = dict(budgets)
        self._refresh()

    def started(self, task: Task) -> None:
        if self._live is None and not self._quiet:
            print(f"{task.name}: up to {self._left.get(task.name, 0)} trials", file=self._console.file, flush=True)
        self._refresh()

    def trial(self, outcome: Outcome, left: int) -> None:
        self._outcomes[outcome.task.name] = outcome
        self._left[outcome.task.name] = max(0, left)
        self._refresh()

    def finished(self, outcome: Outcome) -> None:
        self._outcomes[outcome.task.name] = outcome
        self._done.add(outcome.task.name)
        self._left[outcome.task.name] = 0
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Table:
        table = Table(title=self._title, title_justify="left", box=None, pad_edge=False, header_style="dim")
        table.add_column("task", no_wrap=True)
        table.add_column("shape")
        for name in ("weight", "untuned, µs", "best, µs", "gain", "of roofline", "trials left"):
            table.add_column(name, justify="right")
        table.add_column("result")
        for task in self._tasks:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in self._row(task)))
        return table

    def _row(self, task: Task) -> list[str | Text]:
        outcome = self._outcomes.get(task.name)
        left = str(self._left.get(task.name, ""))
        if outcome is None or outcome.untuned_us is None or outcome.best_us is None:
            what = "" if outcome is None else f"{outcome.state}: {outcome.why}"
            return [task.name, task.shape, f"{task.weight:.1%}", "", "", "", "", left, Text(what, _style(outcome))]
        result = f"{outcome.state}: {outcome.why}" if task.name in self._done else f"{outcome.trials} tried"
        if outcome.failed:
            result += f", {outcome.failed} failed"
        return [task.name, task.shape, f"{task.weight:.1%}", f"{outcome.untuned_us:.2f}", f"{outcome.best_us:.2f}",
                f"{outcome.untuned_us / outcome.best_us:.2f}x", f"{task.roofline_us / outcome.best_us:.0%}", left,
                Text(result, _style(outcome) if task.name in self._done else "")]


def _style(outcome: Outcome | None) -> str:
    return _STYLES.get(outcome.state, "") if outcome is not None else ""
