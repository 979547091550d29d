"""SmolLM2-135M-Instruct on the CPU: decoding several sequences at once, relaxpack's model runner beside llama.cpp's batch
API (what its server does with --parallel), the same GGUF, the same threads, in turn.

    python benchmarks/cpu_batch.py --bundle build/smollm2.bundle --out benchmarks/results/cpu_batch-DATE.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cpu_peers import environment, gguf_path, prompt_ids

BATCHES = (1, 2, 4, 8)
PROMPT, STEPS = 128, 48


def run_relaxpack(bundle: str, threads: int) -> dict[int, float]:
    from relaxpack.runtime.load import load_model
    from relaxpack.runtime.step_plan import SequenceStep, StepPlan

    runner = load_model(bundle).runner
    pages = -(-(PROMPT + STEPS) // runner.page_size)
    rates = {}
    for batch in BATCHES:
        tables = [list(range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(batch)]
        tokens = [runner.forward(StepPlan((SequenceStep(prompt_ids(PROMPT, i), 0, t, [PROMPT - 1]),)))[0].argmax()
                  for i, t in enumerate(tables)]
        times = []
        for k in range(STEPS):
            start = time.perf_counter()
            plan = StepPlan(tuple(SequenceStep([int(x)], PROMPT + k, t, [0])
                                  for x, t in zip(tokens, tables, strict=True)))
            tokens = list(runner.forward(plan).argmax(axis=1))
            times.append(time.perf_counter() - start)
        rates[batch] = batch / statistics.median(times)
    return rates


class LlamaContext:
    """A llama.cpp context for `size` sequences, through its C API."""

    def __init__(self, model: Any, size: int, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 256 * size, 512, 512, size
        params.n_threads = params.n_threads_batch = threads
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: (token id, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if self.api.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")

    def best(self, row: int) -> int:
        import numpy as np

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax())

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)


def run_llama_cpp(bundle: str, threads: int) -> dict[int, float]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(gguf_path().encode(), llama_cpp.llama_model_default_params())
    rates = {}
    for size in BATCHES:
        context = LlamaContext(model, size, threads)
        tokens = []
        for s in range(size):
            context.decode([(t, p, s, p == PROMPT - 1) for p, t in enumerate(prompt_ids(PROMPT, s))])
            tokens.append(context.best(PROMPT - 1))
        times = []
        for k in range(STEPS):
            start = time.perf_counter()
            context.decode([(t, PROMPT + k, s, True) for s, t in enumerate(tokens)])
            tokens = [context.best(s) for s in range(size)]
            times.append(time.perf_counter() - start)
        rates[size] = size / statistics.median(times)
        context.close()
    return rates


SYSTEMS = {"relaxpack": run_relaxpack, "llama.cpp": run_llama_cpp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(SYSTEMS[args.one](args.bundle, args.threads)))
        return
    env = {**os.environ, "RELAXPACK_NUM_THREADS": str(args.threads), "OMP_NUM_THREADS": str(args.threads)}
    rounds = []
    for _ in range(args.repeats):
        rounds.append({system: json.loads(subprocess.run(
            [sys.executable, __file__, "--one", system, "--bundle", args.bundle, "--threads", str(args.threads)],
            capture_output=True, text=True, env=env, check=True).stdout.strip().splitlines()[-1]) for system in SYSTEMS})
    report = {"environment": environment(args.threads), "prompt": PROMPT, "steps": STEPS, "rounds": rounds, "median": {}}
    for batch in map(str, BATCHES):
        rates = {s: statistics.median(r[s][batch] for r in rounds) for s in SYSTEMS}
        ratio = statistics.median(r["relaxpack"][batch] / r["llama.cpp"][batch] for r in rounds)
        report["median"][batch] = {**rates, "ratio": ratio}
        print(f"{batch} sequences: relaxpack {rates['relaxpack']:.0f} tok/s, llama.cpp {rates['llama.cpp']:.0f}, "
              f"{ratio:.2f}x")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
