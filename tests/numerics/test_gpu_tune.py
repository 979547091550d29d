"""What `benchmarks/gpu/tune.py` makes of a run on a GPU: records of the winners, the rule's where nothing is faster."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.tune import candidates, records, spec_of
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.schedules.tuning.tuned import TunedKernels
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for, family_for
from tests.helpers.tuning_records import SM_90

COMPILER = {"apache-tvm": "0.27.0.post1", "kernels": 1, "cuda": "13.0"}
HOPPER = parse_target("cuda:sm_90a")


def task(times: dict[int, float], broken: tuple[int, ...] = ()) -> dict[str, Any]:
    """Candidates of 8b.o at 16 rows: `times` of some of them, 100 us else."""
    found = []
    for index, choice in enumerate(candidates("8b.o", 16)):
        us = times.get(index, 100.0)
        entry = {"choice": choice, "error": 1e-3, "ok": index not in broken}
        found.append({**entry, "times_us": [us * (1 + 0.001 * (i % 3)) for i in range(15)]})
    return {"linear": "8b.o", "rows": 16, "rotated_bytes": 320 << 20, "candidates": found}


def made(*tasks: dict[str, Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    return records({"target": dict(SM_90), "host": "gpu", "created": "2026-11-29T20:15:00Z", "tasks": list(tasks)}, COMPILER)


def test_the_fastest_right_kernel_becomes_a_record_that_a_build_uses() -> None:
    (one,), (row,) = made(task({3: 70.0, 5: 40.0}, broken=(5,)))
    choice = candidates("8b.o", 16)[3]
    assert one.choice == {"kind": "parameters", "parameters": choice} and one.bucket == 16
    assert one.median_us == pytest.approx(70, rel=0.01) and one.baseline_us == pytest.approx(100, rel=0.01)
    assert row["failed"] == 1 and dict(one.target) == dict(SM_90)

    class Found:
        def find(self, workload: Any, buckets: Any, kernel: str) -> Any:
            return one if workload.text == one.workload.text and one.bucket in buckets else None

        def use(self, record: Any, kernel: str) -> None:
            pass

        def reject(self, record: Any, kernel: str, reason: str) -> None:
            raise AssertionError(reason)

    known = families_for(HOPPER)
    tuned = TunedKernels(Found(), lambda operation, spec: family_for(known, operation, spec), {"decode": 64, "prefill": 512})
    kernel = CudaKernels(HOPPER, tuned=tuned).linear(spec_of("8b.o", 16))
    assert kernel.source == f"tuned:{one.id[:16]}"
    assert kernel.stages[0].name == known["cuda.linear"].make(spec_of("8b.o", 16), choice).stages[0].name


def test_a_library_may_win() -> None:
    index = next(i for i, choice in enumerate(candidates("8b.o", 16)) if "library" in choice)
    (one,), _ = made(task({index: 50.0}))
    assert one.choice == {"kind": "library", "library": "cublaslt", "parameters": {}}


def test_within_the_noise_the_rule_stands() -> None:
    (one,), (row,) = made(task({3: 99.5}))
    assert one.choice == {"kind": "parameters", "parameters": {}} and row["result"] == "not 1% faster"


def test_without_the_rule_there_is_nothing_to_compare_with() -> None:
    kept, (row,) = made(task({3: 50.0}, broken=(0,)))
    assert kept == [] and "the rule's kernel failed" in row["result"]
