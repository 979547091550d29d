"""One engine, many threads and tasks: every stream ends, nothing is lost, pages come back."""

import asyncio
import gc
import threading

import pytest

from relaxpack.errors import RelaxpackError, RequestError
from relaxpack.runtime.async_engine import AsyncEngine, EngineClosed
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.tokenizer import TextInfo, Tokenizer
from tests.helpers.engine import idle
from tests.helpers.fakes import FakeRunner
from tests.helpers.text import byte_level_json
from tests.helpers.waiting import DEADLINE, eventually

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture
def tokenizer():
    return Tokenizer(byte_level_json(), TextInfo())


def runner_for(tokenizer, **more):
    return FakeRunner(vocab_size=tokenizer.vocab_size, num_pages=200, **more)


def test_threads_share_one_engine():
    runner = FakeRunner(num_pages=40, max_batch=8)
    engine = Engine(runner)
    results = {}
    with AsyncEngine(engine) as shared:
        def client(number):
            for turn in range(5):
                prompt = [number, turn, 3]
                results[number, turn] = shared.submit(prompt, GREEDY).collect()[0]

        threads = [threading.Thread(target=client, args=(n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=DEADLINE)
    assert len(results) == 100
    for (number, turn), piece in results.items():
        assert piece.token_ids == runner.reference_greedy([number, turn, 3], 12) and piece.finish_reason == "length"
    assert idle(engine)


def test_asyncio_clients_and_n_outputs():
    runner = FakeRunner(num_pages=60, max_batch=8)

    async def main():
        with AsyncEngine(Engine(runner)) as shared:
            streams = [shared.submit([i, 5], SamplingParams(temperature=0.0, max_tokens=9, n=1 + i % 3))
                       for i in range(50)]
            return await asyncio.gather(*[s.collect_async() for s in streams])

    for i, pieces in enumerate(asyncio.run(main())):
        assert [p.token_ids for p in pieces] == [runner.reference_greedy([i, 5], 9)] * (1 + i % 3)


def test_text_streams_and_joins_to_the_whole(tokenizer):
    runner = runner_for(tokenizer)
    with AsyncEngine(Engine(runner), tokenizer) as shared:
        pieces = list(shared.submit([1, 2, 3], GREEDY))
    ids = runner.reference_greedy([1, 2, 3], 12)
    assert [t for p in pieces for t in p.token_ids] == ids
    assert "".join(p.text for p in pieces) == tokenizer.decode(ids)
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_reader_that_keeps_up_gets_single_tokens_and_a_slow_one_what_waits(tokenizer):
    runner = runner_for(tokenizer)
    ids = runner.reference_greedy([1, 2, 3], 12)
    for stop in ((), ("never said",)):       # text made by the reader, or by the engine
        with AsyncEngine(Engine(runner), tokenizer) as shared, runner.gate.held(5) as gate:
            stream = shared.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12, stop=stop))
            eventually(lambda: gate.holds)
            pieces = [next(stream)]
            for _ in range(3):
                gate.allow(1)
                pieces.append(next(stream))
                eventually(lambda: gate.holds)
            gate.allow(None)
            eventually(lambda: stream.request.finished)
            pieces += stream
        assert [p.token_ids for p in pieces] == [ids[:5], ids[5:6], ids[6:7], ids[7:8], ids[8:]]
        assert [p.finish_reason for p in pieces] == [None] * 4 + ["length"]
        assert "".join(p.text for p in pieces) == tokenizer.decode(ids)


def test_what_waits_is_merged_for_each_of_several_outputs(tokenizer):
    runner = runner_for(tokenizer)
    ids = runner.reference_greedy([1, 2, 3], 100)
    for stop in ((), ("never said",)):
        with AsyncEngine(Engine(runner), tokenizer) as shared:
            stream = shared.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=100, n=3, stop=stop))
            eventually(lambda: stream.request.finished)
            pieces = list(stream)
        assert [p.index for p in pieces] == [0, 1, 2] * 2       # and never more at once than others can wait for
        assert [p.token_ids for p in pieces] == [ids[:64]] * 3 + [ids[64:]] * 3
        assert [p.finish_reason for p in pieces] == [None] * 3 + ["length"] * 3


def test_an_error_comes_apart_from_the_tokens_before_it(tokenizer):
    runner = runner_for(tokenizer)
    with AsyncEngine(Engine(runner), tokenizer) as shared, runner.gate.held(3) as gate:
        stream = shared.submit([1, 2, 3], GREEDY)
        eventually(lambda: gate.holds)
        runner.fail_next = RuntimeError("gone wrong")
        gate.allow(None)
        eventually(lambda: stream.request.finished)
        tokens, error = stream
    assert tokens.token_ids == runner.reference_greedy([1, 2, 3], 3) and tokens.finish_reason is None and tokens.text
    assert error.finish_reason == "error" and "gone wrong" in error.error and not error.token_ids


def test_end_token_has_no_text(tokenizer):
    runner = runner_for(tokenizer)
    ids = runner.reference_greedy([1, 2, 3], 6)
    assert ids[5] not in ids[:5]
    with AsyncEngine(Engine(runner, end_token_ids=[ids[5]]), tokenizer) as shared:
        [piece] = shared.submit([1, 2, 3], GREEDY).collect()
    assert piece.token_ids == ids and piece.stop == ids[5] and piece.finish_reason == "stop"
    assert piece.text == tokenizer.decode(ids[:5])


def test_stop_string_ends_the_output_at_once_and_is_never_sent(tokenizer):
    """C23, at the engine: nothing of the stop string leaves, and the pages are back."""
    runner = runner_for(tokenizer)
    whole = tokenizer.decode(runner.reference_greedy([1, 2, 3], 40))
    start = len(whole) // 2
    stop = whole[start:start + 4]
    engine = Engine(runner)
    with AsyncEngine(engine, tokenizer) as shared:
        params = SamplingParams(temperature=0.0, max_tokens=100, stop=(stop,), n=2)
        pieces = shared.submit([1, 2, 3], params).collect()
    for piece in pieces:
        assert piece.text == whole[:whole.index(stop)]
        assert piece.finish_reason == "stop" and piece.stop == stop and len(piece.token_ids) <= 40
    assert idle(engine)


def test_stop_strings_without_tokenizer_are_refused():
    with AsyncEngine(Engine(FakeRunner())) as shared, pytest.raises(RelaxpackError, match="tokenizer"):
        shared.submit([1], SamplingParams(stop="x"))


def test_bad_requests_raise_where_they_are_made():
    with AsyncEngine(Engine(FakeRunner(num_pages=100))) as shared:
        with pytest.raises(RequestError, match="prompt is empty"):
            shared.submit([], GREEDY)
        first = shared.submit([1, 2], SamplingParams(temperature=0.0), request_id="same")
        [piece] = shared.submit([1, 3], GREEDY, request_id="same").collect()
        assert piece.finish_reason == "error" and "'same'" in piece.error
        assert len(first.collect()[0].token_ids) == 254     # the one that was there first is untouched


def test_cancel_gives_pages_back_within_two_steps():
    runner = FakeRunner()
    engine = Engine(runner)
    with AsyncEngine(engine) as shared, runner.gate.held(4) as gate:
        with shared.submit([1, 2, 3], SamplingParams(temperature=0.0)) as stream:
            eventually(lambda: gate.holds)
            before = engine.metrics.steps
        gate.allow(2)
        rest = list(stream)
        assert rest[-1].finish_reason == "abort" and engine.metrics.steps <= before + 2
        assert shared.call(lambda e: e.scheduler.pool.num_held).result(DEADLINE) == 0


def test_abandoned_async_readers_are_cancelled():
    runner = FakeRunner(num_pages=200)
    engine = Engine(runner)

    async def client(shared, i):
        async with shared.submit([i, 2], SamplingParams(temperature=0.0)) as stream:
            async for _ in stream:
                await asyncio.sleep(0)

    async def main():
        with AsyncEngine(engine) as shared:
            with runner.gate.held(30) as gate:      # in the middle of the answers
                tasks = [asyncio.create_task(client(shared, i)) for i in range(20)]
                await asyncio.to_thread(eventually, lambda: gate.holds)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            assert await asyncio.wrap_future(shared.call(lambda e: e.scheduler.pool.num_held)) == 0

    asyncio.run(main())
    assert engine.metrics.finished == {"abort": 20}


def test_a_failing_step_reaches_its_readers_and_the_engine_goes_on():
    runner = FakeRunner()
    with AsyncEngine(Engine(runner)) as shared:
        runner.fail_next = RuntimeError("device lost")
        [piece] = shared.submit([1, 2], GREEDY).collect()
        assert piece.finish_reason == "error" and "device lost" in piece.error
        assert shared.healthy
        assert shared.submit([1, 2], GREEDY).collect()[0].token_ids == runner.reference_greedy([1, 2], 12)


def test_a_bug_in_the_loop_ends_every_stream(monkeypatch):
    runner = FakeRunner()
    engine = Engine(runner)
    shared = AsyncEngine(engine)

    def broken():
        raise ValueError("planted")

    with runner.gate.held(5) as gate:
        streams = [shared.submit([i, 2], SamplingParams(temperature=0.0), request_id=f"r{i}") for i in range(12)]
        eventually(lambda: gate.holds)
        monkeypatch.setattr(engine.scheduler, "plan", broken)
    for stream in streams:
        last = list(stream)[-1]
        assert last.finish_reason == "error" and "planted" in last.error
    shared._thread.join(DEADLINE)
    assert not shared.healthy
    with pytest.raises(EngineClosed, match="planted"):
        shared.submit([1], GREEDY)
    shared.close()


def test_close_drains_what_runs_and_refuses_the_rest():
    runner = FakeRunner(delay=0.001)
    engine = Engine(runner)
    shared = AsyncEngine(engine)
    streams = [shared.submit([i], GREEDY) for i in range(10)]
    shared.close(drain_seconds=DEADLINE)
    assert [s.collect()[0].finish_reason for s in streams] == ["length"] * 10
    with pytest.raises(EngineClosed, match="shutting down"):
        shared.submit([1], GREEDY)
    assert idle(engine)


def test_close_without_draining_aborts_at_once():
    runner = FakeRunner(max_context=4000, num_pages=1200)
    engine = Engine(runner)
    shared = AsyncEngine(engine)
    with runner.gate.held(5) as gate:
        streams = [shared.submit([i], SamplingParams(temperature=0.0)) for i in range(12)]
        eventually(lambda: gate.holds)
        closing = threading.Thread(target=shared.close)
        closing.start()
        eventually(lambda: not shared.healthy)
        steps = engine.metrics.steps
        gate.allow(2)
        closing.join(DEADLINE)
        assert not closing.is_alive() and engine.metrics.steps <= steps + 2
    assert [s.collect()[0].finish_reason for s in streams] == ["abort"] * 12
    assert idle(engine)


def test_a_closed_event_loop_does_not_stop_the_engine():
    engine = Engine(FakeRunner(delay=0.001))
    shared = AsyncEngine(engine)

    async def leave_early():
        stream = shared.submit([1, 2], SamplingParams(temperature=0.0))
        await anext(stream)

    asyncio.run(leave_early())
    assert shared.submit([3], GREEDY).collect()[0].finish_reason == "length"
    shared.close()


def test_no_request_is_kept_after_its_end():
    with AsyncEngine(Engine(FakeRunner())) as shared:
        for i in range(30):
            shared.submit([i], GREEDY).collect()
        assert shared.call(lambda e: (len(shared._streams), len(e._requests))).result(DEADLINE) == (0, 0)
        gc.collect()
