"""Progress of long commands on stderr: bars on a terminal, and of a build a line per long stage elsewhere, so that a log
shows where it is. Silent where a command prints JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


class StageBars:
    """A `relaxpack.compile.Progress` on the terminal."""

    def __init__(self, check: Callable[[], None] = lambda: None, quiet: bool = False) -> None:
        """`check` is called at every sign of progress."""
        self._check = check
        console = Console(stderr=True)
        self._lines = not quiet and not console.is_terminal
        self._progress = Progress(TextColumn("{task.description:<11}"), BarColumn(), TextColumn("{task.fields[what]}"),
                                  TimeElapsedColumn(), console=console, disable=quiet or not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> StageBars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        self._check()
        self._finish()
        if self._lines and total is not None:       # the short stages have one step and need no line
            click.echo(f"{name} ...", err=True)
        self._task = self._progress.add_task(name, total=total or 1, what="")

    def advance(self, what: str = "") -> None:
        self._check()
        if self._task is not None:
            self._progress.update(self._task, advance=1, what=what[-50:])

    def _finish(self) -> None:
        if self._task is not None:
            total = self._progress.tasks[self._task].total
            self._progress.update(self._task, completed=total, what="")
            self._progress.stop_task(self._task)


@contextmanager
def counting(what: str, quiet: bool = False, transfer: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Gives what takes (done, all): a bar that appears at the first call and goes away at the end. `transfer`: the
    numbers are bytes, and their speed is shown."""
    console = Console(stderr=True)
    numbers: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if transfer else [MofNCompleteColumn()]
    bar = Progress(TextColumn("{task.description}"), BarColumn(), *numbers, TimeElapsedColumn(), console=console,
                   disable=quiet or not console.is_terminal, transient=True)
    task: list[TaskID] = []

    def update(done: int, total: int) -> None:
        if not task:
            bar.start()
            task.append(bar.add_task(what, total=total))
        bar.update(task[0], completed=done)

    try:
        yield update
    finally:
        if task:
            bar.stop()
