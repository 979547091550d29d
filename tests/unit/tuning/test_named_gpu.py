"""`--gpu NAME`: a name completes to the facts of the one set of records that has it, else an error says what there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from relaxpack.dist.tuning.store import open_store
from relaxpack.errors import UsageError
from relaxpack.target import TargetSpec
from relaxpack.tuning.lookup import DatabaseLookup
from relaxpack.tuning.named_gpu import facts_of_gpu
from relaxpack.tuning_record import Facts
from tests.helpers.tuning_records import CPU, SM_80, SM_90, record

H200: Facts = {**SM_90, "name": "NVIDIA H200"}
H200_NVL: Facts = {**SM_90, "name": "NVIDIA H200 NVL"}
H100: Facts = {**SM_90, "name": "NVIDIA H100 80GB HBM3", "memory_gib": 80}
HOPPER, AMPERE, HOST = TargetSpec("cuda", "sm_90a"), TargetSpec("cuda", "sm_80"), TargetSpec("cpu", "znver5")


def database(folder: Path, machines: Sequence[Facts]) -> str:
    location = str(folder / "tuning.sqlite")
    with open_store(location) as store:
        store.add_all([record(target=facts) for facts in machines])
    return location


@pytest.mark.parametrize("name", ["NVIDIA H200", "nvidia h200"])
def test_the_whole_name_is_that_gpu(tmp_path: Path, name: str) -> None:
    where = database(tmp_path, [H200, H200_NVL, H100, SM_80, CPU])
    assert facts_of_gpu(name, [HOST, HOPPER], [where]) == {"cuda:sm_90a": H200}


def test_a_part_of_the_name_is_enough_where_one_gpu_has_it(tmp_path: Path) -> None:
    assert facts_of_gpu("H100", [HOPPER], [database(tmp_path, [H200, H100])]) == {"cuda:sm_90a": H100}


def test_a_part_that_several_have_is_refused(tmp_path: Path) -> None:
    where = database(tmp_path, [H200, H100])
    with pytest.raises(UsageError, match="may be any of cuda:sm_90a, NVIDIA H100.*; cuda:sm_90a, NVIDIA H200, 132 SMs"):
        facts_of_gpu("NVIDIA", [HOPPER], [where])


def test_one_name_with_different_facts_is_refused(tmp_path: Path) -> None:
    where = database(tmp_path, [H200, {**H200, "memory_gib": 141}])
    with pytest.raises(UsageError, match="140 GiB; .*141 GiB"):
        facts_of_gpu("NVIDIA H200", [HOPPER], [where])


def test_an_unknown_name_hears_what_there_is(tmp_path: Path) -> None:
    where = database(tmp_path, [H200, CPU])
    with pytest.raises(UsageError, match="no records of such a GPU for sm_90a in .*sqlite; it has .*NVIDIA H200, 132 SMs"):
        facts_of_gpu("B200", [HOPPER], [where])
    with pytest.raises(UsageError, match="for sm_80 in .*; it has cuda:sm_90a, NVIDIA H200"):
        facts_of_gpu("NVIDIA H200", [AMPERE], [where])


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="needs the name of a GPU"):
        facts_of_gpu(name, [HOPPER], [database(tmp_path, [H200])])


def test_records_of_cpus_alone_are_of_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="records of no GPU at all"):
        facts_of_gpu("H200", [HOPPER], [database(tmp_path, [CPU])])


def test_records_that_failed_say_nothing(tmp_path: Path) -> None:
    location = str(tmp_path / "tuning.sqlite")
    with open_store(location) as store:
        store.add(replace(record(target=H200), status="failed", reason="wrong numbers"))
    with pytest.raises(UsageError, match="records of no GPU at all"):
        facts_of_gpu("NVIDIA H200", [HOPPER], [location])


def test_each_target_gets_the_gpu_of_its_architecture(tmp_path: Path) -> None:
    where = database(tmp_path, [H200, SM_80])
    assert facts_of_gpu("NVIDIA H200", [AMPERE, HOPPER], [where]) == {"cuda:sm_90a": H200}


def test_it_needs_a_gpu_and_a_database(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no GPU is among the targets"):
        facts_of_gpu("H200", [HOST], [database(tmp_path, [H200])])
    with pytest.raises(UsageError, match="name a database"):
        facts_of_gpu("H200", [HOPPER], [])


def test_without_the_name_the_reason_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(target=H200)
    unknown = {**dict.fromkeys(H200), "kind": "cuda", "arch": "sm_90a"}
    monkeypatch.setattr("relaxpack.tuning.lookup.target_fingerprint", lambda target, must_be_here: unknown)
    monkeypatch.setattr("relaxpack.tuning.lookup.compiler_fingerprint", lambda kind: found.compiler)
    location = database(tmp_path, [H200])
    with DatabaseLookup.open([location], HOPPER) as lookup:
        assert lookup.find(found.workload, [4], "gemv") is None
        rejected, = lookup.rejected
    assert rejected.reason.endswith('no such GPU is here: --gpu "NVIDIA H200" says it is meant')
    with DatabaseLookup.open([location], HOPPER, facts_of_gpu("H200", [HOPPER], [location])["cuda:sm_90a"]) as lookup:
        assert lookup.find(found.workload, [4], "gemv") is not None and lookup.rejected == []
