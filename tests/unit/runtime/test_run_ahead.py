"""Running one decode step ahead never changes an output, whatever arrives, ends, is cancelled or preempted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import StepHandle, StepPlan, StepSampling
from tests.helpers.fakes import FakeRunner


class LateExecutor(HostExecutor):
    """Like a device: the token ids of a step that runs ahead come from the step before, not from the plan."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner)
        self.last: list[int] = []
        self.ahead = 0

    def submit(self, plan: StepPlan, sampling: StepSampling) -> StepHandle:
        handle = super().submit(plan, sampling)
        self.last = list(handle.result().token_ids)
        return handle

    def submit_ahead(self, plan: StepPlan, sampling: StepSampling) -> StepHandle | None:
        if any(token < 0 for token in self.last) or not all(s.params.greedy for s in sampling.states):
            return None
        self.ahead += 1
        fed = tuple(replace(s, token_ids=(t,)) for s, t in zip(plan.sequences, self.last, strict=True))
        return self.submit(StepPlan(fed, plan.copies), sampling)


def outputs(engine: Engine, arrivals: Sequence[tuple[int, list[int], int]], cancels: dict[int, int]) -> list[list[int]]:
    """`arrivals`: (step, prompt, max_tokens); `cancels`: request index → step."""
    requests: list[object] = [None] * len(arrivals)
    for step in range(2000):
        for i, (at, prompt, new) in enumerate(arrivals):
            if at == step:
                requests[i] = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
        for i, at in cancels.items():
            if at == step and requests[i] is not None:
                engine.cancel(requests[i])  # type: ignore[arg-type]
        engine.step()
        engine.scheduler.check()
        if not engine.has_work and step > max(at for at, _, _ in arrivals):
            break
    assert not engine.has_work
    return [r.sequences[0].output_ids for r in requests]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(12))
def test_outputs_equal_those_without_running_ahead(seed: int) -> None:
    rng = random.Random(seed)
    shape = {"page_size": rng.choice([1, 3, 4, 16]), "num_pages": rng.choice([40, 64, 200]), "max_batch": 6}
    arrivals = [(rng.randrange(40), [rng.randrange(97) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 18))
                for _ in range(14)]
    cancels = {i: rng.randrange(50) for i in rng.sample(range(14), 3)}
    plain = outputs(Engine(FakeRunner(**shape)), arrivals, {})
    runner = FakeRunner(**shape)
    executor = LateExecutor(runner)
    engine = Engine(runner, executor=executor)
    got = outputs(engine, arrivals, cancels)
    for i, (want, have) in enumerate(zip(plain, got, strict=True)):
        assert have == (want if i not in cancels else want[:len(have)])
    assert executor.ahead > 0
    assert engine._ahead is not None and engine._ahead.used > 0
    assert engine.scheduler.pool.num_held == 0


def test_a_steady_batch_runs_ahead_over_page_borders() -> None:
    runner = FakeRunner(page_size=4, num_pages=64)
    executor = LateExecutor(runner)
    engine = Engine(runner, executor=executor)
    outputs(engine, [(0, [1, 2, 3], 40), (0, [4, 5], 40)], {})
    assert engine._ahead is not None
    assert engine._ahead.used >= 36 and engine._ahead.dropped <= 1


def test_the_last_token_is_not_run_ahead_of() -> None:
    runner = FakeRunner()
    executor = LateExecutor(runner)
    outputs(Engine(runner, executor=executor), [(0, [1, 2, 3], 5)], {})
    # 1 prefill samples token 1, decodes sample tokens 2 to 5: no step computes a token that is not wanted
    assert len(runner.plans) == 5


def test_a_failing_step_forgets_what_ran_ahead() -> None:
    runner = FakeRunner()
    executor = LateExecutor(runner)
    engine = Engine(runner, executor=executor)
    request = engine.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    runner.fail_next = RuntimeError("lost")
    while engine.has_work:
        engine.step()
    assert request.sequences[0].error is not None
    assert engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0].choices
