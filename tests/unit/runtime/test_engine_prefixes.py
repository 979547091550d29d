"""Pages that requests share: what is a hit, what a hit saves, and that outputs stay those of the run alone."""

import pytest

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.engine import GREEDY, idle, prompts_of
from tests.helpers.fakes import FakeRunner


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("offset", ["1", "page-1", "page", "page+1", "2*page"])
def test_513_copies_of_one_prompt(page_size, offset):
    """C30: equal prompts around a page boundary; a full hit still computes the last token."""
    length = max(1, eval(offset, {"page": page_size}))
    runner = FakeRunner(page_size=page_size, num_pages=40 * 64 // page_size, max_batch=16, prefill_chunk=128)
    engine = Engine(runner)
    [prompt] = prompts_of([length])
    outputs = engine.generate([prompt] * 513, SamplingParams(temperature=0.0, max_tokens=3))
    expected = runner.reference_greedy(prompt, 3)
    assert all(o.choices[0].token_ids == expected for o in outputs)
    assert outputs[-1].cached_tokens == max(0, length - 2)      # a prompt's end takes two tokens
    assert idle(engine)


def test_second_turn_prefills_only_its_new_part():
    """C33: the ids of turn 1 are the beginning of turn 2, up to the middle of a page."""
    runner = FakeRunner(page_size=4)
    engine = Engine(runner)
    [turn1] = prompts_of([10])
    [first] = engine.generate([turn1], SamplingParams(temperature=0.0, max_tokens=9))
    history = turn1 + first.choices[0].token_ids
    turn2 = [*history, 11, 12, 13]
    runner.plans.clear()
    [second] = engine.generate([turn2], GREEDY)
    # 19 tokens of history; the last output token was never computed: it and 3 new ones are left.
    assert second.cached_tokens == 18
    assert len(runner.plans[0].sequences[0].token_ids) == 4 and runner.plans[0].sequences[0].start == 18
    assert second.choices[0].token_ids == runner.reference_greedy(turn2, 12)


def test_prefix_hit_stops_at_the_first_differing_token():
    runner = FakeRunner(page_size=4, num_pages=256)
    engine = Engine(runner)
    [prompt] = prompts_of([16])
    engine.generate([prompt], GREEDY)
    for place in range(16):
        other = [*prompt[:place], (prompt[place] + 1) % 97, *prompt[place + 1:]]
        [output] = engine.generate([other], GREEDY)
        assert output.cached_tokens >= min(place, 14)
        assert output.choices[0].token_ids == runner.reference_greedy(other, 12)


def test_salt_separates_caches():
    engine = Engine(FakeRunner())
    [prompt] = prompts_of([20])
    assert engine.generate([prompt], GREEDY, salt="a")[0].cached_tokens == 0
    assert engine.generate([prompt], GREEDY, salt="b")[0].cached_tokens == 0
    assert engine.generate([prompt], GREEDY, salt="a")[0].cached_tokens == 18


def test_shared_prefix_saves_90_percent_of_prefill():
    runner = FakeRunner(page_size=16, num_pages=400, prefill_chunk=512, max_context=5000)
    engine = Engine(runner)
    shared, *tails = prompts_of([4096, 7, 20, 33])
    engine.generate([shared + tails[0]], GREEDY)
    for tail in tails[1:]:
        runner.plans.clear()
        [output] = engine.generate([shared + tail], SamplingParams(temperature=0.0, max_tokens=1))
        assert sum(len(s.token_ids) for plan in runner.plans for s in plan.sequences) == len(tail)
        assert output.cached_tokens == 4096


def test_n_outputs_fork_and_copy_on_write():
    runner = FakeRunner(page_size=4)
    engine = Engine(runner)
    [prompt] = prompts_of([6])
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10)
    [output] = engine.generate([prompt], params)
    assert sum(len(s.token_ids) for s in runner.plans[0].sequences) == 6        # the prompt is computed once
    assert len(runner.plans[1].copies) == 2                                     # its open page copied for two
    alone = [Engine(FakeRunner(page_size=16)).generate([prompt], params)[0].choices[i].token_ids for i in range(3)]
    assert [c.token_ids for c in output.choices] == alone
    assert len({tuple(c.token_ids) for c in output.choices}) == 3
    assert idle(engine)


def test_n_larger_than_the_batch():
    runner = FakeRunner(max_batch=2)
    engine = Engine(runner)
    [output] = engine.generate([[1, 2, 3, 4, 5]], SamplingParams(temperature=0.0, n=5, max_tokens=8))
    assert [c.token_ids for c in output.choices] == [runner.reference_greedy([1, 2, 3, 4, 5], 8)] * 5
    assert idle(engine)
