"""The records of CPUs that come with relaxpack: readable, right on a CPU that has their instructions, used where they belong
and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relaxpack.compile import BuildOptions
from relaxpack.dist.tuning.layers import open_source
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.target import TargetSpec, host_cpu_features
from relaxpack.tuning.jobs import check, compile_candidate
from relaxpack.tuning.lookup import SEED, DatabaseLookup
from relaxpack.tuning.verify import target_of
from relaxpack.tuning_record import TuningRecord

RECORDS = sorted((record for record in open_source(str(SEED)).all() if record.target["kind"] == "cpu"),
                 key=lambda record: (record.workload.name, record.bucket or 0))


def test_every_record_is_good_and_complete() -> None:
    assert RECORDS
    for record in RECORDS:
        assert record.status == "good" and record.check is not None and record.baseline_us is not None
        assert record.conditions["repeats"] == len(record.times_us) >= 8, record.workload.name
        assert record.median_us <= record.baseline_us * 1.05, record.workload.name


def _runnable(record: TuningRecord) -> TargetSpec:
    """The record's target by its instructions, whatever the CPU is called."""
    target = target_of(record)
    if target.kind != "cpu" or set(target.features) - set(host_cpu_features()):
        pytest.skip("this machine cannot run it")
    wide = "cascadelake" if "avx512vnni" in target.features else "x86-64-v4"
    return replace(target, arch=wide if "avx512f" in target.features else "x86-64-v3", threads=1)


@pytest.mark.parametrize("record", [r for r in RECORDS if r.choice.get("parameters")], ids=lambda r: r.workload.name)
def test_what_differs_from_the_rule_is_right(record: TuningRecord, tmp_path: Path) -> None:
    if "49152" in record.workload.name:
        pytest.skip("the head's reference takes long; its kernel is the same as that of the other shapes")
    target, path = _runnable(record), str(tmp_path / "candidate.so")
    compile_candidate(record.workload, dict(record.choice), target, path)
    worst, where = check(path, record.workload, record.bucket or 1, 0)
    assert worst <= 1, where


def test_another_cpu_finds_none_and_hears_why() -> None:
    from relaxpack.compile.kernels import tuned_kernels
    from relaxpack.relax_models.export import BuildLimits
    from relaxpack.tuning.specs import family_and_spec

    record = next(r for r in RECORDS if "linear" in r.workload.name)
    _, spec = family_and_spec(record.workload)
    for threads, expected in ((target_of(record).threads, "tuned"), (target_of(record).threads + 1, "rule")):
        target = replace(target_of(record), threads=threads)
        with DatabaseLookup.open(["seed"], target) as lookup:
            lookup.compiler = record.compiler            # of whoever runs this test, LLVM may be another
            limits = BuildLimits(2048, BuildOptions().max_batch, BuildOptions().prefill_chunk)
            kernel = CpuKernels(target, tuned_kernels(lookup, target, limits)).linear(spec)
            assert kernel.source.startswith(expected)
            reasons = {rejected.reason for rejected in lookup.rejected}
        assert (reasons == set()) == (expected == "tuned")
        assert all(reason.startswith("another target: threads ") for reason in reasons), reasons
