"""`CudaMeasurer`: candidates for the GPU of this machine. Compilers run side by side, on the cores that there are; one
process checks and times what they make, one after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relaxpack.schedules.kernels.cuda.fragments import early_launch
from relaxpack.target import TargetSpec
from relaxpack.tuning.chain import Chain
from relaxpack.tuning.cuda_jobs import neighbour_of
from relaxpack.tuning.measure import BUILD_SECONDS, Builder
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.worker import Worker
from relaxpack.tuning_record import Facts, Workload, digest

PREPARE_SECONDS = 300.0      # making inputs and references of the largest matrices
RUN_SECONDS = 20.0           # a kernel that is not done by then hangs
_JOBS = "relaxpack.tuning.cuda_jobs:"


class CudaMeasurer(Builder):
    """Libraries are kept until the end: a duel is between candidates that were built before. `run_seconds`: what a candidate
    may take for its check, and beyond its rounds."""

    jobs = _JOBS

    def __init__(self, target: TargetSpec, build_seconds: float = BUILD_SECONDS, run_seconds: float = RUN_SECONDS,
                 compilers: int | None = None) -> None:
        super().__init__(target, build_seconds, compilers or max(1, (os.cpu_count() or 2) // 2))
        self._runner, self._run_seconds, self._running = Worker(), run_seconds, threading.Lock()
        self._built: dict[str, str] = {}

    def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
        key = digest({"workload": workload.hash, "text": workload.text, "choice": dict(choice)})
        if key not in self._built:
            self._built[key] = super().build(workload, choice)
        return self._built[key]

    def discard(self, library: str) -> None:
        """At the end."""

    def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
        worst, where = self._run("check", self._run_seconds, library, workload, bucket, seed)
        return float(worst), str(where)

    def time(self, libraries: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int,
             seconds: float) -> list[Rounds]:
        beside = neighbour_of(workload, bucket)
        norm = None if beside is None else self.build(Workload.kernel("cuda.norm", beside), {
            "kind": "parameters", "parameters": {"dependent_launch": early_launch(self.target.arch)}})
        found: list[Rounds] = self._run("time_in_turn", self._run_seconds + seconds, list(libraries), workload, bucket, seed,
                                        rounds, seconds, norm)
        return found

    def time_in_chain(self, libraries: Sequence[str], work: Workload, chain: Chain, around: Mapping[str, Mapping[str, Any]],
                      seed: int, rounds: int, seconds: float) -> list[Rounds]:
        rule: dict[str, Any] = {"kind": "parameters", "parameters": {}}
        others = [one for key, one in chain.works().items() if key != work.hash]
        with ThreadPoolExecutor(self.parallel) as pool:
            built = list(pool.map(lambda one: self.build(one, around.get(one.hash, rule)), others))
        beside = {one.hash: library for one, library in zip(others, built, strict=True)}
        with self._running:
            self._runner.call(self.jobs + "prepare_chain", chain, seed, timeout=PREPARE_SECONDS)
            found: list[Rounds] = self._runner.call(self.jobs + "time_in_chain", list(libraries), work, chain, beside, seed,
                                                    rounds, seconds, timeout=self._run_seconds + seconds)
        return found

    def conditions(self) -> Facts:
        with self._running:
            clocks = self._runner.call(self.jobs + "clocks", timeout=self._run_seconds)
        return {"method": "CUDA graph replays in turn, inputs rotated beyond the L2 cache", **clocks}

    def close(self) -> None:
        self._runner.close()
        super().close()

    def _run(self, job: str, seconds: float, *arguments: Any) -> Any:
        workload, bucket, seed = arguments[1:4]
        with self._running:
            self._runner.call(self.jobs + "prepare", workload, bucket, seed, timeout=PREPARE_SECONDS)
            return self._runner.call(self.jobs + job, *arguments, timeout=seconds)
