"""Finalists of a GPU visit in chains of layers, played through without a GPU: the visit's own session, with kernels of NumPy
and torch and times out of tables, one for kernels by themselves and one for layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.gpu import tune_device
from benchmarks.gpu.tune_decisions import decided
from benchmarks.gpu.tune_records import records
from relaxpack.kernel_spec import LinearSpec
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.chain import Chain, ChainCall
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import Workload
from relaxpack.weight_format import FORMATS
from tests.helpers import bench_stand_in, gpu_stand_in
from tests.helpers.bench_stand_in import StandIn
from tests.helpers.gpu_stand_in import StandInGpu
from tests.helpers.tuning_records import SM_90

HOPPER = parse_target("cuda:sm_90a")
NAME = "decode_16 of two matmuls"
FAMILY = families_for(HOPPER)["cuda.linear"]
UP, DOWN = (FAMILY.workload(LinearSpec(n, k, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=16))
            for n, k in ((512, 256), (256, 512)))
LAYERS = 4
CHAIN = Chain("decode_16", 16, tuple(call for layer in range(LAYERS) for call in (
    ChainCall(UP, (("x", f"x{layer}"), ("weight", f"u{layer}"), ("y", f"h{layer}")), layer),
    ChainCall(DOWN, (("x", f"h{layer}"), ("weight", f"d{layer}"), ("y", f"x{layer + 1}")), layer))))


def _stages(function: str) -> dict[str, Any]:
    return {"stages": [{"function": function, "arguments": ["x", "weight", "y"]}], "temporaries": {}}


def _task(name: str, work: Workload) -> dict[str, Any]:
    _, spec = family_and_spec(work)
    part = FAMILY.part(spec, 16)
    assert part is not None
    choices = [dict(part.space.default), *part.space.all()][:5]
    case = {"kind": "linear", "rows": 16, "n": spec.out_features, "k": spec.in_features, "weight": "bf16", "swiglu": False,
            "bias": False, "out_dtype": "bfloat16"}
    return {"name": name, "bucket": 16, "generation": 1, "cases": [case], "workload": asdict(work),
            "chain": NAME, "work": work.hash,
            "candidates": [{"choice": choice, **_stages(f"{name}{i}")} for i, choice in enumerate(choices)]}


TASKS = [_task("up", UP), _task("down", DOWN)]
INDEX = {"tasks": TASKS, "chains": {NAME: CHAIN.to_json()},
         "kernels": {UP.hash: _stages("rule_up"), DOWN.hash: _stages("rule_down")}}


def _linear(x: Any, weight: Any, y: Any) -> None:
    (gpu_stand_in.linear if isinstance(x, np.ndarray) else bench_stand_in.linear)(x, weight, y)


class Visit:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, alone: dict[str, float], layers: dict[str, float],
                 broken: Sequence[Any] = (), **kernels: Any) -> None:
        functions = {one["stages"][0]["function"]: _linear for task in TASKS for one in task["candidates"]}
        functions |= {"rule_up": _linear, "rule_down": _linear, **kernels}
        bench = StandIn(functions, alone)
        gpu = StandInGpu(lambda name: _linear, lambda name: layers.get(name, 100.0))
        gpu.called = bench.called
        monkeypatch.setattr(tune_device, "open_gpu", lambda: gpu)
        self.session = tune_device.Session(bench, dict.fromkeys(functions, "library"), broken=broken, index=INDEX)
        self.noted: list[tuple[str, int]] = []
        monkeypatch.setattr(self.session.chains, "_at", lambda *at: self.noted.append(at))
        self.tasks = [{**self.session.measure(task), "seconds": 0.1} for task in TASKS]
        self.together = self.session.together(TASKS, self.tasks, float("inf"))

    def result(self) -> dict[str, Any]:
        return {"target": dict(SM_90), "host": "gpu", "created": "2026-11-30T20:15:00Z", "torch": "2.11",
                "compiler": {"apache-tvm": "0.27.0.post1", "kernels": 1, "cuda": "13.0"}, "tasks": self.tasks,
                "ceilings": {"read_tb_s": 4.2, "gemm_tflop_s": 780.0}, "together": self.together}


def test_the_time_of_a_layer_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """up3 is the fastest alone and slows the layer down; up2 is hardly faster alone and makes it faster."""
    visit = Visit(monkeypatch, {"up3": 50.0, "up2": 97.0, "down1": 90.0}, {"up3": 110.0, "up2": 80.0, "down1": 100.0})
    up, down = (decided(task) for task in visit.tasks)
    assert not isinstance(up, str) and up.winner["number"] == 2 and up.in_layer == (
        pytest.approx(200, rel=0.01), pytest.approx(180, rel=0.01))
    assert not isinstance(down, str) and not down.improved
    assert visit.together[NAME]["winners"] == {"up": 2}
    assert np.median(visit.together[NAME]["winners_us"]) == pytest.approx(180, rel=0.01)
    made, problems = records(visit.result())
    assert problems == [] and [one.choice["parameters"] for one in made] == [TASKS[0]["candidates"][2]["choice"], {}]
    assert made[0].median_us == pytest.approx(80, rel=0.01) and made[0].baseline_us == pytest.approx(100, rel=0.01)
    assert {("up", 3), ("up", 2), (NAME, 0), (NAME, 1)} <= set(visit.noted)


def test_what_is_wrong_in_a_layer_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_in_layers(x: Any, weight: Any, y: Any) -> None:
        _linear(x, weight, y)
        if isinstance(y, np.ndarray):
            y *= 2

    visit = Visit(monkeypatch, {"up3": 50.0}, {"up3": 60.0, "up2": 90.0}, up3=wrong_in_layers)
    up = decided(visit.tasks[0])
    assert "results in the chain differ" in visit.tasks[0]["candidates"][3]["chain_failure"]
    assert not isinstance(up, str) and up.winner["number"] == 2


def test_a_chain_that_cannot_run_costs_the_winners_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*arguments: Any) -> None:
        raise ValueError("no kernel image")

    visit = Visit(monkeypatch, {"up3": 50.0}, {"up3": 60.0}, rule_down=raises)
    assert "no kernel image" in visit.tasks[0]["chain_failure"] and "chain_failure" not in visit.tasks[1]
    assert all(len(task["candidates"][3]["alone_us"][0]) == tune_device.DUEL_ROUNDS for task in visit.tasks)
    assert [one.choice["parameters"] for one in records(visit.result())[0]] == [{}, {}]


@pytest.mark.parametrize("place", [(NAME, 0), (NAME, 1)])
def test_what_ended_a_process_is_not_run_again(monkeypatch: pytest.MonkeyPatch, place: tuple[str, int]) -> None:
    visit = Visit(monkeypatch, {"up3": 50.0}, {"up3": 60.0}, broken=[place])
    if place[1]:
        assert "ended a process" in visit.together[NAME]["failure"] and "chain_us" in visit.tasks[0]["candidates"][3]
    else:
        assert all("ended a process" in task["chain_failure"] for task in visit.tasks) and visit.noted == []
    assert [one.choice["parameters"] for one in records(visit.result())[0]] == [{}, {}]


def test_a_broken_context_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(x: Any, weight: Any, y: Any) -> None:
        if isinstance(x, np.ndarray):
            raise RuntimeError("CUDA: an illegal memory access was encountered")
        _linear(x, weight, y)

    with pytest.raises(RuntimeError):
        Visit(monkeypatch, {}, {}, up3=breaks)
