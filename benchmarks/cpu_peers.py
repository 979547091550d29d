"""SmolLM2-135M-Instruct on the CPU: relaxpack beside llama.cpp and OpenVINO GenAI, the same GGUF, the same threads.

    python benchmarks/cpu_peers.py --bundle build/smollm2.bundle [--repeats 5] [--out benchmarks/results/NAME.json]
    python benchmarks/cpu_peers.py --bundle build/smollm2.bundle --tuned TUNED.bundle    # before and after tuning

Each system runs in a process of its own, in turn (A B C A B C ...), so that a machine that drifts drifts for all.
Prompts are random token ids, the same for all; decode is greedy. Reported: the median over the rounds of prefill and
decode rates, and the ratio to llama.cpp pair by pair. Peers that are not installed are left out and named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = (128, 512)
NEW_TOKENS = 64
SEED = 7


def prompt_ids(length: int, run: int) -> list[int]:
    """Fresh for every run: a prompt seen before could come out of a prefix cache."""
    import random

    draw = random.Random(SEED + 1000 * length + run)
    return [draw.randrange(100, 48000) for _ in range(length)]


def gguf_path() -> str:
    from relaxpack.relax_models.checkpoint import packaged_file

    return str(packaged_file("smollm2"))


def run_relaxpack(bundle: str, threads: int) -> dict[str, float]:
    from relaxpack.runtime.load import load_model
    from relaxpack.runtime.step_plan import SequenceStep, StepPlan

    runner = load_model(bundle).runner

    def once(ids: list[int], new: int) -> tuple[float, float]:
        pages = list(range(1, 2 + (len(ids) + new) // runner.page_size))
        start = time.perf_counter()
        row = runner.forward(StepPlan((SequenceStep(ids, 0, pages, [len(ids) - 1]),)))[0]
        prefilled = time.perf_counter()
        for k in range(new):
            step = SequenceStep([int(row.argmax())], len(ids) + k, pages, [0])
            row = runner.forward(StepPlan((step,)))[0]
        return prefilled - start, time.perf_counter() - prefilled

    return _rates(once)


def run_llama_cpp(bundle: str, threads: int) -> dict[str, float]:
    import llama_cpp

    model = llama_cpp.Llama(model_path=gguf_path(), n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=threads,
                            n_threads_batch=threads, verbose=False, logits_all=False)

    def once(ids: list[int], new: int) -> tuple[float, float]:
        model.reset()
        start = time.perf_counter()
        model.eval(ids)
        prefilled = time.perf_counter()
        for _ in range(new):
            model.eval([model.sample(temp=0.0)])
        return prefilled - start, time.perf_counter() - prefilled

    return _rates(once)


def run_openvino(bundle: str, threads: int) -> dict[str, float]:
    import numpy as np
    import openvino
    import openvino_genai

    pipe = openvino_genai.LLMPipeline(gguf_path(), "CPU", INFERENCE_NUM_THREADS=threads)

    def once(ids: list[int], new: int) -> tuple[float, float]:
        config = openvino_genai.GenerationConfig(max_new_tokens=new + 1, do_sample=False, ignore_eos=True)
        tokens = openvino.Tensor(np.array([ids], np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), np.int64))
        metrics = pipe.generate(openvino_genai.TokenizedInputs(tokens, mask), config).perf_metrics
        return metrics.get_ttft().mean / 1e3, metrics.get_tpot().mean / 1e3 * new

    return _rates(once)


SYSTEMS: dict[str, tuple[str, Callable[[str, int], dict[str, float]]]] = {
    "relaxpack": ("relaxpack", run_relaxpack), "llama.cpp": ("llama_cpp", run_llama_cpp),
    "openvino-genai": ("openvino_genai", run_openvino)}


def _rates(once: Callable[[list[int], int], tuple[float, float]]) -> dict[str, float]:
    """Tokens per second of prefill and decode at each prompt length: best of three after a warm-up."""
    result = {}
    for length in PROMPTS:
        once(prompt_ids(length, 0), 8)
        runs = [once(prompt_ids(length, run), NEW_TOKENS) for run in (1, 2, 3)]
        result[f"prefill_{length}"] = length / min(p for p, _ in runs)
        result[f"decode_{length}"] = NEW_TOKENS / min(d for _, d in runs)
    return result


def measure(system: str, bundle: str, threads: int) -> dict[str, float]:
    env = {**os.environ, "RELAXPACK_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, __file__, "--one", system, "--bundle", bundle, "--threads", str(threads)],
                          capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
    rates: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


def environment(threads: int) -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    cpu = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())
    return {"date": datetime.date.today().isoformat(), "cpu": cpu, "cores": os.cpu_count(), "threads": threads,
            "python": platform.python_version(), "load_before": os.getloadavg()[0],
            "versions": {p: version(p) for p in ("apache-tvm", "llama-cpp-python", "openvino-genai")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--tuned", help="the same model built with tuning records, in the same rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(SYSTEMS[args.one][1](args.bundle, args.threads)))
        return
    present = [s for s, (module, _) in SYSTEMS.items() if importlib.util.find_spec(module)]
    bundles = {s: args.bundle for s in present} | ({"relaxpack, tuned": args.tuned} if args.tuned else {})
    report: dict[str, Any] = {"environment": environment(args.threads), "new_tokens": NEW_TOKENS, "rounds": []}
    for _ in range(args.repeats):
        report["rounds"].append({name: measure(name.partition(",")[0], bundle, args.threads)
                                 for name, bundle in bundles.items()})
    missing = [s for s in SYSTEMS if s not in present]
    present = list(bundles)
    keys = list(report["rounds"][0]["relaxpack"])
    print(f"{'tok/s (median of rounds)':26s}" + "".join(f"{s:>16s}" for s in present) + "   x llama.cpp")
    report["median"] = {}
    for key in keys:
        medians = {s: statistics.median(r[s][key] for r in report["rounds"]) for s in present}
        report["median"][key] = dict(medians)
        line = f"{key:26s}" + "".join(f"{medians[s]:16.1f}" for s in present)
        if "llama.cpp" in present:
            ratio = statistics.median(r["relaxpack"][key] / r["llama.cpp"][key] for r in report["rounds"])
            report["median"][key]["ratio_to_llama.cpp"] = ratio
            line += f"{ratio:14.2f}"
        if args.tuned:
            gain = statistics.median(r["relaxpack, tuned"][key] / r["relaxpack"][key] for r in report["rounds"])
            report["median"][key]["tuned_to_untuned"] = gain
            line += f"{gain:10.2f} tuned / untuned"
        print(line)
    if missing:
        print("not installed: " + ", ".join(missing) + " (pip install --group bench)")
    if args.out and missing:
        print(f"not written: {args.out} is for runs beside all peers")
    elif args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
