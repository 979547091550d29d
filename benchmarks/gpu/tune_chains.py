"""The GPU machine's half of judging decode kernels in chains of whole layers: finalists one by one beside the rule, then the
winners of a chain together. What is run is `relaxpack.tuning.cuda_chain`, as in `relaxpack tune`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relaxpack.tuning.chain import CHAIN_ROUNDS, Chain
from relaxpack.tuning.cuda_chain import PlacedChain, Timed, Weights, time_chains
from relaxpack.tuning.cuda_jobs import ROTATE
from relaxpack.tuning.cuda_stages import Stages

SEED, SECONDS = 1, 10.0
Entry = dict[str, Any]


class Chains:
    """`chains` by name as plain values; `kernels`: how the rule's are called, by the hash of their workload; `gpu` opens it;
    `function`: what a name stands for; `at(task, candidate)`: told before something runs for the first time; `broken`: pairs
    of that kind that ended a process."""

    def __init__(self, chains: Mapping[str, Any], kernels: Mapping[str, Any], gpu: Callable[[], Any],
                 function: Callable[[str], Any], at: Callable[[str, int], None], broken: frozenset[tuple[str, int]]) -> None:
        self._chains, self._kernels, self._open, self._function = chains, kernels, gpu, function
        self._at, self._broken = at, broken
        self._gpu: Any = None
        self._weights = Weights()
        self._placed: tuple[str, PlacedChain] | None = None

    def judge(self, task: Entry, kept: Sequence[Entry]) -> dict[str, Any]:
        """Adds times of a layer to `kept`, the rule's entry first; what else is to be noted about the task."""
        name, work = task["chain"], task["work"]
        numbers = [0, 0, *(entry["number"] for entry in kept[1:])]           # the rule twice
        try:
            timed = self._timed(name, [{work: task["candidates"][number]} for number in numbers],
                                [(task["name"], number) if number else (name, 0) for number in numbers])
        except Exception as error:      # a chain that cannot run must not hide the rest
            if fatal(error):
                raise
            return {"chain_failure": f"{type(error).__name__}: {error}"[:300]}
        for entry, one in zip(kept, [timed[0], *timed[2:]], strict=True):
            if math.isinf(one.times_us[0]):
                entry["chain_failure"] = f"results in the chain differ by {one.difference:.2g}"
            else:
                entry |= {"chain_us": _rounded(one), "chain_difference": one.difference}
        return {"twin_chain_us": _rounded(timed[1]), "calls": Chain.from_json(self._chains[name]).calls_of(work)}

    def together(self, name: str, winners: Mapping[str, Entry]) -> dict[str, Any]:
        """A layer with all winners (candidates by the hash of their workload) against the rule's."""
        try:
            timed = self._timed(name, [{}, {}, winners], [(name, 0), (name, 0), (name, 1)])
        except Exception as error:
            if fatal(error):
                raise
            return {"failure": f"{type(error).__name__}: {error}"[:300]}
        if math.isinf(timed[2].times_us[0]):
            return {"failure": f"results differ by {timed[2].difference:.2g}"}
        return {key: _rounded(one) for key, one in zip(("rule_us", "twin_us", "winners_us"), timed, strict=True)}

    def _timed(self, name: str, changes: Sequence[Mapping[str, Entry]], places: Sequence[tuple[str, int]]) -> list[Timed]:
        """`changes`: candidates in the place of the rule's kernels; `places`: what ends the process if one of them does."""
        if broken := self._broken & set(places):
            raise RuntimeError(f"ended a process: {sorted(broken)}")
        self._at(name, 0)
        if self._gpu is None:
            self._gpu = self._open()
        if self._placed is None or self._placed[0] != name:
            self._placed = None                                              # its memory first
            chain = Chain.from_json(self._chains[name])
            self._placed = name, PlacedChain(self._gpu, chain, SEED, ROTATE * self._gpu.l2_bytes(), self._weights)
        placed = self._placed[1]
        around = {key: self._stages(self._kernels[key]) for key in placed.chain.works()}
        chains = [{**around, **{key: self._stages(one) for key, one in change.items()}} for change in changes]
        return time_chains(self._gpu, placed, chains, CHAIN_ROUNDS, SECONDS, lambda index: self._at(*places[index]))

    def _stages(self, told: Mapping[str, Any]) -> Stages:
        return Stages(self._gpu, self._function, told.get("in_chain", told))


def _rounded(one: Timed) -> list[float]:
    return [round(us, 4) for us in one.times_us]


def fatal(error: BaseException) -> bool:
    """Nothing runs in this process any more."""
    text = str(error).lower()
    return any(word in text for word in ("illegal", "unspecified launch", "misaligned", "cudaerrorassert", "sticky"))
