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
    """Writes the folder anew, beside, then renames it; lines that say what came out."""
    old = pull(str(seed)).records
    cuda, problems = merged([record for record in old if record.target["kind"] == "cuda"], results)
    others = [record for record in old if record.target["kind"] != "cuda"]
    beside = seed.with_name(f".{seed.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    for records_of_one in (others, cuda):
        push(records_of_one, str(beside))
    shutil.rmtree(seed)
    beside.rename(seed)
    changed = sum(bool(record.choice["parameters"]) for record in cuda)
    return [*problems, f"{len(cuda)} records of CUDA, {changed} of them other than the rule; {len(others)} of other targets"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--seed", type=Path, default=SEED, help="the folder of bundles")
    options = parser.parse_args()
    print("\n".join(refresh(options.seed, [json.loads(path.read_text()) for path in options.results])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
