"""Many clients at once: every answer equals the one it gets alone, while pages run out all the time."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import httpx

from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.server.answers import ChatOutput, CompletionOutput
from relaxpack.runtime.server.serve import background
from relaxpack.runtime.server.stream import merged
from relaxpack.runtime.server.translate import Job
from tests.helpers.server import gate_of, hash_model
from tests.helpers.waiting import DEADLINE, eventually


def requests(count, rng):
    """Prompts that share prefixes, of lengths around the page size, with some sampled ones among them."""
    shared = [rng.randrange(3, 400) for _ in range(24)]
    for number in range(count):
        own = [rng.randrange(3, 400) for _ in range(rng.randrange(1, 12))]
        body = {"prompt": shared[:rng.choice([0, 4, 15, 24])] + own, "max_tokens": rng.randrange(1, 30), "stream": True,
                "temperature": 0 if number % 3 else 1.2, "seed": number, "n": 1 + number % 2}
        yield body


async def ask(client, body, gate):
    """Texts of the outputs, put together from the stream."""
    async with gate:
        texts = [""] * body["n"]
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            last = None
            async for line in response.aiter_lines():
                if line:
                    last = line.removeprefix("data: ")
                    for choice in json.loads(last)["choices"] if last != "[DONE]" else ():
                        texts[choice["index"]] += choice["text"]
        assert last == "[DONE]"
        return texts


async def all_of(url, bodies, at_once):
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, limits=limits) as client:
        gate = asyncio.Semaphore(at_once)
        return await asyncio.gather(*(ask(client, body, gate) for body in bodies))


def test_fifty_streams_at_once_equal_one_after_the_other():
    bodies = list(requests(200, random.Random(3)))
    # Pages for a few sequences, so that eviction and preemption never stop, and no step before a crowd has gathered.
    model = hash_model(page_size=4, num_pages=64, max_batch=16, delay=0.001)
    with background(model) as server, gate_of(model).held(0) as gate:
        def open_for_a_crowd():
            eventually(lambda: server.state.counts.in_flight == 50)
            gate.allow(None)
        opener = threading.Thread(target=open_for_a_crowd)
        opener.start()
        crowd = asyncio.run(all_of(server.url, bodies, 50))
        opener.join()
        metrics = model.engine.metrics
        assert metrics.preemptions > 0 and metrics.evictions > 0
        assert metrics.pages_held == 0 and metrics.pages_free + metrics.pages_cached == metrics.pages_total
    with background(hash_model(page_size=4, num_pages=64, max_batch=16)) as server:
        alone = asyncio.run(all_of(server.url, bodies, 1))
    assert crowd == alone


def test_disconnects_in_a_crowd_leave_nothing_behind(caplog):
    rng = random.Random(5)
    model = hash_model(page_size=4, num_pages=100, max_batch=8, delay=0.001)

    async def leave_early(client, body):
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                if rng.random() < 0.3:
                    return

    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, limits=httpx.Limits(max_connections=30)) as client:
            await asyncio.gather(*(leave_early(client, {**body, "max_tokens": 60}) for body in requests(120, rng)))
    with background(model) as server:
        asyncio.run(main(server.url))
        metrics = model.engine.metrics
        eventually(lambda: server.state.counts.in_flight == 0
                   and metrics.pages_held == metrics.running == metrics.waiting == 0)
        assert metrics.finished["abort"] > 20
        assert "socket.send" not in caplog.text      # asyncio complains where one goes on writing to a client that left
        model.engine.call(lambda engine: engine.scheduler.check()).result(DEADLINE)


def test_tokens_of_several_prompts_wait_merged():
    model = hash_model()

    async def main():
        streams = [model.engine.submit([number, 3], SamplingParams(temperature=0.0, max_tokens=60)) for number in range(3)]
        pieces = merged(streams, 1)
        got = [await anext(pieces)]
        await asyncio.to_thread(eventually, lambda: all(stream.request.finished for stream in streams))
        return [*got, *[piece async for piece in pieces]]
    with model.engine:
        pieces = asyncio.run(main())
    assert sum(len(piece.token_ids) for _, piece in pieces) == 180
    assert len(pieces) <= 3 * 4     # one of each was read before, one is under way, and the rest is in one


def test_a_stream_keeps_no_log_probabilities_that_have_gone_out():
    """Twenty likely tokens of each token are kilobytes, and an answer may be as long as the context."""
    model = hash_model()
    with model.engine:
        for stream in (True, False):
            job = Job([[1, 2]], SamplingParams(max_tokens=30, logprobs=20), stream, False, False, "").submit(model)
            outputs = [kind.of(0, job, model.tokenizer) for kind in (ChatOutput, CompletionOutput)]
            for piece in job.streams[0]:
                for output in outputs:
                    output.add(piece)
            chat, completion = (output.whole()["logprobs"] for output in outputs)
            assert len(chat["content"]) == len(completion["tokens"]) == (0 if stream else 30)
