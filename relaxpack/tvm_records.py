"""Between tuning records and TVM's objects: a function as a workload, a record's trace on a schedule, and TVM's own
two-file JSON database in and out. Measures nothing and stores nothing; imports TVM where a function needs it.

TVM's files: `database_workload.json` has lines [structural hash, base64 module], `database_tuning_record.json` lines
[workload index, [trace, seconds, target, arguments]]. They know neither compiler nor numeric check, so what is imported is
"stale" until `relaxpack db verify` has measured it here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from relaxpack.errors import DamagedRecordError, TuningError
from relaxpack.fingerprint import described
from relaxpack.tuning_record import Damaged, Facts, Origin, TuningRecord, Workload

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
IMPORTED = "imported from TVM's JSON, which has no numeric check and no compiler version; `relaxpack db verify` measures it"
_FAILED_SECONDS = 1e9    # MetaSchedule writes 1e10 for a candidate that did not run


class Imported(NamedTuple):
    records: list[TuningRecord]
    damaged: list[Damaged]


def primfunc_workload(func: Any, name: str) -> Workload:
    """The workload of an unscheduled PrimFunc of constant shapes, whatever its global symbol. Hash and text are those of
    MetaSchedule's own database."""
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from tvm.s_tir.meta_schedule.database import Workload as TvmWorkload

    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    hashed, text = TvmWorkload(module).as_json()
    return Workload("primfunc", name, str(hashed), str(text))


def workload_module(workload: Workload) -> Any:
    """The IRModule of a "primfunc" workload. Raises DamagedRecordError where it does not load or has another hash."""
    import relaxpack.tvm_setup  # noqa: F401
    import tvm_ffi
    from tvm.s_tir.meta_schedule.database import Workload as TvmWorkload

    if workload.kind != "primfunc":
        raise DamagedRecordError(f"workload {workload.name} is a {workload.kind}, not a TVM function")
    try:
        module = TvmWorkload.from_json([workload.hash, workload.text]).mod
    except Exception as error:   # TVM's errors have no common base
        raise DamagedRecordError(f"its function no longer loads: {_last_line(error)}") from None
    found = str(tvm_ffi.structural_hash(module))
    if found != workload.hash:
        raise DamagedRecordError(f"its function has the structural hash {found}, not {workload.hash}")
    return module


def scheduled(record: TuningRecord) -> Any:
    """A Schedule of the record's function with its trace applied. Raises DamagedRecordError where it no longer loads."""
    if record.choice["kind"] != "trace":
        raise DamagedRecordError(f"record {record.id[:16]} holds {record.choice['kind']}, not a trace")
    return apply_trace(record.workload, record.choice["trace"])


def apply_trace(workload: Workload, trace: Any) -> Any:
    """A Schedule of the workload's function with a trace (TVM's JSON form) applied. Raises DamagedRecordError."""
    import relaxpack.tvm_setup  # noqa: F401
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(workload_module(workload))
    try:
        Trace.apply_json_to_schedule(trace, schedule)
    except Exception as error:
        raise DamagedRecordError(f"its trace no longer loads: {_last_line(error)}") from None
    return schedule


def import_tvm(folder: Path, target: Facts, compiler: Facts, bucket: int | None = None) -> Imported:
    """Records of a folder with TVM's two files, as "stale" records of `target` and `compiler`. Lines that are cut, damaged,
    of another target, or that never ran are named and left out; the rest load."""
    paths = [folder / name for name in (WORKLOADS, RECORDS)]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise TuningError(f"no {' and no '.join(missing)}: a database of TVM is a folder with {WORKLOADS} and {RECORDS}")
    damaged: list[Damaged] = []
    workloads: dict[int, Workload] = {}
    for index, (where, line) in enumerate(_lines(paths[0])):
        try:
            hashed, text = _parsed(line, 2)
            workload = Workload("primfunc", "tvm", str(hashed), text)
            module = workload_module(workload)
            workloads[index] = Workload("primfunc", _name(module), workload.hash, text)
        except DamagedRecordError as error:
            damaged.append(Damaged(where, str(error)))
    origin = Origin("unknown", "unknown", "import of TVM JSON", 0)   # importing again, anywhere, gives the same records
    records = {}
    for where, line in _lines(paths[1]):
        try:
            index, found = _parsed(line, 2)
            if not isinstance(index, int) or index not in workloads:
                raise DamagedRecordError(f"its workload {index} is not in {WORKLOADS}, or is damaged")
            trace, seconds, tvm_target, _arguments = found if isinstance(found, list) and len(found) == 4 else [None] * 4
            if problem := _foreign(tvm_target, target):
                raise DamagedRecordError(problem)
            times = _times(seconds)
            record = TuningRecord(
                workloads[index], bucket, target, compiler, {"kind": "trace", "trace": trace}, times,
                {"repeats": len(times), "rotated_bytes": None}, None, origin, status="stale", reason=IMPORTED)
            records[record.id] = record
        except DamagedRecordError as error:
            damaged.append(Damaged(where, str(error)))
    return Imported(list(records.values()), damaged)


def export_tvm(records: Iterable[TuningRecord], folder: Path) -> tuple[int, list[Damaged]]:
    """Write good records with a trace as TVM's two files, replacing those in `folder`. TVM looks them up whatever the
    target is, so they must be of one target. Returns how many, and those that TVM has no form for."""
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from tvm.s_tir.meta_schedule import database
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    chosen, left = [], []
    for record in records:
        try:
            if record.status != "good":
                raise DamagedRecordError(f"it is {record.status}: {record.reason}")
            chosen.append((record, scheduled(record)))
        except DamagedRecordError as error:
            left.append(Damaged(record.id, str(error)))
    if len(targets := {record.key.target for record, _ in chosen}) > 1:
        raise TuningError(f"records of {len(targets)} targets cannot share one database of TVM, whose look-up ignores the "
                          "target; name one with --target")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as beside:
        written = database.JSONDatabase(work_dir=beside)
        for record, schedule in chosen:
            module = workload_module(record.workload)
            written.commit_tuning_record(database.TuningRecord(
                trace=schedule.trace, workload=written.commit_workload(module),
                run_secs=[time * 1e-6 for time in record.times_us], target=_tvm_target(tvm, record.target),
                args_info=ArgInfo.from_prim_func(module["main"])))
        for name in (WORKLOADS, RECORDS):
            path = Path(beside, name)
            path.touch()
            path.replace(folder / name)
    return len(chosen), left


def _tvm_target(tvm: Any, facts: Facts) -> Any:
    if facts["kind"] == "cuda":
        return tvm.target.Target({"kind": "cuda", "arch": facts["arch"]})
    return tvm.target.Target({"kind": "llvm", "mcpu": facts["arch"], "num-cores": facts["threads"]})


def _foreign(found: Any, target: Facts) -> str:
    """Why a record with TVM's target `found` is not one of `target`, or ""."""
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise DamagedRecordError("it has no readable target")
    names = {"cpu": ("llvm", "mcpu"), "cuda": ("cuda", "arch")}
    kind, arch = names[str(target["kind"])]
    if found["kind"] != kind:
        return f"it was tuned for {found['kind']}, not for {described(target)}"
    if found.get(arch) != target["arch"]:
        return f"it was tuned for {arch} {found.get(arch, 'unnamed')}, not for {described(target)}"
    if kind == "llvm" and found.get("num-cores") != target["threads"]:
        return f"it was tuned for {found.get('num-cores', 'an unnamed number of')} cores, not for {described(target)}"
    return ""


def _times(seconds: Any) -> tuple[float, ...]:
    if (not isinstance(seconds, list) or not seconds
            or not all(isinstance(time, float | int) and not isinstance(time, bool) for time in seconds)):
        raise DamagedRecordError("it has no run times")
    if max(seconds) >= _FAILED_SECONDS:
        raise DamagedRecordError("its candidate did not build or run")
    return tuple(time * 1e6 for time in seconds)


def _name(module: Any) -> str:
    """The blocks of a function, as people would call it: "matmul_relu"."""
    from tvm.s_tir import Schedule

    schedule = Schedule(module)
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    return "_".join(str(schedule.get(block).name_hint) for block in blocks)[:80] or "main"


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """("file:1", line) of each line that is not empty."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            yield f"{path.name}:{number}", line.decode(errors="replace")


def _parsed(line: str, length: int) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"not JSON, perhaps cut: {error}") from None
    if not isinstance(value, list) or len(value) != length:
        raise DamagedRecordError(f"not a list of {length} values")
    return value


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
