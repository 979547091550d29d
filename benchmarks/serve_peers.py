"""relaxpack's server beside llama.cpp's (`llama-server --parallel 8`): the same GGUF, the same threads, the same requests
over HTTP in OpenAI's completions API, greedy.

    python benchmarks/serve_peers.py --bundle build/smollm2.bundle --llama-server build/llama.cpp/bin/llama-server \\
        --out benchmarks/results/serve_peers-$(date +%F).json

PyPI has no binary of llama-server, but the source of llama-cpp-python has its source:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build/llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build build/llama.cpp --target llama-server

Both servers run all the time and are asked in turn, one after the other, so that a machine that drifts drifts for both.
Reported: medians over the rounds, and the median of the ratios round by round. Refuses to measure a busy machine unless
--busy is given, and says in the result how busy it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu_peers import gguf_path
from serve import load_average, measure
from server_process import ServerFailed, ended_by_signals, running

from relaxpack.bench.load import served_bundle
from relaxpack.bench.report import environment

CONTEXT = 1024      # of each stream
_KEPT = ("output_tokens_per_second", "seconds", "output_tokens", "prompt_tokens", "time_to_first_token",
         "inter_token_latency")


def llama_server(binary: Path, port: int, streams: int, threads: int) -> list[str | Path]:
    return [binary, "--model", gguf_path(), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(streams),
            "--ctx-size", str(streams * CONTEXT), "--threads", str(threads), "--threads-batch", str(threads), "--no-webui"]


def version(binary: Path) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60)
    return " ".join((done.stdout + done.stderr).split()[:6])


@ended_by_signals()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--llama-server", type=Path, required=True, metavar="PATH", help="its binary")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--busy", action="store_true", help="measure even if other processes run")
    arguments = parser.parse_args()
    before = load_average(arguments.busy)
    threads = len(os.sched_getaffinity(0))
    rounds: list[dict[str, dict[str, Any]]] = []
    with served_bundle(arguments.bundle) as ours, tempfile.NamedTemporaryFile() as log, \
            running(lambda port: llama_server(arguments.llama_server, port, max(arguments.streams), threads),
                    Path(log.name), 120) as theirs:
        urls = {"relaxpack": ours, "llama.cpp": theirs.url}
        for url in urls.values():       # the first run of each warms up
            measure(url, max(arguments.streams), arguments.prompt_tokens, 16, seed=1000)
        for number in range(arguments.rounds):
            this: dict[str, dict[str, Any]] = {}
            for streams in arguments.streams:
                for system, url in urls.items() if number % 2 == 0 else reversed(urls.items()):
                    report = measure(url, streams, arguments.prompt_tokens, arguments.output_tokens, seed=number)
                    this.setdefault(str(streams), {})[system] = {key: report[key] for key in _KEPT}
                    print(f"round {number}: {streams} streams, {system}: {report['output_tokens_per_second']:.1f} tokens/s",
                          file=sys.stderr)
            rounds.append(this)
    result = {"prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens, "threads": threads,
              "llama_server": version(arguments.llama_server), "median": medians(rounds), "rounds": rounds,
              "load_average_before": before, "environment": environment()}
    for streams, values in result["median"].items():
        print(f"{streams} streams: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def medians(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """By number of streams: tokens per second of each system, their ratio, and each one's gain over the fewest streams."""
    rate = "output_tokens_per_second"
    fewest = next(iter(rounds[0]))
    found = {}
    for streams, systems in rounds[0].items():
        values = {system: statistics.median(r[streams][system][rate] for r in rounds) for system in systems}
        values["ratio"] = statistics.median(
            r[streams]["relaxpack"][rate] / r[streams]["llama.cpp"][rate] for r in rounds)
        values |= {f"gain of {system}": statistics.median(r[streams][system][rate] / r[fewest][system][rate] for r in rounds)
                   for system in systems}
        found[streams] = values
    return found


if __name__ == "__main__":
    try:
        main()
    except ServerFailed as error:
        sys.exit(f"llama.cpp's server {error}")
