"""Records and TVM: functions as workloads, traces that load or no longer do, and TVM's own two-file JSON in and out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.errors import DamagedRecordError, TuningError
from relaxpack.tuning_record import TuningRecord
from relaxpack.tvm_records import RECORDS, WORKLOADS, export_tvm, import_tvm, primfunc_workload, scheduled, workload_module
from tests.helpers.tuning_records import BROKEN_TRACE, COMPILER, CPU, SM_90, doubling, traced
from tvm import relax, s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.script import ir as I
from tvm.script import relax as R
from tvm_ffi import structural_equal

TVM_CPU = {"kind": "llvm", "mcpu": CPU["arch"], "num-cores": CPU["threads"]}


@I.ir_module
class MatmulRelu:
    @R.function
    def main(x: R.Tensor((64, 128), "float32"), w: R.Tensor((128, 128), "float32")):
        with R.dataflow():
            y = R.nn.relu(R.matmul(x, w))
            R.output(y)
        return y


def _fused() -> Any:
    return tvm.transform.Sequential([
        relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FoldConstant(),
        relax.transform.FuseOps(), relax.transform.FuseTIR()])(MatmulRelu)


def _database_of_tvm(folder: Path, *run_secs: list[float]) -> Any:
    """A database that MetaSchedule itself wrote for the fused function; one record per entry of `run_secs`."""
    folder.mkdir()
    target = tvm.target.Target(TVM_CPU)
    module = ms.relax_integration.extract_tasks(_fused(), target)[0].dispatched[0]
    database = ms.database.JSONDatabase(work_dir=str(folder))
    workload = database.commit_workload(module)
    for seconds in run_secs:
        schedule = s_tir.Schedule(module)
        loop = schedule.get_loops(schedule.get_sblock("matmul"))[0]
        schedule.parallel(schedule.split(loop, [None, 8])[0])
        database.commit_tuning_record(ms.database.TuningRecord(
            trace=schedule.trace, workload=workload, run_secs=seconds, target=target,
            args_info=ms.arg_info.ArgInfo.from_prim_func(module["main"])))
    return module


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_function_is_one_workload_whatever_its_symbol() -> None:
    func = doubling()
    one = primfunc_workload(func, "doubling")
    assert primfunc_workload(func.with_attr("global_symbol", "fused_7"), "doubling") == one
    assert structural_equal(workload_module(one)["main"], func.with_attr("global_symbol", "main"))
    with pytest.raises(DamagedRecordError, match=f"structural hash {one.hash}, not 12345"):
        workload_module(replace(one, hash="12345"))
    with pytest.raises(DamagedRecordError, match="no longer loads"):
        workload_module(replace(one, text=one.text[:-40]))


def test_the_hash_is_that_of_metaschedules_tasks(tmp_path: Path) -> None:
    _database_of_tvm(tmp_path / "db", [1e-5])
    func = next(f for _, f in _fused().functions_items() if isinstance(f, tirx.PrimFunc))
    assert primfunc_workload(func, "any").hash == _lines(tmp_path / "db" / WORKLOADS)[0][0]


def test_a_trace_applies_or_is_named() -> None:
    made = scheduled(traced()).mod["main"]
    assert "T.parallel(8)" in made.script()
    for trace, message in ((BROKEN_TRACE, "no longer loads: .*no such block"), ([[["NoSuch", [], [], []]], []], "NoSuch"),
                           ([[1], []], "no longer loads"), ([["x"], [["y"]]], "no longer loads")):
        with pytest.raises(DamagedRecordError, match=message):
            scheduled(traced(trace=trace))


def test_import_of_a_database_that_tvm_wrote(tmp_path: Path) -> None:
    module = _database_of_tvm(tmp_path / "db", [2e-5, 1e-5, 3e-5], [1e10])
    imported = import_tvm(tmp_path / "db", CPU, COMPILER, 64)
    made, = imported.records
    assert made.times_us == pytest.approx((20, 10, 30)) and made.bucket == 64 and made.workload.name == "matmul_compute"
    assert made.status == "stale" and made.check is None and "db verify" in made.reason
    assert [(found.where, found.problem) for found in imported.damaged] == [
        (f"{RECORDS}:2", "its candidate did not build or run")]
    assert structural_equal(workload_module(made.workload), module)
    assert scheduled(made).mod["main"].script().count("T.parallel") == 1
    assert TuningRecord.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert import_tvm(tmp_path / "db", CPU, COMPILER, 64).records == [made]     # importing again adds nothing new


def test_export_is_read_by_tvm_and_by_import(tmp_path: Path) -> None:
    module = _database_of_tvm(tmp_path / "db", [1e-5])
    imported = import_tvm(tmp_path / "db", CPU, COMPILER).records[0]
    good = imported.remeasured(times_us=(12.0, 13.0), conditions=imported.conditions, check=traced().check,
                               origin=traced().origin)
    count, left = export_tvm([good, traced(), imported, traced(trace=BROKEN_TRACE)], tmp_path / "out")
    assert count == 2 and ["it is stale" in one.problem or "no longer loads" in one.problem for one in left] == [True] * 2
    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "out"))
    found = database.query_tuning_record(module, tvm.target.Target(TVM_CPU), "main")
    assert [float(time) for time in found.run_secs] == pytest.approx([12e-6, 13e-6])
    schedule = s_tir.Schedule(module)
    found.trace.apply_to_schedule(schedule, remove_postproc=False)
    assert structural_equal(schedule.mod, scheduled(good).mod)
    again = import_tvm(tmp_path / "out", CPU, COMPILER).records
    assert sorted((one.workload.hash, one.choice["trace"]) for one in again) == sorted(
        (one.workload.hash, one.choice["trace"]) for one in (good, traced()))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([WORKLOADS, RECORDS])


def test_records_of_two_targets_do_not_share_a_database_of_tvm(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="2 targets cannot share"):
        export_tvm([traced(), traced(target={**CPU, "threads": 3})], tmp_path)


@pytest.mark.parametrize(("target", "problem"), [
    ({**CPU, "threads": 3}, "tuned for 2 cores, not for cpu:znver5, 3 threads"),
    ({**CPU, "arch": "znver4"}, "tuned for mcpu znver5, not for cpu:znver4"),
    (SM_90, "tuned for llvm, not for cuda:sm_90a")])
def test_records_of_another_target_are_named(tmp_path: Path, target: Any, problem: str) -> None:
    _database_of_tvm(tmp_path / "db", [1e-5])
    imported = import_tvm(tmp_path / "db", target, COMPILER)
    assert imported.records == [] and problem in imported.damaged[0].problem


def test_cut_and_damaged_lines_are_named_and_the_rest_loads(tmp_path: Path) -> None:
    _database_of_tvm(tmp_path / "db", [1e-5], [2e-5])
    workloads, records = tmp_path / "db" / WORKLOADS, tmp_path / "db" / RECORDS
    first, second = records.read_text().splitlines()
    broken = json.loads(first)
    broken[0] = 7
    no_times = json.loads(first)
    no_times[1][1] = []
    no_target = json.loads(first)
    no_target[1][2] = "llvm"
    records.write_text("\n".join([second, json.dumps(broken), "[1", json.dumps(no_times), json.dumps(no_target), "{}",
                                  json.dumps([0, []]), first[:-30]]))
    workloads.write_text(workloads.read_text() + '["1", "AAAA"]\n["2"')
    imported = import_tvm(tmp_path / "db", CPU, COMPILER)
    assert [one.median_us for one in imported.records] == pytest.approx([20.0])
    assert {found.where for found in imported.damaged} == {
        f"{WORKLOADS}:2", f"{WORKLOADS}:3", *(f"{RECORDS}:{number}" for number in range(2, 9))}
    problems = {found.where: found.problem for found in imported.damaged}
    assert "workload 7 is not in" in problems[f"{RECORDS}:2"] and "perhaps cut" in problems[f"{RECORDS}:8"]
    assert "no run times" in problems[f"{RECORDS}:4"] and "no readable target" in problems[f"{RECORDS}:5"]


def test_a_folder_without_the_two_files_says_so(tmp_path: Path) -> None:
    (tmp_path / WORKLOADS).touch()
    with pytest.raises(TuningError, match=f"no .*{RECORDS}: a database of TVM is a folder with"):
        import_tvm(tmp_path, CPU, COMPILER)
