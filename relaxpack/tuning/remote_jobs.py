"""What a client process of `RemoteMeasurer` does: one session with one machine behind TVM's RPC tracker a call. It is a
process of its own because a machine that has gone silent blocks its client for good; the deadline is kept outside.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.tuning.cases import CONTEXTS, Case, timing_case
from relaxpack.tuning.jobs import ENTRY, check_cases, errors
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import Workload
from tvm import rpc

REPEATS = 3      # calls of a round; the cache is flushed before each


class Machine:
    """A session: the next free machine with this key."""

    def __init__(self, host: str, port: int, key: str, session_seconds: float) -> None:
        self._session = rpc.connect_tracker(host, port).request(key, priority=1, session_timeout=session_seconds)
        self.device = self._session.cpu()

    def load(self, library: str) -> Any:
        name = os.path.basename(library)
        self._session.upload(library, name)
        return self._session.load_module(name)

    def place(self, value: Any) -> Any:
        import tvm

        return tvm.runtime.tensor(np.ascontiguousarray(value), self.device) if isinstance(value, np.ndarray) else value

    def fact(self, name: str, *arguments: Any) -> Any:
        return self._session.get_function(name)(*arguments)


def machine_facts(host: str, port: int, key: str, session_seconds: float) -> dict[str, Any]:
    """What decides whether a machine is the target: LLVM's name of its CPU, and its threads."""
    machine = Machine(host, port, key, session_seconds)
    return {"arch": str(machine.fact("target.llvm_get_system_cpu")), "threads": int(machine.fact("runtime.NumThreads"))}


def check(host: str, port: int, key: str, session_seconds: float, library: str, workload: Workload, bucket: int,
          seed: int) -> tuple[float, str]:
    """As `jobs.check`, there."""
    machine = Machine(host, port, key, session_seconds)
    call = machine.load(library)[ENTRY]
    worst, where = 0.0, ""
    for rows, case in check_cases(workload, bucket, seed):
        arguments = [machine.place(a) for a in case.sets[0]]
        call(*arguments)
        for index, share in enumerate(errors(case, [arguments[i].numpy() for i in case.outputs])):
            if share >= worst:
                worst, where = share, f"output {index}, {rows} rows"
    return worst, where


def time_in_turn(host: str, port: int, key: str, session_seconds: float, libraries: Sequence[str], workload: Workload,
                 bucket: int, seed: int, rounds: int) -> list[Rounds]:
    """`rounds` rounds of every library, in turn, on one machine; every call finds its weights and caches in memory only."""
    machine = Machine(host, port, key, session_seconds)
    case = _case(workload, bucket, seed)
    sets = [[machine.place(a) for a in one] for one in case.sets]
    evaluators = [machine.load(library).time_evaluator(
        ENTRY, machine.device, number=1, repeat=REPEATS, f_preproc="cache_flush_cpu_non_first_arg") for library in libraries]
    times: list[list[float]] = [[] for _ in libraries]
    for number in range(rounds + 1):                       # the first one warms up
        for evaluate, own in zip(evaluators, times, strict=True):
            took = [float(np.median(evaluate(*one).results)) * 1e6 for one in sets]
            if number:
                own.append(sum(took) / len(took))
    return [Rounds(tuple(own), (True,) * len(own), 0) for own in times]


def _case(workload: Workload, bucket: int, seed: int) -> Case:
    """One set of arguments, or one for each context."""
    if workload.kind == "primfunc":
        from relaxpack.tuning.primfunc_cases import primfunc_sets

        return primfunc_sets(workload, seed, 1)
    family, spec = family_and_spec(workload)
    case = timing_case(family, spec, bucket, seed, 1)
    count = len(CONTEXTS) if family.endswith("decode_attention") else 1
    return Case(case.sets[:count], case.outputs)
