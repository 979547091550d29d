"""What HTTP costs the server: processor time per streamed token of `N` clients at once, over an engine whose device takes
a given time for a step and computes nothing.

    python benchmarks/http_overhead.py [--streams 1 8 32 128] [--step-ms 0 1.7 7.5]
        [--json > benchmarks/results/http_overhead-$(date +%F).json]

The server is a process of its own, the client reads bytes and counts, so it costs little. One Python process runs on one
core at a time: a second of it, over the time per token, is the most tokens per second that the server can send. On a busy
machine trust these processor times and the tokens per chunk, not the tokens per second.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine_overhead import CountingDevice
from gpu.random_bundle import tokenizer_json
from server_process import ended_by_signals

from relaxpack.bench.report import environment
from relaxpack.runtime.async_engine import AsyncEngine
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.server.limits import Limits
from relaxpack.runtime.server.model import ServedModel
from relaxpack.runtime.server.serve import listen, serve, url_of
from relaxpack.runtime.step_plan import StepPlan, StepResult, StepSampling
from relaxpack.runtime.tokenizer import Tokenizer

PROMPT = 16     # tokens


class PacedDevice(CountingDevice):
    """Answers a step after so many seconds, in which no Python runs."""

    vocab_size = 1000

    def __init__(self, batch: int, tokens: int, seconds: float) -> None:
        super().__init__(batch, tokens)
        self._seconds = seconds

    def submit(self, plan: StepPlan, sampling: StepSampling) -> PacedDevice:
        super().submit(plan, sampling)
        self._done = time.perf_counter() + self._seconds
        return self

    def result(self) -> StepResult:
        if (left := self._done - time.perf_counter()) > 0:
            time.sleep(left)
        return super().result()


def run_server(streams: int, tokens: int, seconds: float, profile: bool) -> None:
    """Serve until a signal; the URL goes to stdout."""
    device = PacedDevice(streams, PROMPT + tokens, seconds)
    tokenizer = Tokenizer(tokenizer_json(device.vocab_size).decode())
    model = ServedModel(AsyncEngine(Engine(device, executor=device), tokenizer), tokenizer, ["counting"])
    listener = listen("127.0.0.1", 0)
    profiler = cProfile.Profile(time.thread_time) if profile else None
    if profiler is not None:
        profiler.enable()
    serve(model, listener, Limits(max_concurrent=streams), on_ready=lambda: print(url_of(listener), flush=True))
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor time by thread name; the main thread, which speaks HTTP, is "http"."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "http" if task.name == str(pid) else "others"
        found[name] = found.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def read_streams(url: str, streams: int, tokens: int) -> tuple[float, int]:
    """(seconds, chunks) until `streams` requests sent at once have all been answered."""
    where = urlsplit(url)
    waiting = selectors.DefaultSelector()
    started = time.perf_counter()
    for number in range(streams):
        body = json.dumps({"prompt": [number % 900 + 3] * PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                           "stream": True}).encode()
        connection = socket.create_connection((where.hostname, where.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        waiting.register(connection, selectors.EVENT_READ, [])
    chunks = done = 0
    while done < streams:
        for key, _ in waiting.select():
            part = key.fileobj.recv(1 << 16)        # type: ignore[union-attr]
            key.data.append(part)
            if not part:
                answer = b"".join(key.data)
                if not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") or answer.count(b"t7") != tokens:
                    sys.exit(f"an answer is not whole: {answer[:200]!r} ... {answer[-200:]!r}")
                chunks += answer.count(b"data: {")
                done += 1
                waiting.unregister(key.fileobj)
                key.fileobj.close()                 # type: ignore[union-attr]
    return time.perf_counter() - started, chunks


def measure(streams: int, tokens: int, step_ms: float, runs: int, profile: bool = False) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", str(streams), "--tokens", str(tokens), "--step-ms", str(step_ms),
               *(["--profile"] if profile else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            sys.exit("the server did not start")
        read_streams(url, streams, 8)
        best: dict[str, Any] = {}
        for _ in range(runs):
            before = thread_seconds(process.pid)
            seconds, chunks = read_streams(url, streams, tokens)
            spent = {name: value - before.get(name, 0.0) for name, value in thread_seconds(process.pid).items()}
            made = streams * tokens
            cpu = 1e6 * sum(spent.values()) / made
            if not best or cpu < best["us_per_token"]:
                best = {"streams": streams, "tokens": tokens, "step_ms": step_ms, "us_per_token": round(cpu, 1),
                        "us_by_thread": {k: round(1e6 * v / made, 1) for k, v in spent.items() if v > 0},
                        "tokens_per_second_of_a_core": round(1e6 / cpu), "tokens_per_second": round(made / seconds),
                        "tokens_per_chunk": round(made / chunks, 2)}
        return best
    finally:
        process.terminate()
        process.wait(60)


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def milliseconds(text: str) -> float:
    if not 0 <= float(text) < 1e6:
        raise ValueError
    return float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=at_least_one, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=at_least_one, default=256, help="of each answer")
    parser.add_argument("--step-ms", type=milliseconds, nargs="+", default=[0.0], help="that the device takes for a step")
    parser.add_argument("--runs", type=at_least_one, default=3)
    parser.add_argument("--profile", action="store_true", help="cProfile of the thread that speaks HTTP, to stderr")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_server(args.serve, args.tokens, args.step_ms[0] / 1e3, args.profile)
        return
    with ended_by_signals():
        rows = [measure(streams, args.tokens, step_ms, args.runs, args.profile)
                for step_ms in args.step_ms for streams in args.streams]
    if args.json:
        print(json.dumps({"rows": rows, "environment": environment()}, indent=2))
        return
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
