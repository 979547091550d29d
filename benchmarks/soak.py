"""Clients that come, go and hang up for as long as you like: the server's memory must stay flat and nothing may get stuck.

    python benchmarks/soak.py --bundle build/smollm2.bundle --minutes 30 --out benchmarks/results/soak-$(date +%F).json

Exits with 1 and says why if memory after the first fifth grows by more than 5 %, or a request or a page is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server_process import ended_by_signals

from relaxpack.bench.load import served_bundle
from relaxpack.bench.report import environment

_GROWTH = 1.05


class Crowd:
    """Clients of all kinds: patient ones, ones that leave after a while, ones that reset the connection."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self._host, self._port = parts.hostname, parts.port
        self._rng = random.Random(seed)
        self.sent = self.left = self.bad = 0

    async def run(self, clients: int, until: float) -> None:
        async def client() -> None:
            while time.monotonic() < until:
                await self._ask()
        await asyncio.gather(*(client() for _ in range(clients)))

    async def _ask(self) -> None:
        rng = self._rng
        body = {"prompt": [rng.randrange(3, 400) for _ in range(rng.randrange(1, 120))], "max_tokens": rng.randrange(1, 60),
                "stream": rng.random() < 0.7, "n": rng.choice([1, 1, 2]), "temperature": rng.choice([0, 1.0]),
                "ignore_eos": True}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            self.sent += 1
            if rng.random() < 0.4:
                self.left += 1
                await asyncio.sleep(rng.random())
            else:
                first = await reader.readline()
                self.bad += b" 200 " not in first
                while await reader.read(65536):
                    pass
        except OSError:
            self.bad += 1
        finally:
            writer.transport.abort() if rng.random() < 0.5 else writer.close()


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name.partition("{")[0]: float(value) for name, _, value in
            (line.rpartition(" ") for line in lines if not line.startswith("#"))}


@ended_by_signals()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    problems: list[str] = []
    memory: list[float] = []
    parts: list[dict[str, Any]] = []
    # Few pages, so that all of them have been touched before memory is compared, and eviction never stops.
    with served_bundle(arguments.bundle, ["--num-pages", "256"]) as url:
        for part in range(10):
            crowd = Crowd(url, part)
            before, began = metrics(url), time.monotonic()
            asyncio.run(crowd.run(arguments.clients, time.monotonic() + arguments.minutes * 6))
            seconds = time.monotonic() - began
            time.sleep(2)
            now = metrics(url)
            memory.append(now["process_resident_memory_bytes"] / 1e6)
            cores = (now["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / seconds
            parts.append({"seconds": seconds, "requests": crowd.sent, "left_early": crowd.left, "unanswered": crowd.bad,
                          "memory_mb": memory[-1], "open_files": int(now["process_open_fds"]), "server_cores": cores,
                          "preemptions": int(now["relaxpack_preemptions_total"])})
            print(f"{part + 1}/10: {crowd.sent} requests, {crowd.left} left early, {memory[-1]:.1f} MB, "
                  f"{now['process_open_fds']:.0f} files open, the server used {cores:.2f} cores", flush=True)
            left = {name: now[name] for name in ("relaxpack_running", "relaxpack_waiting", "relaxpack_pages_held",
                                                 "relaxpack_http_in_flight") if now[name]}
            if left:
                problems.append(f"left after part {part + 1}: {left}")
            if crowd.bad:
                problems.append(f"{crowd.bad} requests of part {part + 1} were not answered")
    if memory[-1] > _GROWTH * memory[1]:
        problems.append(f"memory grew from {memory[1]:.1f} to {memory[-1]:.1f} MB")
    if arguments.out is not None:
        result = {"clients": arguments.clients, "minutes": arguments.minutes, "parts": parts, "problems": problems,
                  "environment": environment()}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit("; ".join(problems) or 0)


if __name__ == "__main__":
    main()
