"""Random lives of the engine: whatever is added, cancelled, forked, finished or evicted, invariants and outputs hold."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.request import FinishReason, SequenceStatus
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.fakes import FakeRunner

STEM = [7, 3, 9, 9, 1, 4, 4, 2, 8, 6, 5, 5, 3]     # prompts share beginnings of it


class Life:
    """An engine with few pages, and what its requests must give: what each gives alone."""

    def __init__(self, page_size, num_pages, max_batch, prefill_chunk, prefix_caching, exact):
        self.runner = FakeRunner(page_size=page_size, num_pages=num_pages, max_batch=max_batch,
                                 prefill_chunk=prefill_chunk, max_context=40, vocab_size=29)
        # Whole steps, so that the runner's checks see every sequence of a step beside the others.
        executor = HostExecutor(self.runner, split_mixed=False)
        self.engine = Engine(self.runner, executor=executor, prefix_caching=prefix_caching, exact=exact,
                             end_token_ids=[11])
        self.live = []
        self.alone = {}

    def add(self, stem, tail, **settings):
        prompt = STEM[:stem] + tail
        params = SamplingParams(**settings)
        if len(prompt) + (params.max_tokens or 1) <= self.engine.max_tokens:
            self.live.append(self.engine.add(prompt, params))
            self.runner.plans.clear()

    def step(self):
        self.engine.step()
        finished = [r for r in self.live if r.finished]
        for request in finished:
            self.check_output(request)
        self.live = [r for r in self.live if not r.finished]

    def check_output(self, request):
        """Equal to the request alone in a fresh engine; cut short ones are a beginning of it."""
        p = request.params
        key = (tuple(request.prompt_ids), p.seed, p.temperature, p.n, p.max_tokens)
        if key not in self.alone:
            runner = FakeRunner(page_size=8, vocab_size=29, max_context=40, max_batch=8, prefill_chunk=64)
            limit = request.token_limit - len(request.prompt_ids)
            fields = {"temperature": p.temperature, "seed": p.seed, "n": p.n, "max_tokens": limit}
            [output] = Engine(runner, prefix_caching=False, end_token_ids=[11]).generate(
                [request.prompt_ids], SamplingParams(**fields))
            self.alone[key] = [c.token_ids for c in output.choices]
        for sequence, expected in zip(request.sequences, self.alone[key], strict=True):
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not self.was_cut(sequence):
                assert sequence.output_ids == expected
            else:
                assert sequence.output_ids == expected[:len(sequence.output_ids)]

    @staticmethod
    def was_cut(sequence):
        return sequence.finish_reason is FinishReason.STOP and sequence.stop_token_id is None

    def cancel(self, place):
        request = self.live.pop(place % len(self.live))
        self.engine.cancel(request)
        self.check_output(request)

    def finish_one(self, place):
        running = self.engine.scheduler.running
        if running:
            self.engine.finish(running[place % len(running)], FinishReason.STOP)

    def drain(self):
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < 5000, "the engine does not come to an end"
        pool = self.engine.scheduler.pool
        assert pool.available == pool.total and pool.num_held == 0
        self.engine.scheduler.check()


tails = st.lists(st.integers(0, 28), min_size=1, max_size=12)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.life = None

    @precondition(lambda self: self.life is None)
    @rule(page_size=st.sampled_from([1, 2, 4, 5]), sequences=st.integers(1, 4), max_batch=st.integers(1, 6),
          prefill_chunk=st.integers(1, 12), prefix_caching=st.booleans(), exact=st.booleans())
    def start(self, page_size, sequences, max_batch, prefill_chunk, prefix_caching, exact):
        self.life = Life(page_size, 1 + -(-40 * sequences // page_size) // 2 + 2, max_batch, prefill_chunk,
                         prefix_caching, exact)

    @precondition(lambda self: self.life is not None)
    @rule(stem=st.integers(0, len(STEM)), tail=tails, n=st.integers(1, 4), max_tokens=st.integers(1, 20),
          seed=st.integers(0, 3), temperature=st.sampled_from([0.0, 1.0]))
    def add(self, stem, tail, **settings):
        self.life.add(stem, tail, **settings)

    @precondition(lambda self: self.life is not None and self.life.live)
    @rule(place=st.integers(0, 99))
    def cancel(self, place):
        self.life.cancel(place)

    @precondition(lambda self: self.life is not None and self.life.live)
    @rule(place=st.integers(0, 99))
    def finish_one(self, place):
        self.life.finish_one(place)

    @precondition(lambda self: self.life is not None and self.life.live)
    @rule()
    def fail(self):
        self.life.runner.fail_next = RuntimeError("injected")

    @precondition(lambda self: self.life is not None)
    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.life.step()
            self.life.engine.scheduler.check()

    @invariant()
    def counts_hold(self):
        if self.life is not None:
            self.life.engine.scheduler.check()

    def teardown(self):
        if self.life is not None:
            self.life.drain()


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_10000_steps_of_pressure(seed):
    """2500 engine steps each, with adds, forks, cancels, early finishes and failures in between."""
    rng = random.Random(seed)
    life = Life(page_size=[2, 4, 3, 1][seed], num_pages=[28, 14, 18, 50][seed], max_batch=6,
                prefill_chunk=[5, 16, 8, 11][seed], prefix_caching=seed != 3, exact=seed != 2)
    for step in range(2500):
        while len(life.live) < 10 and rng.random() < 0.7:
            life.add(rng.randrange(len(STEM) + 1), [rng.randrange(29) for _ in range(rng.randrange(1, 12))],
                     n=rng.choice([1, 1, 1, 2, 4]), max_tokens=rng.randrange(1, 15), seed=rng.randrange(3),
                     temperature=rng.choice([0.0, 1.0]))
        if rng.random() < 0.03 and life.live:
            life.cancel(rng.randrange(100))
        if rng.random() < 0.05:
            life.finish_one(rng.randrange(100))
        if rng.random() < 0.005:
            life.runner.fail_next = RuntimeError("injected")
        life.step()
        if step % 10 == 0:
            life.engine.scheduler.check()
    assert life.engine.metrics.preemptions > 20
    assert not life.engine.scheduler.cache.enabled or life.engine.metrics.evictions > 100
    life.drain()
    assert all(s.status is not SequenceStatus.RUNNING for r in life.live for s in r.sequences)
