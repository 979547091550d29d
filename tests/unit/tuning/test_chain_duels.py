"""Kernels of a decode step, judged in a chain with those around them as records have them: with a measurer that only
pretends, and real matmuls of two layers as the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaxpack.dist.tuning.store import open_store
from relaxpack.kernel_generations import for_workload
from relaxpack.kernel_spec import LinearSpec
from relaxpack.schedules.tuning.family import Part
from relaxpack.schedules.tuning.space import ListedSpace
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.chain import Chain, ChainCall
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.session import Limits, Outcome, TuningSession
from relaxpack.tuning.specs import as_asked, family_and_spec
from relaxpack.tuning.surroundings import choices_around
from relaxpack.tuning.tasks import Task
from relaxpack.tuning.trial_log import TrialLog
from relaxpack.tuning_record import TuningRecord, Workload
from relaxpack.weight_format import FORMATS
from tests.helpers.tuning_records import COMPILER, SM_90, record

HOPPER = parse_target("cuda:sm_90a")
FAMILIES = families_for(HOPPER)
FAMILY = FAMILIES["cuda.linear"]
ROWS = 8


def work_of(n: int, k: int, **more: Any) -> Workload:
    spec = LinearSpec(n, k, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=ROWS, **more)
    return as_asked("cuda.linear", spec) or FAMILY.workload(spec)


UP, DOWN = work_of(8192, 2048), work_of(2048, 4096)
CHAIN = Chain("decode_8", ROWS, tuple(call for layer in range(4) for call in (
    ChainCall(UP, (("x", f"x{layer}"), ("weight", f"u{layer}"), ("y", f"h{layer}")), layer),
    ChainCall(DOWN, (("x", f"h{layer}"), ("weight", f"d{layer}"), ("y", f"x{layer + 1}")), layer))))


def choices_of(work: Workload, count: int = 3) -> list[dict[str, Any]]:
    part = FAMILY.part(family_and_spec(work)[1], ROWS)
    assert part is not None
    return [one for one, _ in zip(part.space.all(), range(count), strict=False)]


def task_of(work: Workload, weight: float) -> Task:
    choices = tuple(choices_of(work))
    return Task(f"k{weight}", work, ROWS, weight, 1.0, Part(ROWS, ROWS, ListedSpace(choices, {})), "", chain=CHAIN)


class Layers:
    """A layer takes what `us(up, down)` says of the places of both choices among `choices_of`, 0 for the rule's."""

    parallel = 1

    def __init__(self, us: Any) -> None:
        self.us = us
        self.judged: list[tuple[str, dict[str, int]]] = []

    def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
        return str(self._place(workload, choice))

    @staticmethod
    def _place(workload: Workload, choice: Mapping[str, Any]) -> int:
        return [{}, *choices_of(workload)].index(dict(choice["parameters"]))

    def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
        return 0.5, ""

    def time(self, libraries: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int,
             seconds: float) -> list[Rounds]:
        return [self._rounds(20.0 - int(library), rounds) for library in libraries]

    def time_in_chain(self, libraries: Sequence[str], work: Workload, chain: Chain, around: Mapping[str, Mapping[str, Any]],
                      seed: int, rounds: int, seconds: float) -> list[Rounds]:
        others = {key: self._place(chain.works()[key], choice) for key, choice in around.items()}
        self.judged.append((work.hash, others))
        layers = [{**others, work.hash: int(library)} for library in libraries]
        return [self._rounds(self.us(one.get(UP.hash, 0), one.get(DOWN.hash, 0)), rounds) for one in layers]

    @staticmethod
    def _rounds(us: float, count: int) -> Rounds:
        return Rounds(tuple(us * (1 + 0.0003 * (i % 3)) for i in range(count)), (True,) * count, 1 << 28)

    def conditions(self) -> Mapping[str, Any]:
        return {"method": "pretended"}

    def discard(self, library: str) -> None: ...
    def close(self) -> None: ...


def tune(folder: Path, measurer: Layers, *tasks: Task) -> list[Outcome]:
    with open_store(str(folder / "t.sqlite")) as store:
        return TuningSession(tasks, HOPPER, SM_90, COMPILER, measurer, store, TrialLog(folder / "log"),
                             Limits(trials=20)).run()


def stored(folder: Path) -> dict[str, TuningRecord]:
    with open_store(str(folder / "t.sqlite")) as store:
        return {one.workload.hash: one for one in store.all()}


def test_winners_are_judged_together(tmp_path: Path) -> None:
    """Each of two gains 3 % alone, both together lose: whoever comes first stays alone."""
    gains = {(0, 0): 100.0, (1, 0): 97.0, (0, 1): 97.0, (1, 1): 103.0}
    measurer = Layers(lambda up, down: gains.get((up, down), 110.0))
    first, second = tune(tmp_path, measurer, task_of(UP, 0.7), task_of(DOWN, 0.3))
    assert (first.state, second.state) == ("improved", "kept")
    assert measurer.judged == [(UP.hash, {}), (DOWN.hash, {UP.hash: 1})]
    found = stored(tmp_path)
    assert found[UP.hash].choice["parameters"] == choices_of(UP)[0] and found[DOWN.hash].choice["parameters"] == {}
    assert "1 of these in each: 100.030 us" in found[UP.hash].conditions["chain"]
    assert "in each, records for 1 of the others: 97.029 us" in found[DOWN.hash].conditions["chain"]


def test_what_wins_only_beside_another_winner_is_found(tmp_path: Path) -> None:
    measurer = Layers(lambda up, down: 100.0 - 2 * (up == 2) - 4 * (up == 2 and down == 3) + 5 * (up == 0 and down > 0))
    assert [one.state for one in tune(tmp_path, measurer, task_of(UP, 0.7), task_of(DOWN, 0.3))] == ["improved", "improved"]
    assert stored(tmp_path)[DOWN.hash].choice["parameters"] == choices_of(DOWN)[2]


def test_records_of_kernels_that_are_not_tuned_now_stand_around_too(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "t.sqlite")) as store:
        store.add(record(workload=DOWN, bucket=ROWS, target=SM_90, compiler=for_workload(COMPILER, DOWN),
                         parameters=choices_of(DOWN)[1]))
    measurer = Layers(lambda up, down: 100.0 - up)
    tune(tmp_path, measurer, task_of(UP, 1.0))
    assert measurer.judged == [(UP.hash, {DOWN.hash: 2})]


@pytest.mark.parametrize("why", ["the rule", "a kernel without the norm", "parameters of another time", "a trace"])
def test_what_a_build_would_not_take_is_not_around(why: str) -> None:
    normed = work_of(8192, 2048, norm_epsilon=1e-5)
    chain = Chain("decode_8", ROWS, tuple(replace(call, work=normed if call.work == UP else DOWN) for call in CHAIN.calls))
    few = next(one for one in FAMILY.part(family_and_spec(UP)[1], ROWS).space.all() if one["family"] == "gemm_few")
    parameters = {"the rule": {}, "a kernel without the norm": few,
                  "parameters of another time": {"family": "gemm_rows", "warps": 99}}
    choice: dict[str, Any] = {"kind": "trace", "trace": [[], []]}
    if why in parameters:
        choice = {"kind": "parameters", "parameters": parameters[why]}
    asked: list[tuple[str, int]] = []

    def find(workload: Workload, bucket: int) -> TuningRecord | None:
        asked.append((workload.hash, bucket))
        return record(workload=workload, choice=choice)

    assert choices_around(chain, DOWN.hash, FAMILIES, find) == {}
    assert asked == [(UP.hash, ROWS)], "the record of work with a norm is that of the work without"
    inside = next(iter(FAMILY.part(family_and_spec(normed)[1], ROWS).space.all()))
    choice = {"kind": "parameters", "parameters": inside}
    assert choices_around(chain, DOWN.hash, FAMILIES, find) == {normed.hash: choice}
