"""Runs a workload against a server, open loop (arrivals whatever the server does) or closed loop (so many at once).

In an open loop a request counts from when it was due, not from when it could be sent, so a server that stalls cannot
hide it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relaxpack.bench.client import LoadClient, Sample
from relaxpack.bench.workload import LoadRequest, Workload, requests_of
from relaxpack.errors import EnvironmentProblem

_URL = re.compile(r" at (http://\S+)/v1,")


@dataclass(frozen=True)
class Run:
    samples: list[Sample]
    seconds: float
    model: dict[str, Any]       # the server's entry in /v1/models
    workload: Workload          # with the server's context applied


def run_load(client: LoadClient, workload: Workload, *, warmup: int = 1,
             progress: Callable[[int], None] = lambda done: None) -> Run:
    return asyncio.run(_run(client, workload, warmup, progress))


async def _run(client: LoadClient, workload: Workload, warmup: int, progress: Callable[[int], None]) -> Run:
    model = await client.describe()
    limit = model.get("max_model_len") or workload.max_tokens
    workload = replace(workload, max_tokens=min(workload.max_tokens, limit))
    requests = list(requests_of(workload))
    for number in range(warmup):
        sample = await client.complete(-1, f"warm up {number} and so on", 4, time.perf_counter(), 0.0)
        if sample.error is not None:
            raise EnvironmentProblem(f"the server cannot answer the first request: {sample.error}")
    started = time.perf_counter()
    samples = await answer_requests(client, requests, started, workload.concurrency, progress)
    return Run(sorted(samples, key=lambda s: s.number), time.perf_counter() - started, model, workload)


async def answer_requests(client: LoadClient, requests: Sequence[LoadRequest], started: float, concurrency: int | None,
                          progress: Callable[[int], None] = lambda done: None) -> list[Sample]:
    """Samples in the order of their ends. `started` is `time.perf_counter()` at second 0 of the run. `concurrency`: requests
    at once; None: each when it is due."""
    samples: list[Sample] = []

    async def one(request: LoadRequest, due: float) -> None:
        samples.append(await client.complete(request.number, request.prompt, request.output_tokens, started, due))
        progress(len(samples))
    if concurrency is None:
        await _open_loop(requests, one, started)
    else:
        await _closed_loop(requests, one, started, concurrency)
    return samples


async def _open_loop(requests: Sequence[LoadRequest], one: Callable[[LoadRequest, float], Any], started: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            await asyncio.sleep(max(0.0, started + request.arrival - time.perf_counter()))
            tasks.create_task(one(request, request.arrival))


async def _closed_loop(requests: Sequence[LoadRequest], one: Callable[[LoadRequest, float], Any], started: float,
                       concurrency: int) -> None:
    pending = iter(requests)

    async def worker() -> None:
        for request in pending:
            await one(request, time.perf_counter() - started)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())


@contextlib.contextmanager
def served_bundle(bundle: str, options: Sequence[str] = ()) -> Iterator[str]:
    """`relaxpack serve` in a process of its own; gives its URL."""
    process = subprocess.Popen([sys.executable, "-m", "relaxpack", "serve", bundle, "--port", "0", *options],
                               stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    drain = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    try:
        for line in process.stderr:
            said.append(line)
            if found := _URL.search(line):
                drain.start()       # or the server stands still once the pipe is full
                yield found[1]
                break
        else:
            raise EnvironmentProblem(f"the server did not start: {' '.join(''.join(said).split())[-500:]}")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if drain.ident is not None:     # it reads to the end of what the server said
            drain.join()
        process.stderr.close()
