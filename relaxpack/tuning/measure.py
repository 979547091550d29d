"""Measurers: who builds, checks and times candidates. `LocalMeasurer` has one worker process for building and one for
running; `remote.RemoteMeasurer` runs on machines behind an RPC tracker.
"""

from __future__ import annotations

import itertools
import queue
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from relaxpack.target import TargetSpec
from relaxpack.tuning.chain import Chain
from relaxpack.tuning.rounds import Rounds, rotation_bytes
from relaxpack.tuning.worker import Worker
from relaxpack.tuning_record import Facts, Workload

BUILD_SECONDS, CHECK_SECONDS = 60.0, 60.0
_JOBS = "relaxpack.tuning.jobs:"


class Measurer(Protocol):
    """Every method raises CandidateFailed where a candidate is to blame. `build` answers with a library that the other
    methods take. `parallel`: how many candidates may be under way at once."""

    parallel: int

    def build(self, workload: Workload, choice: Mapping[str, Any]) -> str: ...
    def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]: ...
    def time(self, libraries: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int,
             seconds: float) -> list[Rounds]: ...
    def conditions(self) -> Facts: ...
    def discard(self, library: str) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class ChainMeasurer(Measurer, Protocol):
    """`time_in_chain`: microseconds of a layer of the chain with each library in the place of the kernel for `work`.
    `around`: choices for others of its kernels, by the hash of their work; the rest are the rule's."""

    def time_in_chain(self, libraries: Sequence[str], work: Workload, chain: Chain, around: Mapping[str, Mapping[str, Any]],
                      seed: int, rounds: int, seconds: float) -> list[Rounds]: ...


class Builder:
    """The building half, shared by all measurers. `parallel` processes of it may build at once; further calls wait."""

    jobs = _JOBS

    def __init__(self, target: TargetSpec, build_seconds: float = BUILD_SECONDS, parallel: int = 1) -> None:
        self.target, self.parallel = target, parallel
        self._folder = Path(tempfile.mkdtemp(prefix="relaxpack-tune-"))
        self._seconds, self._numbers = build_seconds, itertools.count()
        self._builders = [Worker() for _ in range(parallel)]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._builders:
            self._free.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
        # A name of its own for every library: a loader answers a known path with what it has loaded from there.
        path = self._folder / f"candidate{next(self._numbers)}.so"
        worker = self._free.get()
        try:
            worker.call(self.jobs + "compile_candidate", workload, dict(choice), self.target, str(path),
                        timeout=self._seconds)
        finally:
            self._free.put(worker)
        return str(path)

    def discard(self, library: str) -> None:
        Path(library).unlink(missing_ok=True)

    def close(self) -> None:
        for worker in self._builders:
            worker.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class LocalMeasurer(Builder):
    """On this machine. `run_seconds`: what a candidate may take for its check, and beyond its rounds."""

    def __init__(self, target: TargetSpec, build_seconds: float = BUILD_SECONDS, run_seconds: float = CHECK_SECONDS) -> None:
        super().__init__(target, build_seconds)
        self._runner, self._run_seconds, self.rotate = Worker(), run_seconds, rotation_bytes()

    def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
        worst, where = self._runner.call(_JOBS + "check", library, workload, bucket, seed, timeout=self._run_seconds)
        return float(worst), str(where)

    def time(self, libraries: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int,
             seconds: float) -> list[Rounds]:
        found: list[Rounds] = self._runner.call(_JOBS + "time_in_turn", list(libraries), workload, bucket, seed, self.rotate,
                                                rounds, seconds, timeout=seconds + self._run_seconds)
        return found

    def conditions(self) -> Facts:
        return {"method": "rotated inputs, rounds in turn", "threads": self.target.threads}

    def close(self) -> None:
        self._runner.close()
        super().close()
