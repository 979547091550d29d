"""A load from several client processes, because one Python process reads no more tokens than one can send."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence

from relaxpack.bench.client import LoadClient, Sample
from relaxpack.bench.load import answer_requests
from relaxpack.bench.workload import LoadRequest

STREAMS_EACH = 16       # of a client process, where there are cores enough
_START, _LATE = 0.2, 60.0       # seconds: from when all processes are there; that a process may take to be there, or to end


def client_processes(streams: int) -> int:
    return max(1, min(streams // STREAMS_EACH, len(os.sched_getaffinity(0)) // 2))


def answer_from(processes: int, url: str, model: str, requests: Sequence[LoadRequest], concurrency: int | None,
                timeout: float) -> tuple[list[Sample], float]:
    """(samples by number, seconds from the start until the last one). As `answer_requests`, greedy and to the full length;
    times are those of one clock. `timeout`: seconds of a request, after which its sample has an error."""
    shares = [None] * processes if concurrency is None else [
        len(range(number, concurrency, processes)) for number in range(processes)]
    context = multiprocessing.get_context("spawn")
    all_there = context.Barrier(processes + 1)
    with context.Pool(processes, all_there.wait, (_LATE,)) as pool:     # leaving it ends them, whatever they do
        all_there.wait(_LATE)
        started = time.perf_counter() + _START
        parts = [pool.apply_async(_answer, (url, model, requests[number::processes], share, started, timeout))
                 for number, share in enumerate(shares)]
        samples = sorted((s for part in parts for s in part.get(timeout + _LATE)), key=lambda s: s.number)
    return samples, max(s.last or 0.0 for s in samples)


def _answer(url: str, model: str, requests: Sequence[LoadRequest], concurrency: int | None, started: float, timeout: float
            ) -> list[Sample]:
    """In a process of its own. The monotonic clock of Linux is the same in all processes."""
    client = LoadClient(url, model=model, timeout=timeout, extra={"temperature": 0.0, "ignore_eos": True})

    async def answer() -> list[Sample]:
        await asyncio.sleep(started - time.perf_counter())
        return await answer_requests(client, requests, started, concurrency)
    return asyncio.run(answer())
