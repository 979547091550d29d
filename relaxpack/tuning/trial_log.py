"""`TrialLog`: every trial of a job as a line of JSON, so that a job that was killed goes on where it was. It is only a
memory aid: what counts is in the database. A line cut off by a kill is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaxpack.tuning_record import canonical, digest


@dataclass
class TaskHistory:
    """`results`: choices with their microseconds, or None where they failed."""

    results: list[tuple[dict[str, Any], float | None]] = field(default_factory=list)
    done: str | None = None      # how the task ended

    def failures(self) -> int:
        return sum(time is None for _, time in self.results)


class TrialLog:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._tasks: dict[str, TaskHistory] = {}
        self._load()

    def history(self, task: Mapping[str, Any]) -> TaskHistory:
        """`task`: what the trials are of (workload, bucket, target, compiler)."""
        return self._tasks.setdefault(digest(task), TaskHistory())

    def trial(self, task: Mapping[str, Any], choice: Mapping[str, Any], time_us: float | None, why: str = "") -> None:
        self.history(task).results.append((dict(choice), time_us))
        self._append({"task": digest(task), "choice": dict(choice), "time_us": time_us, **({"why": why} if why else {})})

    def finish(self, task: Mapping[str, Any], outcome: str) -> None:
        self.history(task).done = outcome
        self._append({"task": digest(task), "done": outcome})

    def forget(self, task: Mapping[str, Any]) -> None:
        """Start again: later lines count from here."""
        self._tasks[digest(task)] = TaskHistory()
        self._append({"task": digest(task), "again": True})

    def _append(self, line: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as f:
            # A kill may have cut the last line; then this one begins a new one.
            if f.tell() and not self._ends_with_newline():
                f.write(b"\n")
            f.write(canonical(line).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as f:
            f.seek(-1, os.SEEK_END)
            return f.read(1) == b"\n"

    def _load(self) -> None:
        if not self.path.exists():
            return
        for line in self.path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                name = entry["task"]
                if "again" in entry:
                    self._tasks[name] = TaskHistory()
                elif "done" in entry:
                    self._tasks.setdefault(name, TaskHistory()).done = str(entry["done"])
                else:
                    time_us = entry["time_us"]
                    self._tasks.setdefault(name, TaskHistory()).results.append(
                        (dict(entry["choice"]), None if time_us is None else float(time_us)))
            except (ValueError, KeyError, TypeError):
                continue
