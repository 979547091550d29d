"""On a GPU machine: relaxpack's server beside vLLM's, whole and over HTTP: the same model shape, the same requests, one
after the other on the same GPU. Greedy; every prompt is other random token ids, so that no prefix cache helps.

    python benchmarks/gpu/serve_peers.py FOLDER --model llama-3.1-8b --peer none --out OUT.json
    python benchmarks/gpu/serve_peers.py FOLDER --model llama-3.1-8b --peer vllm --only peer --peer-site SITE --out OUT.json

FOLDER has what `build_models.py` made. Weights come from a seed here (`random_bundle.py`), and vLLM makes its own. Cases: a
closed loop of 1, 8, 32 ... clients at once, and an open loop with arrivals and lengths as people have them. A second call
with the same --out adds to it; results are written after each case. What fails on one side leaves the other's results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.published_config import config_json
from benchmarks.load_processes import answer_from, client_processes
from benchmarks.server_process import Server, ServerFailed, ended_by_signals, running
from relaxpack.bench.client import LoadClient
from relaxpack.bench.load import Run
from relaxpack.bench.report import ServiceLevel, environment, summary
from relaxpack.bench.workload import LoadRequest, Workload, requests_of
from relaxpack.errors import RelaxpackError
from relaxpack.model_info import ModelInfo

CONTEXT = 2048          # of a request, at most
_MIXED = "mixed"
_RESERVE = 10.0         # seconds that a server needs to end
_KEPT = ("requests", "failed", "errors", "seconds", "output_tokens", "prompt_tokens", "cached_tokens",
         "output_tokens_per_second", "total_tokens_per_second", "time_to_first_token", "time_per_token")
_PEER_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
                     "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": "/tmp/vllm_cache"}


@dataclass(frozen=True)
class Case:
    name: str
    workload: Workload
    seconds: float      # that it takes about


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for streams in args.streams:
        waves = args.waves or max(2, min(8, 192 // streams))     # of 1 to 3 s each for a model of 8B
        yield Case(str(streams), Workload(
            streams * waves, seed=streams, concurrency=streams, prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens, max_tokens=CONTEXT), 10)
    if args.rate:
        yield Case(_MIXED, Workload(round(args.rate * args.mixed_seconds), rate=args.rate, max_tokens=CONTEXT),
                   args.mixed_seconds + 10)


def in_token_ids(workload: Workload, vocab_size: int) -> list[LoadRequest]:
    """Its requests, each prompt as so many random ids as it has words, or as were asked for."""
    rng = random.Random(workload.seed + 1)
    return [replace(request, prompt=[rng.randrange(2, vocab_size) for _ in range(
        workload.prompt_tokens or len(str(request.prompt).split()))]) for request in requests_of(workload)]


def measure(server: Server, model: str, case: Case, vocab_size: int, timeout: float) -> dict[str, Any]:
    """A short run to warm up, then the run. `model`: what the server calls it."""
    streams = case.workload.concurrency or 16
    processes = client_processes(case.workload.concurrency or 64)
    warm = replace(case.workload, requests=streams, rate=None, concurrency=streams, seed=1000 + case.workload.seed,
                   output_tokens=8, prompt_tokens=case.workload.prompt_tokens or 128)
    answer_from(processes, server.url, model, in_token_ids(warm, vocab_size), streams, timeout)
    cpu = server.cpu_seconds()
    samples, seconds = answer_from(processes, server.url, model, in_token_ids(case.workload, vocab_size),
                                   case.workload.concurrency, timeout)
    if all(s.error for s in samples):
        raise ServerFailed(f"answered none of {len(samples)} requests: {samples[0].error}")
    report = summary(Run(samples, seconds, {"id": model}, case.workload), ServiceLevel())
    good = [s for s in samples if s.error is None]
    return {**{key: report[key] for key in _KEPT}, "client_processes": processes,
            "server_cores": round((server.cpu_seconds() - cpu) / seconds, 2),
            "tokens_per_chunk": round(report["output_tokens"] / max(1, sum(len(s.pieces) for s in good)), 2)}


def run_system(system: str, server: AbstractContextManager[Server], args: argparse.Namespace, vocab_size: int,
               save: Callable[[Mapping[str, Any]], None]) -> str | None:
    """All cases on one server, as far as its time goes, saved after each. Returns what the server did wrong."""
    until = time.monotonic() + args.limit
    found: dict[str, Any] = {"cases": {}, "error": None}
    save(found)
    try:
        with server as opened:
            found["start_seconds"] = round(opened.start_seconds, 1)
            print(f"{system}: answers after {opened.start_seconds:.1f} s", flush=True)
            model = _model_name(opened)
            for case in cases(args):
                left = until - time.monotonic() - _RESERVE
                if left < case.seconds:
                    print(f"{system}, {case.name}: left out, {left:.0f} s are left of its {args.limit:.0f}", flush=True)
                    continue
                found["cases"][case.name] = measure(opened, model, case, vocab_size, left)
                print(f"{system}, {case.name}: {line(found['cases'][case.name])}", flush=True)
                save(found)
    except (ServerFailed, RelaxpackError) as error:
        found["error"] = str(error)
        print(f"{system}: {error}", flush=True)
    save(found)
    return found["error"]


def _model_name(server: Server) -> str:
    return str(asyncio.run(LoadClient(server.url).describe())["id"])


def line(case: Mapping[str, Any]) -> str:
    first, each = case["time_to_first_token"], case["time_per_token"]
    return (f"{case['output_tokens_per_second']:.0f} output and {case['total_tokens_per_second']:.0f} total tokens/s in "
            f"{case['seconds']:.1f} s; TTFT {1e3 * first['p50']:.0f} ms (p99 {1e3 * first['p99']:.0f})"
            + (f", per token {1e3 * each['p50']:.2f} ms (p99 {1e3 * each['p99']:.2f})" if each else "")
            + f"; {case['server_cores']} cores, {case['tokens_per_chunk']} tokens a chunk"
            + (f"; {case['failed']} FAILED: {case['errors']}" if case["failed"] else ""))


def peer_folder(folder: Path, description: Mapping[str, Any]) -> Path:
    """What vLLM reads of a checkpoint when it makes the weights itself."""
    from benchmarks.gpu.random_bundle import tokenizer_json  # not above: client processes need nothing of it

    info = ModelInfo.from_json(description["info"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(
        info, description["intermediate_size"], description["rope_theta"], description["tie_embeddings"])))
    (folder / "tokenizer.json").write_bytes(tokenizer_json(info.vocab_size))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": 131072}))
    return folder


def vllm_command(model: Path, port: int, streams: int) -> list[str]:
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--load-format", "dummy",
            "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(2 * CONTEXT),
            "--max-num-seqs", str(max(streams, 16)), "--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.8",
            "--enable-prefix-caching", "--generation-config", "vllm", "--disable-uvicorn-access-log",
            "--disable-log-stats", "--seed", "0"]


def peer_command(args: argparse.Namespace, model: Path, port: int, streams: int) -> list[str]:
    if args.peer_command:
        try:
            return [part.format(port=port, model=model) for part in shlex.split(args.peer_command)]
        except (ValueError, LookupError) as error:
            sys.exit(f"--peer-command makes no command: {error}")
    return vllm_command(model, port, streams)


def relaxpack_command(bundle: Path, port: int, streams: int) -> list[str]:
    return [sys.executable, "-m", "relaxpack", "serve", str(bundle), "--port", str(port),
            "--max-concurrent", str(max(256, 2 * streams))]


def make_bundle(stem: Path, bundle: Path) -> None:
    from benchmarks.gpu.random_bundle import write

    began = time.monotonic()
    write(stem, bundle)
    print(f"{bundle} written in {time.monotonic() - began:.0f} s", flush=True)


def gpu_name() -> str | None:
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"model": args.model, "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens, "gpu": gpu_name(),
            "workloads": {case.name: asdict(case.workload) for case in cases(args)}}


def json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    return found if isinstance(found, dict) else sys.exit(f"{path} holds no JSON object")


def result_so_far(out: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What is in `out`, if it is of the same measurement, else a new one."""
    if not out.exists():
        return {**wanted, "systems": {}, "environment": environment()}
    found = json_of(out)
    other = [key for key, value in wanted.items() if found.get(key) != json.loads(json.dumps(value))]
    if other:
        sys.exit(f"{out} is of another measurement ({', '.join(other)} differ): give another --out")
    return found


def streams_of(text: str) -> list[int]:
    streams = [int(part) for part in text.split(",")]
    if min(streams) < 1:
        raise ValueError
    return streams


@ended_by_signals()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with MODEL-bf16.so and .json")
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", type=Path, help="made if it is not there; default: FOLDER/MODEL-bf16.bundle")
    parser.add_argument("--peer", choices=("none", "vllm"), default="none")
    parser.add_argument("--only", choices=("ours", "peer"), help="default: both, ours first")
    parser.add_argument("--peer-site", type=Path, metavar="DIR", help="where the peer's packages are, and nothing of ours")
    parser.add_argument("--peer-command", help="another server in its place; {port} and {model} are filled in")
    parser.add_argument("--streams", type=streams_of, default="1,8,32,64,128")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--waves", type=int, help="requests of each client; default: as many as take some seconds")
    parser.add_argument("--rate", type=float, default=16.0, help="arrivals a second of the open loop; 0 leaves it out")
    parser.add_argument("--mixed-seconds", type=float, default=8.0, help="of arrivals")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for each server, its start included")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.peer_command:
        peer_command(args, args.folder, 0, 1)       # a wrong one ends this before anything is measured
    bundle = args.bundle or args.folder / f"{args.model}-bf16.bundle"
    description = args.folder / f"{args.model}-bf16.json"
    for needed in (description, *(() if bundle.exists() or args.only == "peer" else (description.with_suffix(".so"),))):
        if not needed.exists():
            sys.exit(f"{needed} is not there: make it with benchmarks/gpu/build_models.py")
    if not args.out.parent.is_dir():
        sys.exit(f"{args.out}: there is no folder {args.out.parent}")
    described = json_of(description)
    vocab_size = described["info"]["vocab_size"]
    result = result_so_far(args.out, settings(args))
    most = max(args.streams)

    def save(system: str, found: Mapping[str, Any]) -> None:
        result["systems"][system] = found
        beside = args.out.with_suffix(".part")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.replace(args.out)

    failed = []
    if args.only != "peer":
        if not bundle.exists():
            make_bundle(args.folder / f"{args.model}-bf16", bundle)
        server = running(lambda port: relaxpack_command(bundle, port, most), args.out.with_suffix(".relaxpack.log"),
                         args.limit)
        if run_system("relaxpack", server, args, vocab_size, lambda found: save("relaxpack", found)):
            failed.append("relaxpack")
    if args.peer != "none" and args.only != "ours":
        model = peer_folder(args.folder / f"{args.model}-peer", described)
        env = {**os.environ, **_PEER_ENVIRONMENT}
        if args.peer_site:
            env["PYTHONPATH"] = str(args.peer_site.resolve())
        server = running(lambda port: peer_command(args, model, port, most), args.out.with_suffix(f".{args.peer}.log"),
                         args.limit, env=env)
        if run_system(args.peer, server, args, vocab_size, lambda found: save(args.peer, found)):
            failed.append(args.peer)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; {args.out} has the rest")


if __name__ == "__main__":
    main()
