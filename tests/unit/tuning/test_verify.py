"""What a verification makes of a record, with a measurer that only pretends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from relaxpack.fingerprint import compiler_fingerprint
from relaxpack.tuning.rounds import Rounds
from relaxpack.tuning.verify import target_of, verify
from relaxpack.tuning.worker import CandidateFailed
from relaxpack.tuning_record import Origin, TuningRecord, Workload
from tests.helpers.tuning_records import COMPILER, CPU, record

HERE = compiler_fingerprint("cpu")


class Pretending:
    """`own` and `rule` microseconds; `error` as a share of what is allowed."""

    def __init__(self, own: float = 10.0, rule: float = 20.0, error: float = 0.5, fails: str = "",
                 busy: bool = False) -> None:
        self.own, self.rule, self.error, self.fails, self.busy = own, rule, error, fails, busy
        self.parallel, self.kept = 1, 0

    def build(self, workload: Workload, choice: Mapping[str, Any]) -> str:
        if self.fails == "build":
            raise CandidateFailed("TuningError: no such parameter")
        self.kept += 1
        return "own" if choice["parameters"] else "rule"

    def check(self, library: str, workload: Workload, bucket: int, seed: int) -> tuple[float, str]:
        if self.fails == "run":
            raise CandidateFailed("crashed (SIGSEGV)")
        return self.error, "output 0, 4 rows"

    def time(self, libraries: Sequence[str], workload: Workload, bucket: int, seed: int, rounds: int,
             seconds: float) -> list[Rounds]:
        return [Rounds(tuple(getattr(self, library) * (1 + 0.001 * (i % 3)) for i in range(rounds)),
                       (not self.busy,) * rounds, 1 << 26) for library in libraries]

    def conditions(self) -> Mapping[str, Any]:
        return {"method": "pretended"}

    def discard(self, library: str) -> None:
        self.kept -= 1

    def close(self) -> None:
        pass


def here(**changes: Any) -> TuningRecord:
    return record(us=10.0, compiler=HERE, **changes)


def test_a_true_record_is_good() -> None:
    measurer = Pretending()
    assert verify(here(), measurer=measurer) == ("good", "", None)
    assert verify(here(), retime=False, measurer=Pretending(own=1000.0)) == ("good", "", None)
    assert measurer.kept == 0


@pytest.mark.parametrize(("measurer", "status", "reason"), [
    (Pretending(error=3.0), "failed", "wrong numbers: 3 times the allowed error (output 0, 4 rows)"),
    (Pretending(error=float("inf")), "failed", "wrong numbers: inf times"),
    (Pretending(error=float("nan")), "failed", "wrong numbers: nan times"),
    (Pretending(fails="build"), "failed", "does not build: TuningError: no such parameter"),
    (Pretending(fails="run"), "failed", "does not run: crashed (SIGSEGV)"),
    (Pretending(own=25.0), "stale", "slower than the untuned kernel"),
    (Pretending(own=18.0), "stale", "time not reproduced: 10 us, then 18.02 us"),
    (Pretending(own=18.0, rule=40.0), "good", "the untuned kernel takes 2 times as long as then, too"),
    (Pretending(own=18.0, rule=28.0), "stale", "time not reproduced"),      # that one lost 1.4, this one 1.8
    (Pretending(own=60.0, rule=120.0), "stale", "time not reproduced"),     # no machine loses that much
    (Pretending(own=18.0, busy=True), "good", "the machine is too busy to measure")])
def test_what_is_not_true_is_marked_with_the_reason(measurer: Pretending, status: str, reason: str) -> None:
    verdict = verify(here(), measurer=measurer)
    assert verdict.status == status and reason in verdict.reason and verdict.renewed is None
    assert measurer.kept == 0


def test_a_record_of_another_compiler_is_brought_over_with_a_time_of_its_own() -> None:
    old = record(us=100.0, compiler={**COMPILER, "llvm": 1})
    verdict = verify(old, measurer=Pretending(own=60.0, rule=70.0))
    assert verdict.status == "good" and verdict.renewed is not None
    new = verdict.renewed
    assert new.compiler == HERE and new.origin.parent == old.id and new.choice == old.choice
    assert new.median_us == pytest.approx(60, rel=0.01) and new.baseline_us == pytest.approx(70, rel=0.01)
    assert new.check is not None and new.status == "good"


def test_an_imported_record_gets_a_check_and_a_time_here() -> None:
    origin = Origin("unknown", "unknown", "import of TVM JSON", 0)
    imported = here(origin=origin, check=None, status="stale", reason="imported")
    verdict = verify(imported, measurer=Pretending(own=1.0))
    assert verdict.renewed is not None and verdict.renewed.check is not None


def test_the_target_of_a_record() -> None:
    assert target_of(record(target=CPU)).to_json() == {"kind": "cpu", "arch": "znver5", "features": ["avx2", "fma"]}
    assert target_of(record(target=CPU)).threads == 2
