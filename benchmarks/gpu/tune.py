"""Tunes the CUDA matmul kernels: built where a compiler is, timed where a GPU is, decided and stored anywhere.

    python -m benchmarks.gpu.tune prepare FOLDER [--linears 8b.qkv ...] [--rows 1 8 64 ...]   # nvcc, no GPU
    python benchmarks/gpu/tune.py run FOLDER --out RESULT.json [--limit SECONDS]                # TVM runtime and torch
    python -m benchmarks.gpu.tune store RESULT.json --db DATABASE                               # anywhere

Candidates are those of `relaxpack.schedules.tuning.cuda_spaces`, cuBLASLt among them; what is compiled is exactly what a
build with the record would compile. A kernel is compared with float64 before it is timed; all kernels of a shape take turns,
each round one replay of a graph that walks over more weights than the L2 cache holds. `store` applies the rule of noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ROWS = (1, 4, 8, 16, 64, 512, 4096)
DEFAULT = ("8b.qkv", "8b.o", "8b.gate_up", "8b.down")
PER_MODULE, ROUNDS, SEED = 24, 15, 1
INDEX = "tune.json"


# --- building machine -------------------------------------------------------------------------------------------------

def spec_of(linear: str, rows: int) -> Any:
    """The question that a build for bfloat16 asks about this matrix."""
    from benchmarks.gpu.matmul_variants import LINEARS
    from relaxpack.kernel_spec import LinearSpec
    from relaxpack.weight_format import FORMATS

    n, k, swiglu = LINEARS[linear]
    out = "float32" if linear.endswith(".head") else "bfloat16"
    return LinearSpec(n, k, FORMATS["bf16"], "decode", "bfloat16", out, glu="swiglu" if swiglu else None, max_rows=rows)


def candidates(linear: str, rows: int) -> list[dict[str, Any]]:
    """The rule's choice first."""
    from relaxpack.target import parse_target
    from relaxpack.tuning.candidates import families_for

    part, = families_for(parse_target("cuda:sm_90a"))["cuda.linear"].parts(spec_of(linear, rows))
    return [dict(part.space.default), *part.space.all()]


def prepare(folder: Path, linears: Sequence[str], rows: Sequence[int]) -> None:
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from relaxpack.schedules.cuda_compile import check_library, compile_module
    from relaxpack.target import parse_target
    from relaxpack.tuning.candidates import families_for

    target = parse_target("cuda:sm_90a")
    family = families_for(target)["cuda.linear"]
    folder.mkdir(parents=True, exist_ok=True)
    funcs: dict[str, Any] = {}
    tasks = []
    for linear in linears:
        for count in rows:
            spec, found = spec_of(linear, count), []
            for choice in candidates(linear, count):
                stage, = family.make(spec, choice).stages
                funcs[stage.name] = stage.func           # one kernel may be a candidate for several row counts
                found.append({"choice": choice, "function": stage.name})
            tasks.append({"linear": linear, "rows": count, "n": spec.out_features, "k": spec.in_features,
                          "swiglu": spec.gated, "out_dtype": spec.out_dtype, "candidates": found})
    libraries, names, start = {}, sorted(funcs), time.perf_counter()
    for number, first in enumerate(range(0, len(names), PER_MODULE)):
        part, library = names[first:first + PER_MODULE], folder / f"tune-{number}.so"
        module = tvm.IRModule({name: funcs[name].with_attr("global_symbol", name) for name in part})
        compile_module(module, target).export_library(str(library))
        check_library(library)
        libraries |= dict.fromkeys(part, library.name)
        print(f"{library.name}: {len(part)} kernels, {time.perf_counter() - start:.0f} s", flush=True)
    (folder / INDEX).write_text(json.dumps({"tasks": tasks, "libraries": libraries}))
    print(f"{len(tasks)} tasks, {len(names)} kernels")


# --- GPU machine ------------------------------------------------------------------------------------------------------

def run(folder: Path, out: Path, limit: float) -> None:
    """Writes after each task, so that a run that is cut short keeps what it has."""
    from benchmarks.gpu.kernels_matmul import Bench
    from relaxpack.fingerprint import target_fingerprint
    from relaxpack.target import parse_target

    bench, index, end = Bench(folder), json.loads((folder / INDEX).read_text()), time.monotonic() + limit
    result: dict[str, Any] = {"target": dict(target_fingerprint(parse_target("cuda:sm_90a"))), "host": platform.node(),
                              "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "tasks": [], "left_out": []}
    try:
        from relaxpack.runtime.library.cublaslt import register

        register(bench.tvm.cuda(0))
    except Exception as error:      # no wheel: cuBLASLt's candidates fail one by one, with their reason
        result["cublaslt"] = str(error)
    for task in index["tasks"]:
        if time.monotonic() > end:
            result["left_out"].append(f"{task['linear']}@{task['rows']}")
            continue
        result["tasks"].append(measure(bench, task, index["libraries"]))
        out.write_text(json.dumps(result))
        best = min((c for c in result["tasks"][-1]["candidates"] if c.get("times_us")), default=None,
                   key=lambda c: sorted(c["times_us"])[len(c["times_us"]) // 2])
        print(f"{task['linear']}@{task['rows']}: {best['choice'] if best else 'nothing ran'}", flush=True)


def measure(bench: Any, task: dict[str, Any], libraries: dict[str, str]) -> dict[str, Any]:
    """Errors, then times in turn, of every candidate of a task."""
    torch, rows, results, replays = bench.torch, task["rows"], [], []
    for candidate in task["candidates"]:
        variant = {"name": candidate["function"], "library": libraries[candidate["function"]], "family": "linear",
                   "n": task["n"], "k": task["k"], "dtype": "bfloat16", "out_dtype": task["out_dtype"], "weight": None,
                   "rows": [rows], "check": [rows], "linear": task["linear"], "options": {"swiglu": task["swiglu"]}}
        entry = {"choice": candidate["choice"]}
        results.append(entry)
        try:
            verdict, = bench.check(variant)
            entry |= {"error": verdict["error"], "ok": verdict["ok"] and verdict["same_again"]}
            if entry["ok"]:
                replays.append((entry, bench.captured(calls_of(bench, variant, rows))))
            torch.cuda.synchronize()
        except Exception as error:   # one broken kernel must not hide the others
            entry |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:300]}
    for number in range(ROUNDS + 1):
        for entry, replay in replays:
            took = replay()
            if number:               # the first round warms up
                entry.setdefault("times_us", []).append(took)
    return {**{key: task[key] for key in ("linear", "rows")}, "rotated_bytes": rotated(task), "candidates": results}


def rotated(task: dict[str, Any]) -> int:
    from benchmarks.gpu.kernels_matmul import copies_to_rotate

    one = 2 * task["n"] * task["k"]
    count = copies_to_rotate(one)
    return one * (count if task["rows"] <= 256 else min(4, count))


def calls_of(bench: Any, variant: dict[str, Any], rows: int) -> list[Callable[[], object]]:
    torch, key, n, k = bench.torch, (variant["linear"], None), variant["n"], variant["k"]
    if key not in bench.weights:
        bench.weights.clear()
        torch.cuda.empty_cache()
        from benchmarks.gpu.kernels_matmul import copies_to_rotate

        bench.weights[key] = bench.packed(variant, copies_to_rotate(2 * n * k))[0]
    copies = bench.weights[key] if rows <= 256 else bench.weights[key][:4]
    x = bench.random((rows, k), "bfloat16")
    y = torch.empty((rows, n // 2 if variant["options"]["swiglu"] else n), device="cuda",
                    dtype=getattr(torch, variant["out_dtype"]))
    function = bench.kernel(variant)
    return [partial(function, x, *buffers, y) for buffers in copies]


# --- anywhere ---------------------------------------------------------------------------------------------------------

def records(result: dict[str, Any], compiler: dict[str, Any] | None = None) -> tuple[list[Any], list[dict[str, Any]]]:
    """(a record of each task, rows of a report). The rule stands unless a candidate beats it by the rule of noise."""
    from benchmarks.gpu.kernels_matmul import TOLERANCE
    from relaxpack import __version__
    from relaxpack.fingerprint import compiler_fingerprint
    from relaxpack.target import parse_target
    from relaxpack.tuning.candidates import families_for
    from relaxpack.tuning.rounds import Rounds
    from relaxpack.tuning.session import decide
    from relaxpack.tuning_record import Check, Origin, TuningRecord

    family = families_for(parse_target("cuda:sm_90a"))["cuda.linear"]
    compiler = compiler or dict(compiler_fingerprint("cuda"))
    made, report = [], []
    for task in result["tasks"]:
        timed = [c for c in task["candidates"] if c.get("ok") and c.get("times_us")]
        name = f"{task['linear']}@{task['rows']}"
        if not timed or timed[0] is not task["candidates"][0]:
            report.append({"task": name, "result": "the rule's kernel failed, nothing to compare with"})
            continue
        rounds = [Rounds(tuple(c["times_us"]), (True,) * len(c["times_us"]), task["rotated_bytes"]) for c in timed]
        winner, verdict = decide([rounds[0], rounds[0], *rounds[1:]])
        chosen = timed[max(0, winner - 1)]
        spec, choice = spec_of(task["linear"], task["rows"]), dict(chosen["choice"])
        library = choice.pop("library", None)
        kept = {"kind": "library", "library": library, "parameters": choice} if library else {
            "kind": "parameters", "parameters": choice if winner else {}}
        baseline = sorted(timed[0]["times_us"])[len(timed[0]["times_us"]) // 2]
        workload = family.workload(spec, f"linear_{spec.out_features}x{spec.in_features}")
        origin = Origin(result["created"], result["host"], f"relaxpack {__version__}", len(task["candidates"]))
        made.append(TuningRecord(
            workload, task["rows"], result["target"], compiler, kept, tuple(round(t, 4) for t in chosen["times_us"]),
            {"repeats": len(chosen["times_us"]), "rotated_bytes": task["rotated_bytes"], "method": "CUDA graph, in turn"},
            Check(SEED, chosen["error"], TOLERANCE[spec.out_dtype]), origin, round(baseline, 4)))
        report.append({"task": name, "result": verdict.why, "choice": dict(chosen["choice"]), "untuned_us": baseline,
                       "best_us": made[-1].median_us, "failed": len(task["candidates"]) - len(timed)})
    return made, report


def store(path: Path, database: str) -> None:
    from relaxpack.dist.tuning.store import open_store

    made, report = records(json.loads(path.read_text()))
    with open_store(database) as target:
        added = target.add_all(made)
    for row in report:
        gain = f"{row['untuned_us']:9.2f} → {row['best_us']:9.2f} us {row['choice']}" if "best_us" in row else ""
        print(f"{row['task']:18s} {gain} {row['result']}")
    print(f"{added} records into {database}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["prepare", "run", "store"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--linears", nargs="+", default=list(DEFAULT))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    parser.add_argument("--limit", type=float, default=480, help="seconds of a run")
    parser.add_argument("--db", default="h200.sqlite")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.path, options.linears, options.rows)
    elif options.command == "run":
        run(options.path, options.out, options.limit)
    else:
        store(options.path, options.db)
    return 0


if __name__ == "__main__":
    sys.exit(main())
