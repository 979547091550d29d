"""What the prefix cache saves: time to the first token of prompts that share their first 4096 tokens, the first of them
(cold) and another one (warm), in the engine and over HTTP.

    python benchmarks/prefix.py --bundle build/smollm2.bundle --out benchmarks/results/prefix-$(date +%F).json

Every round has a shared prefix of its own; medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from server_process import ended_by_signals

from relaxpack.bench.client import LoadClient
from relaxpack.bench.load import served_bundle
from relaxpack.bench.report import environment
from relaxpack.llm import LLM
from relaxpack.runtime.sampling_params import SamplingParams

OWN = 32        # tokens of each prompt behind the shared ones


def prompts(shared: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    prefix = [draw.randrange(100, 48000) for _ in range(shared)]
    return [[*prefix, *(draw.randrange(100, 48000) for _ in range(OWN))] for _ in range(2)]


def in_the_engine(bundle: str, shared: int, rounds: int) -> list[dict[str, float]]:
    """Seconds to the first token, by `cold` and `warm`; the tokens that were found in the cache."""
    engine = LLM(bundle).engine
    one = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.generate([[5] * 600], one)       # the first step of each kind warms up
    found = []
    for seed in range(rounds):
        cold, warm = (engine.generate([prompt], one)[0] for prompt in prompts(shared, seed))
        assert cold.time_to_first_token is not None and warm.time_to_first_token is not None
        found.append({"cold": cold.time_to_first_token, "warm": warm.time_to_first_token,
                      "cached_tokens": warm.cached_tokens})
    return found


def over_http(bundle: str, shared: int, rounds: int) -> list[dict[str, float]]:
    async def ask(client: LoadClient, prompt: list[int]) -> Any:
        started = time.perf_counter()
        sample = await client.complete(0, prompt, 2, started, 0.0)
        if sample.error is not None or sample.first is None:
            sys.exit(f"the server failed: {sample.error}")
        return sample

    found = []
    with served_bundle(bundle) as url:
        client = LoadClient(url, extra={"temperature": 0.0, "ignore_eos": True})
        asyncio.run(ask(client, [5] * 600))
        for seed in range(rounds):
            cold, warm = (asyncio.run(ask(client, prompt)) for prompt in prompts(shared, seed))
            found.append({"cold": cold.first, "warm": warm.first, "cached_tokens": warm.cached_tokens})
    return found


@ended_by_signals()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--shared", type=int, default=4096, help="tokens that the prompts share")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"shared_tokens": arguments.shared, "own_tokens": OWN}
    for where, measure in (("engine", in_the_engine), ("http", over_http)):
        rounds = measure(arguments.bundle, arguments.shared, arguments.rounds)
        cold, warm = (statistics.median(r[kind] for r in rounds) for kind in ("cold", "warm"))
        result[where] = {"cold": cold, "warm": warm, "falls_by": 1 - warm / cold, "rounds": rounds}
        print(f"{where}: {cold * 1e3:.0f} ms cold, {warm * 1e3:.0f} ms warm: {1 - warm / cold:.1%} less")
    result["environment"] = environment()
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
