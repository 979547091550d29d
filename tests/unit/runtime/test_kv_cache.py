"""Page pool, prefix cache and scheduler: stories with exact page ids."""

import pytest

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.kv_cache.page_pool import PagePool
from relaxpack.runtime.kv_cache.prefix_cache import PrefixCache, root_digest
from relaxpack.runtime.request import FinishReason, SequenceStatus
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.fakes import FakeRunner


def greedy(max_tokens, **more):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def test_pool_hands_out_ascending_and_never_scratch():
    pool = PagePool(5)
    assert [pool.take() for _ in range(4)] == [1, 2, 3, 4] and pool.available == 0
    pool.release(2)
    pool.release(4)
    assert pool.take() == 4 and pool.take() == 2        # last returned, first reused
    pool.check()


def test_pool_evicts_least_recently_released():
    pool = PagePool(4)
    evicted = []
    pool.on_evict = evicted.append
    for page_id in (pool.take(), pool.take(), pool.take()):
        pool.keep(page_id)
    for page_id in (2, 1, 3):
        pool.release(page_id)
    pool.share(2)
    assert (pool.num_free, pool.num_held, pool.num_cached) == (0, 1, 2)
    assert [pool.take(), pool.take()] == [1, 3] == evicted and pool.available == 0
    pool.check()


def test_pool_refuses_what_would_corrupt_it():
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.release(1)
    with pytest.raises(KeyError):
        pool.share(1)       # free, not cached: its content means nothing
    with pytest.raises(AssertionError, match="must be held"):
        pool.keep(1)
    with pytest.raises(ValueError, match="scratch"):
        PagePool(1)


def test_forget_frees_a_cached_page():
    pool = PagePool(3)
    page_id = pool.take()
    pool.keep(page_id)
    pool.release(page_id)
    pool.forget(page_id)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check()


def cache_with(*chain, page_size=2, num_pages=9):
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, page_size)
    digests = []
    cache.extend_digests(digests, chain, "", len(chain))
    parent = root_digest("")
    for i, digest in enumerate(digests):
        cache.register(pool.take(), digest, parent, chain[i * page_size:(i + 1) * page_size])
        parent = digest
    return pool, cache


@pytest.mark.parametrize(("tokens", "limit", "pages", "partial"), [
    ([1, 2, 3, 4], 4, [1, 2], None),
    ([1, 2, 3, 4], 3, [1], (2, 1)),             # the last token is left to compute: one token of page 2 helps
    ([1, 2, 3, 9], 4, [1], (2, 1)),
    ([1, 2, 9, 4], 4, [1], None),
    ([1, 9], 2, [], (1, 1)),
    ([9, 2, 3, 4], 4, [], None),
    ([3, 4], 2, [], None),                      # equal tokens after another prefix are another page
    ([1, 2, 3, 4, 5, 6, 7], 7, [1, 2, 3], None),
    ([1], 0, [], None),
])
def test_match(tokens, limit, pages, partial):
    _, cache = cache_with(1, 2, 3, 4, 5, 6)
    hit = cache.match(tokens, [], "", limit)
    assert (hit.pages, hit.partial) == (pages, partial)
    assert cache.match(tokens, [], "other salt", limit).pages == []


def test_a_disabled_cache_keeps_nothing():
    pool = PagePool(4)
    cache = PrefixCache(pool, 2, enabled=False)
    cache.register(pool.take(), b"x", root_digest(""), (1, 2))
    assert len(cache) == 0 and cache.match([1, 2], [], "", 2).pages == []
    cache.check()


def test_clear_frees_cached_pages_and_leaves_held_ones():
    pool, cache = cache_with(1, 2, 3, 4)
    pool.release(2)
    cache.clear()
    assert pool.num_held == 1 and pool.num_cached == 0 and len(cache) == 0
    pool.release(1)
    assert pool.num_free == pool.total
    pool.check()
    cache.check()


def test_story_of_two_turns_page_by_page():
    """Page size 4. Turn 1 leaves pages 1, 2 full and page 3 with 1 token; turn 2 shares 1, 2 and copies 3."""
    runner = FakeRunner(page_size=4, num_pages=8)
    engine = Engine(runner)
    prompt = [10, 11, 12, 13, 14, 15, 16]
    [first] = engine.generate([prompt], greedy(3))
    history = prompt + first.choices[0].token_ids       # 10 tokens, 9 computed
    assert [(p.page_id, len(p.token_ids)) for p in engine.scheduler.cache.pages()] == [(1, 4), (2, 4), (3, 1)]
    assert engine.scheduler.pool.cached_pages() == [3, 2, 1]        # the tail goes first
    runner.plans.clear()
    request = engine.add([*history, 20, 21], greedy(2))
    engine.step()
    [step] = runner.plans[0].sequences
    assert runner.plans[0].copies == ((3, 4),)
    assert (list(step.page_ids), step.start, list(step.token_ids)) == ([1, 2, 4], 9, [history[-1], 20, 21])
    assert step.logit_offsets == (2,) and request.cached_tokens == 9
    engine.scheduler.check()


def test_story_of_preemption():
    """Six pages of 2 for two sequences that need 4 and 5: the later one gives way, waits, and finishes after."""
    runner = FakeRunner(page_size=2, num_pages=7, prefill_chunk=8)
    engine = Engine(runner, prefix_caching=False)
    early = engine.add([1, 2, 3], greedy(5))
    late = engine.add([4, 5, 6, 7], greedy(5))
    engine.step()
    assert [list(s.page_ids) for s in runner.plans[0].sequences] == [[1, 2], [3, 4]]
    seen = []
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        seen.append((len(runner.plans[-1].sequences), late.sequences[0].preemptions))
    # early: tokens 4..8, pages 3 and 4 of its own; late: preempted once, when its fourth page was not there
    assert late.sequences[0].preemptions == 1 and early.sequences[0].preemptions == 0
    assert engine.metrics.preemptions == 1
    assert [s.output_ids for s in (early.sequences[0], late.sequences[0])] == [
        runner.reference_greedy([1, 2, 3], 5), runner.reference_greedy([4, 5, 6, 7], 5)]
    assert engine.scheduler.pool.num_free == 6


def test_admission_is_first_come_first_served():
    """A small request does not overtake a large one that waits for pages."""
    runner = FakeRunner(page_size=4, num_pages=9)
    engine = Engine(runner, prefix_caching=False)
    first = engine.add([1] * 20, greedy(4))         # 5 pages, later 6
    large = engine.add([2] * 20, greedy(2))
    small = engine.add([3], greedy(2))
    for _ in range(3):
        engine.step()
    assert first.sequences[0].status is SequenceStatus.RUNNING
    assert [s.request for s in engine.scheduler.waiting] == [large, small]
    order = []
    while engine.has_work:
        order += [e.request for e in engine.step() if e.finish_reason is FinishReason.LENGTH]
    assert order == [first, large, small] or order == [first, small, large]
    assert large.first_token_time <= small.first_token_time


def test_forked_pages_story():
    """Prompt of 6, page size 4: page 1 stays shared, page 2 is copied by all writers but the last."""
    runner = FakeRunner(page_size=4, num_pages=16)
    engine = Engine(runner)
    request = engine.add([1, 2, 3, 4, 5, 6], SamplingParams(seed=1, n=3, max_tokens=6))
    engine.step()
    assert [s.page_ids for s in request.sequences] == [[1, 2]] * 3
    assert engine.scheduler.pool.holders[1:3] == [3, 3]
    engine.step()
    assert runner.plans[1].copies == ((2, 3), (2, 4))
    assert [s.page_ids for s in request.sequences] == [[1, 3], [1, 4], [1, 2]]
    assert engine.scheduler.pool.holders[1:5] == [3, 1, 1, 1]
    engine.finish(request.sequences[1], FinishReason.STOP)
    assert engine.scheduler.pool.holders[1:5] == [2, 1, 1, 0]
    engine.scheduler.check()
    while engine.has_work:
        engine.step()
    assert request.finished and request.sequences[1].finish_reason is FinishReason.STOP


def test_eviction_shortens_the_hit_from_its_tail():
    runner = FakeRunner(page_size=4, num_pages=9)
    engine = Engine(runner)
    prompt = list(range(20))
    engine.generate([prompt], greedy(1))                # 5 pages cached
    engine.generate([[50] * 18], greedy(1))             # takes 3 free ones and evicts the last 2
    [output] = engine.generate([prompt], greedy(1))
    assert output.cached_tokens == 12
    assert engine.metrics.evictions >= 2
