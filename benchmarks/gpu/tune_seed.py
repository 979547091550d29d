"""Puts what a run of `tune.py` found into the records that come with relaxpack. Anywhere, in seconds; as often as wanted.

    python -m benchmarks.gpu.tune_seed RESULT.json [RESULT.json ...]

Kernels of ours alone, never a library's. A task that was measured with another generation of its kernels than today's is
left out, and so is what the seed has of such. A record of the same work, rows, card and compiler is replaced by the new one,
others stay; of several results the last one counts. Other targets' bundles keep their bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.tune_records import own_kernels, records
from relaxpack.dist.tuning.exchange import pull, push
from relaxpack.dist.tuning.place import INDEX, Place
from relaxpack.errors import DatabaseError, RelaxpackError
from relaxpack.kernel_generations import for_workload
from relaxpack.tuning.lookup import SEED
from relaxpack.tuning_record import TuningRecord


def of_today(record: TuningRecord) -> bool:
    """Whether it has measured kernels as they are now."""
    return for_workload(record.compiler, record.workload) == record.compiler


def merged(old: Iterable[TuningRecord], results: Sequence[dict[str, Any]]) -> tuple[list[TuningRecord], list[str]]:
    """(CUDA's records of today's kernels, what was left out and why)."""
    kept, problems = {record.key: record for record in old if of_today(record)}, []
    for result in results:
        made, undecided = records(own_kernels(result))
        problems += undecided
        for record in made:
            if of_today(record):
                kept[record.key] = record
            else:
                problems.append(f"{record.workload.name}, {record.bucket} rows: of kernels before today's")
    return list(kept.values()), problems


def refresh(seed: Path, results: Sequence[dict[str, Any]]) -> list[str]:
    """Puts the new bundles into the folder, then takes away those that they replace; lines that say what came out. Whoever
    is killed meanwhile leaves both; what else is in the folder stays. Raises DatabaseError, with the folder as it was."""
    seed = seed.resolve()
    found = pull(str(seed))
    if found.damaged:
        where, problem = found.damaged[0]
        raise DatabaseError(f"{seed} has damaged records, which would be lost: {where}: {problem}; repair it first")
    cuda, problems = merged([record for record in found.records if record.target["kind"] == "cuda"], results)
    others = [record for record in found.records if record.target["kind"] != "cuda"]
    beside = seed.with_name(f".{seed.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for records_of_one in (others, cuda):
            push(records_of_one, str(beside))
        new = Place(str(beside)).names()
        old = [name for name in Place(str(seed)).names() if name not in new]
        for name in (*new, INDEX):
            (beside / name).replace(seed / name)
        for name in old:
            (seed / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    changed = sum(bool(record.choice["parameters"]) for record in cuda)
    return [*problems, f"{len(cuda)} records of CUDA, {changed} of them other than the rule; {len(others)} of other targets"]


def result_of(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    if not isinstance(result, dict) or not isinstance(result.get("tasks"), list):
        sys.exit(f"{path} is no result of tune.py")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--seed", type=Path, default=SEED, help="the folder of bundles")
    options = parser.parse_args()
    try:
        print("\n".join(refresh(options.seed, [result_of(path) for path in options.results])))
    except (RelaxpackError, OSError) as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
