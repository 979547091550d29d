"""`RemoteMeasurer`: candidates are built here and run on the machines of TVM's own RPC tracker, as many at once as the
tracker has machines of the key.

A machine that dies loses nothing: what it was doing is done again on another one. A candidate is to blame only if it
fails twice, each time in a session of its own.
"""

from __future__ import annotations

import queue
import socket
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.errors import EnvironmentProblem, UsageError
from relaxpack.target import TargetSpec
from relaxpack.tuning.measure import BUILD_SECONDS, CHECK_SECONDS, Builder
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.worker import CandidateFailed, Worker
from relaxpack.tuning_record import Facts, Workload

_JOBS = "relaxpack.tuning.remote_jobs:"
ATTEMPTS = 2
CONNECT_SECONDS = 10.0
WAIT_SECONDS = 60.0     # for a free machine, on top of the work


class RemoteMeasurer(Builder):
    def __init__(self, target: TargetSpec, tracker: str, key: str, build_seconds: float = BUILD_SECONDS,
                 run_seconds: float = CHECK_SECONDS, wait_seconds: float = WAIT_SECONDS) -> None:
        host, _, port = tracker.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"--tracker {tracker!r}: expected HOST:PORT, for example 10.0.0.5:9190")
        if target.kind != "cpu":
            raise UsageError(f"--tracker with target {target.name}: kernels for GPUs are tuned on the machine that has one")
        self._where, self._run_seconds, self._wait = (host, int(port), key), run_seconds, wait_seconds
        machines = _machines(host, int(port), key)
        super().__init__(target, build_seconds)
        self.parallel = machines         # candidates under way; they are built one after the other
        self._clients: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all = [Worker() for _ in range(self.parallel)]
        for worker in self._all:
            self._clients.put(worker)
        try:
            self._check_machine()
        except BaseException:
            self.close()
            raise

    def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
        worst, where = self._call("check", self._run_seconds, library, workload, bucket, seed)
        return float(worst), str(where)

    def time(self, libraries: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int,
             seconds: float) -> list[Rounds]:
        found: list[Rounds] = self._call("time_in_turn", self._run_seconds + seconds, list(libraries), workload, bucket,
                                         seed, rounds)
        return found

    def conditions(self) -> Facts:
        return {"method": "RPC, cache flushed before every call", "threads": self.target.threads}

    def close(self) -> None:
        for worker in self._all:
            worker.close()
        super().close()

    def _call(self, function: str, seconds: float, *arguments: Any) -> Any:
        worker = self._clients.get()
        try:
            for attempt in range(ATTEMPTS):
                try:
                    return worker.call(_JOBS + function, *self._where, seconds, *arguments, timeout=seconds + self._wait)
                except CandidateFailed:
                    if attempt == ATTEMPTS - 1:
                        raise
        finally:
            self._clients.put(worker)

    def _check_machine(self) -> None:
        """The machines must be what the records will say they are."""
        try:
            facts = self._call("machine_facts", self._run_seconds)
        except CandidateFailed as error:
            raise EnvironmentProblem(f"no machine with key {self._where[2]!r} answers: {error}") from None
        here = {"arch": self.target.arch, "threads": self.target.threads}
        if self.target.arch.startswith("x86-64"):      # a level, not a CPU: any machine that runs it
            facts["arch"] = self.target.arch
        if facts != here:
            wrong = ", ".join(f"{name} {facts[name]} there, {here[name]} in the target" for name in here
                              if facts[name] != here[name])
            raise UsageError(f"the machines with key {self._where[2]!r} are not the target {self.target.name}: {wrong}; "
                             "name theirs with --target, and set RELAXPACK_NUM_THREADS here and TVM_NUM_THREADS there alike")


def _machines(host: str, port: int, key: str) -> int:
    """How many machines with this key the tracker has, busy ones included."""
    from tvm import rpc

    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()   # TVM's client would try for a minute
        with closing(rpc.connect_tracker(host, port)) as tracker:
            summary = tracker.summary()
    except (OSError, RuntimeError) as error:
        raise EnvironmentProblem(f"no RPC tracker answers at {host}:{port}: {error}; start one with "
                                 "`python -m tvm.exec.rpc_tracker`") from None
    found = sum(str(server["key"]) == f"server:{key}" for server in summary["server_info"])
    if not found:
        known = sorted({str(server["key"]).removeprefix("server:") for server in summary["server_info"]})
        raise EnvironmentProblem(f"the tracker at {host}:{port} has no machine with key {key!r}; it has: "
                                 f"{', '.join(known) or 'none'}. On a machine that may run candidates, start "
                                 f"`python -m tvm.exec.rpc_server --tracker {host}:{port} --key {key}`")
    return found
