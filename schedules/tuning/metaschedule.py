"""TVM's MetaSchedule as a search: it proposes schedules of a PrimFunc, our own processes build, check and time them.

TVM's own builder and runner are not used: the default builder imports a module for a minute in every fresh worker and then
times out, and a candidate is only worth a time if its numbers are right.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.errors import EnvironmentProblem
from relaxpack.target import TargetSpec

FAILED_SECONDS = 1e10     # what TVM's database notes for a candidate that did not run
_PER_ROUND = 16


# What the rules of MetaSchedule ask of a GPU: threads and static shared memory of a block, which every card of today has.
_GPU_LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 48 << 10, "thread_warp_size": 32}


class Stopped(Exception):
    """The caller's time is up."""


def _with_limits(target: TargetSpec) -> Any:
    if target.kind != "cuda":
        return target.to_tvm()
    return tvm.target.Target({"kind": "cuda", "arch": target.arch, **_GPU_LIMITS}, host="llvm")


def search(func: Any, target: TargetSpec, folder: Path, trials: int, try_candidate: Callable[[Any], float],
           stop: Callable[[], bool], seed: int = 0) -> None:
    """Tune `func` (constant shapes) until its database in `folder` knows `trials` candidates or `stop()` says so.

    `try_candidate(module)` → seconds of a scheduled module, or raises; any Exception is a failed candidate.
    """
    from tvm.s_tir import meta_schedule as ms

    if missing := [name for name in ("xgboost", "psutil") if importlib.util.find_spec(name) is None]:
        raise EnvironmentProblem(f"MetaSchedule's search needs {' and '.join(missing)}: pip install 'relaxpack[tuning]'")
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)
    builder, runner, interrupted = _measuring(ms, try_candidate, stop)
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    tvm_target = _with_limits(target)
    folder.mkdir(parents=True, exist_ok=True)
    database = ms.database.JSONDatabase(work_dir=str(folder))
    left = trials - len(database)
    if left <= 0:
        return
    context = ms.TuneContext(mod=module, target=tvm_target, space_generator="post-order-apply",
                             search_strategy=_evolution(ms, left), task_name="main", num_threads=1, rand_state=seed + 1)
    try:
        ms.tune.tune_tasks(tasks=[context], task_weights=[1.0], work_dir=str(folder), max_trials_global=left,
                           num_trials_per_iter=min(_PER_ROUND, left), builder=builder, runner=runner, database=database,
                           cost_model=ms.CostModel.create("xgb", num_tuning_cores=1, tree_method="auto"),
                           measure_callbacks=[ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel()])
    except Exception:
        if not interrupted:
            raise
    if interrupted and not isinstance(interrupted[0], Stopped):
        raise interrupted[0]


def _evolution(ms: Any, trials: int) -> Any:
    """TVM's default breeds 512 schedules for every round of trials, which takes longer than a few trials do."""
    population = max(32, min(512, 8 * trials))
    return ms.search_strategy.EvolutionarySearch(population_size=population, init_measured_ratio=0.2,
                                                 init_min_unmeasured=min(50, population // 2))


def known_trials(folder: Path) -> int:
    """Candidates that a database of `search` has seen."""
    path = folder / "database_tuning_record.json"
    return sum(1 for line in path.read_bytes().splitlines() if line.strip()) if path.exists() else 0


def best_traces(func: Any, folder: Path, count: int) -> list[Any]:
    """JSON forms of the fastest traces in a database of `search`, fastest first."""
    from tvm.s_tir import meta_schedule as ms

    if not (folder / "database_workload.json").exists():
        return []
    database = ms.database.JSONDatabase(work_dir=str(folder))
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    if not database.has_workload(module):
        return []
    found = database.get_top_k(database.commit_workload(module), count)
    return [trace_json(record.trace) for record in found
            if min(float(s) for s in record.run_secs) < FAILED_SECONDS / 2]


def trace_json(trace: Any) -> Any:
    """Plain lists, as a tuning record keeps them."""
    return _plain(trace.as_json())


def _plain(value: Any) -> Any:
    if isinstance(value, bool | str | int | float) or value is None:
        return value
    if hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, tvm.tirx.IntImm) else float(getattr(value, "value", value))


def _measuring(ms: Any, try_candidate: Callable[[Any], float],
               stop: Callable[[], bool]) -> tuple[Any, Any, list[BaseException]]:
    """A builder that passes candidates on and a runner that has them tried. What interrupts them lands in the list: TVM
    would turn it into an error of its own."""
    from tvm.ir.utils import derived_object

    interrupted: list[BaseException] = []
    waiting: dict[str, Any] = {}

    def guarded(module: Any) -> Any:
        if interrupted or stop():
            interrupted.append(Stopped())
            raise Stopped
        try:
            return ms.runner.RunnerResult(run_secs=[try_candidate(module)], error_msg=None)
        except Exception as error:
            return ms.runner.RunnerResult(run_secs=None, error_msg=str(error))
        except BaseException as error:
            interrupted.append(error)
            raise

    @derived_object
    class Builder(ms.builder.PyBuilder):
        def build(self, build_inputs: list[Any]) -> list[Any]:
            results = []
            for one in build_inputs:
                name = str(len(waiting))
                waiting[name] = one.mod
                results.append(ms.builder.BuilderResult(artifact_path=name, error_msg=None))
            return results

    @derived_object
    class Future(ms.runner.PyRunnerFuture):
        def __init__(self, result: Any) -> None:
            super().__init__()
            self._result = result

        def done(self) -> bool:
            return True

        def result(self) -> Any:
            return self._result

    @derived_object
    class Runner(ms.runner.PyRunner):
        def run(self, runner_inputs: list[Any]) -> list[Any]:
            return [Future(guarded(waiting.pop(str(one.artifact_path)))) for one in runner_inputs]

    return Builder(), Runner(), interrupted
