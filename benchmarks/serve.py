"""How much eight clients get out of one server, against one client: total tokens per second of a bundle, over HTTP.

    python benchmarks/serve.py --bundle build/smollm2.bundle --out benchmarks/results/serve-$(date +%F).json

Each case runs several times in turn and the best run counts, because noise of a shared machine only ever slows. Refuses to
measure a busy machine unless --busy is given, and says in the result how busy it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from server_process import ended_by_signals

from relaxpack.bench.client import LoadClient
from relaxpack.bench.load import run_load, served_bundle
from relaxpack.bench.report import ServiceLevel, environment, summary
from relaxpack.bench.workload import Workload

QUIET = 2.5        # load average
_KEPT = ("output_tokens_per_second", "time_to_first_token", "inter_token_latency", "seconds", "output_tokens")


def measure(url: str, streams: int, prompt_tokens: int, output_tokens: int, seed: int) -> dict[str, Any]:
    workload = Workload(streams, seed=seed, concurrency=streams, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
                        max_tokens=1024)
    report = summary(run_load(LoadClient(url, extra={"temperature": 0.0, "ignore_eos": True}), workload), ServiceLevel())
    if report["failed"]:
        sys.exit(f"{report['failed']} requests failed: {report['errors']}")
    return report


def load_average(busy: bool) -> float:
    """Ends the program where others use the machine, unless `busy` is fine."""
    found = os.getloadavg()[0]
    if found > QUIET and not busy:
        sys.exit(f"the load average is {found:.1f}, above {QUIET}: wait, or say --busy")
    return found


@ended_by_signals()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--busy", action="store_true", help="measure even if other processes run")
    arguments = parser.parse_args()
    before = load_average(arguments.busy)
    best: dict[int, dict[str, Any]] = {}
    with served_bundle(arguments.bundle) as url:
        for run in range(arguments.runs):
            for streams in arguments.streams:
                report = measure(url, streams, arguments.prompt_tokens, arguments.output_tokens, seed=run)
                rate = report["output_tokens_per_second"]
                print(f"run {run}: {streams} streams, {rate:.1f} tokens/s", file=sys.stderr)
                if streams not in best or rate > best[streams]["output_tokens_per_second"]:
                    best[streams] = report
    rates = {streams: report["output_tokens_per_second"] for streams, report in best.items()}
    first = min(rates)
    result = {
        "model": best[first]["model"], "prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens,
        "runs": arguments.runs, "streams": {str(n): {key: best[n][key] for key in _KEPT} for n in rates},
        "ratio_to_fewest": {str(n): rate / rates[first] for n, rate in rates.items()}, "load_average_before": before,
        "environment": environment()}
    for n, rate in rates.items():
        print(f"{n} streams: {rate:.1f} tokens/s, {rate / rates[first]:.2f}x of {first}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
