"""PrimFuncs that no kernel covers: MetaSchedule searches, our processes build and check, and a build uses the trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.dist.tuning.store import open_store
from relaxpack.errors import EnvironmentProblem
from relaxpack.fingerprint import compiler_fingerprint, target_fingerprint
from relaxpack.schedules.tuning.metaschedule import best_traces, known_trials, search
from relaxpack.target import parse_target
from relaxpack.tuning.jobs import check, compile_candidate
from relaxpack.tuning.measure import LocalMeasurer
from relaxpack.tuning.primfunc_cases import primfunc_case
from relaxpack.tuning.session import Limits, TuningSession
from relaxpack.tuning.tasks import Task, extract_tasks
from relaxpack.tuning.trial_log import TrialLog
from relaxpack.tvm_records import primfunc_workload
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.tuning_records import BROKEN_TRACE, TRACE, doubling, traced
from tvm import te

TARGET = parse_target("cpu")
PLAIN = BuildOptions(level=0, max_context=64, max_batch=2, prefill_chunk=16)


def matmul() -> object:
    a, b = te.placeholder((4, 48), name="A"), te.placeholder((32, 48), name="B")
    k = te.reduce_axis((0, 48), name="k")
    return te.create_prim_func([a, b, te.compute((4, 32), lambda i, j: te.sum(a[i, k] * b[j, k], k), name="C")])


def test_the_reference_is_float64_and_the_bound_is_tight() -> None:
    case = primfunc_case(primfunc_workload(matmul(), "matmul"), 3)
    a, b, _ = case.sets[0]
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    assert case.outputs == (2,) and np.abs(case.expected[0] - exact).max() < 1e-12
    assert 0 < case.bounds[0].max() < 1e-4 * np.abs(exact).max()


def test_a_session_searches_and_checks(tmp_path: Path) -> None:
    task = Task("matmul", primfunc_workload(matmul(), "matmul"), None, 1.0, 1e-6, None, "")
    facts = target_fingerprint(TARGET), compiler_fingerprint("cpu")
    with LocalMeasurer(TARGET) as measurer, open_store(str(tmp_path / "t.sqlite")) as store:
        log = TrialLog(tmp_path / "log")
        session = TuningSession([task], TARGET, *facts, measurer, store, log,
                                Limits(2, trial_seconds=0.1, duel_seconds=0.5))
        outcome, = session.run()
        assert (outcome.trials, outcome.failed) == (2, 0) and outcome.state in ("improved", "kept", "busy"), outcome


def test_the_search_proposes_right_schedules_and_remembers(tmp_path: Path) -> None:
    workload, tried = primfunc_workload(matmul(), "matmul"), []

    def try_candidate(module: object) -> float:
        tried.append(module)
        if len(tried) == 2:
            raise RuntimeError("crashed")
        return 1.0 / len(tried)

    search(matmul(), TARGET, tmp_path / "ms", 3, try_candidate, lambda: False)
    assert len(tried) == 3 == known_trials(tmp_path / "ms")
    search(matmul(), TARGET, tmp_path / "ms", 3, try_candidate, lambda: False)      # nothing is left of the budget
    assert len(tried) == 3
    traces = best_traces(matmul(), tmp_path / "ms", 5)
    assert len(traces) == 2                                                          # the one that crashed is none
    path = str(tmp_path / "best.so")
    compile_candidate(workload, {"kind": "trace", "trace": traces[0]}, TARGET, path)
    worst, where = check(path, workload, 1, 0)
    assert worst <= 1, where


def test_time_that_is_up_stops_the_search(tmp_path: Path) -> None:
    tried = []
    search(matmul(), TARGET, tmp_path / "ms", 6, lambda module: tried.append(module) or 1.0, lambda: len(tried) >= 2)
    assert len(tried) == 2
    with pytest.raises(KeyboardInterrupt):
        search(matmul(), TARGET, tmp_path / "other", 6, _interrupted, lambda: False)


def _interrupted(module: object) -> float:
    raise KeyboardInterrupt


def test_a_wrong_schedule_is_noticed(tmp_path: Path) -> None:
    from tests.helpers.bad_candidates import is_right, is_wrong

    workload = primfunc_workload(doubling(), "doubling")
    shares = []
    for number, choice in enumerate((is_right(), is_wrong(), {"kind": "trace", "trace": TRACE})):
        compile_candidate(workload, choice, TARGET, str(tmp_path / f"{number}.so"))
        shares.append(check(str(tmp_path / f"{number}.so"), workload, 1, 0)[0])
    assert shares[0] <= 1 < shares[1] and shares[2] <= 1


def test_a_build_takes_the_trace_and_names_what_it_does_not_take(tmp_path: Path) -> None:
    """At -O0 the tables of RoPE are computed by functions of TVM's, whose shapes are constant."""
    write_checkpoint(tmp_path / "model")
    tasks = [task for task in extract_tasks(tmp_path / "model", TARGET, PLAIN) if task.part is None]
    chosen, broken = next(t for t in tasks if t.kernel == "tir_cos"), next(t for t in tasks if t.kernel == "tir_sin")
    assert chosen.bucket is None and chosen.weight > 0 and set(chosen.calls) == {"decode:1", "decode:2", "prefill:16"}
    name = chosen.workload.name
    trace = [[["GetSBlock", [], [name, "main"], ["b0"]], ["GetLoops", ["b0"], [], ["l1", "l2"]],
              ["Parallel", ["l1"], [], []]], []]
    facts = {"target": target_fingerprint(TARGET), "compiler": compiler_fingerprint("cpu")}
    with open_store(str(tmp_path / "t.sqlite")) as store:
        good = replace(traced(trace=trace, **facts), workload=chosen.workload)
        bad = replace(traced(trace=BROKEN_TRACE, **facts), workload=broken.workload)
        store.add_all([good, bad])
    build_bundle(tmp_path / "model", tmp_path / "b", TARGET, PLAIN, databases=[str(tmp_path / "t.sqlite")])
    import json

    explained = json.loads((tmp_path / "b" / "explain.json").read_text())
    sources = {kernel["name"]: kernel["source"] for kernel in explained["kernels"]}
    assert sources["tir_cos"] == f"tuned:{good.id[:16]}" and sources["tir_sin"] == "rule:cpu.elementwise"
    rejected, = explained["tuning"]["rejected"]
    assert rejected["record"] == bad.id and "no longer loads" in rejected["reason"]
    assert list(explained["tuning"]["used"]) == [good.id]


def test_without_its_cost_model_the_search_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xgboost" else found(name))
    with pytest.raises(EnvironmentProblem, match=r"needs xgboost: pip install 'relaxpack\[tuning\]'"):
        search(matmul(), TARGET, tmp_path / "ms", 1, lambda module: 1.0, lambda: False)
    assert not (tmp_path / "ms").exists()
