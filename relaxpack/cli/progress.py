"""Progress bars for long commands: one line per stage on stderr; silent where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StageBars:
    """A `relaxpack.compile.Progress` on the terminal."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called at every sign of progress."""
        self._check = check
        console = Console(stderr=True)
        self._progress = Progress(TextColumn("{task.description:<11}"), BarColumn(), TextColumn("{task.fields[what]}"),
                                  TimeElapsedColumn(), console=console, disable=not console.is_terminal)
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
