"""Tunes the CUDA kernels: built where a compiler is, timed where a GPU is, decided and stored anywhere.

    python -m benchmarks.gpu.tune prepare FOLDER [--only 8b.o@ norm ...] [--processes 16]  # nvcc, no GPU
    python benchmarks/gpu/tune.py run FOLDER --out RESULT.json [--limit SECONDS]          # TVM's runtime and torch
    python -m benchmarks.gpu.tune store RESULT.json --db DATABASE                         # anywhere
    python -m benchmarks.gpu.tune table RESULT.json                                       # rule, tuned, torch, roofline
    python -m benchmarks.gpu.tune condense RESULT.json --out benchmarks/results/gpu_tuned-DATE.json
    python -m benchmarks.gpu.tune_seed RESULT.json                                        # into relaxpack's own records

Candidates are those of `relaxpack.schedules.tuning.cuda_spaces`, cuBLASLt among them; what is compiled is exactly what a
build with the record would compile. A kernel is compared with float64 before it is timed; the kernels of a shape take
turns, each round one replay of a graph that walks over more data than the L2 cache holds. For few rows, a kernel's
neighbour in a step (a norm) takes part: what counts is the time of both, launched dependently. `store` applies the rule
of noise. `--only` takes parts of task names. Of several results `store`, `table` and `condense` take what is of today's
kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "run", "work", "store", "table", "condense"])
    parser.add_argument("path", type=Path, nargs="+", help="a folder; or results: the last one that has a task counts")
    parser.add_argument("--only", nargs="*", default=[], help="parts of task names")
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    parser.add_argument("--limit", type=float, default=480, help="seconds of a run")
    parser.add_argument("--cache", type=Path, help="libraries of earlier preparations")
    parser.add_argument("--processes", type=int, default=1, help="compilers side by side")
    parser.add_argument("--per-module", type=int, default=24, help="kernels of a library")
    parser.add_argument("--declared", action="store_true", help="prepare: only the set by which tuning is judged")
    parser.add_argument("--broken", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--db", default="h200.sqlite")
    parser.add_argument("--no-library", action="store_true", help="store, table, condense: kernels of ours alone")
    parser.add_argument("--no-winners", action="store_true", help="store: the rule everywhere; what won alone is noted only")
    options = parser.parse_args()
    path = options.path[0]
    if options.command == "prepare":
        from benchmarks.gpu.tune_tasks import declared, jobs, prepare

        known = declared() if options.declared else jobs()
        chosen = [job for job in known if not options.only or any(part in job.name for part in options.only)]
        prepare(path, chosen, options.cache, options.processes, options.per_module)
    elif options.command == "run":
        from benchmarks.gpu.tune_device import run

        return run(path, options.out, options.limit, options.only)
    elif options.command == "work":
        from benchmarks.gpu.tune_device import work

        work(path, options.out, options.limit, json.loads(options.broken), options.only)
    else:
        from benchmarks.gpu.tune_records import condensed, joined, own_kernels, store, table

        results = [json.loads(one.read_text()) for one in options.path]
        result = joined(results) if len(results) > 1 else results[0]
        if options.no_library:
            result = own_kernels(result)
        if options.command == "store":
            store(result, options.db, not options.no_winners)
        elif options.command == "table":
            print(table(result))
        else:
            options.out.write_text(json.dumps(condensed(result), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
