"""A real bundle on a GPU, through the public path: logits against a float32 CPU reference, captured against eager bit for
bit, crowd against alone, and the speed of the whole engine with Python in the loop.

    python benchmarks/gpu/check_bundle.py reference F32_BUNDLE REF.npz       # on any machine
    python benchmarks/gpu/check_bundle.py check CUDA_BUNDLE REF.npz OUT.json # on the GPU machine
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time", "2 + 2 =", "今日は",
           "The quick brown fox jumps over the lazy dog. " * 12)
STEPS = 12


def teacher_forced(runner: Any, ids: list[int], forced: list[int] | None) -> tuple[np.ndarray, list[int]]:
    """Logits after the prompt and after each forced (or greedy) token: float32 [STEPS, V]."""
    from relaxpack.runtime.step_plan import SequenceStep, StepPlan

    pages = list(range(1, 2 + (len(ids) + STEPS) // runner.page_size))
    rows = [runner.forward(StepPlan((SequenceStep(ids, 0, pages, [len(ids) - 1]),)))[0].copy()]
    tokens: list[int] = []
    for k in range(STEPS - 1):
        tokens.append(forced[k] if forced else int(rows[-1].argmax()))
        step = SequenceStep([tokens[-1]], len(ids) + k, pages, [0])
        rows.append(runner.forward(StepPlan((step,)))[0].copy())
    return np.array(rows), tokens


def reference(bundle: str, out: str) -> None:
    from relaxpack.runtime.load import load_model

    model = load_model(bundle, num_pages=128)
    saved: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(PROMPTS):
        ids = model.tokenizer.encode(prompt)
        logits, tokens = teacher_forced(model.runner, ids, None)
        saved |= {f"ids{i}": np.array(ids), f"tokens{i}": np.array(tokens), f"logits{i}": logits.astype(np.float16)}
    np.savez_compressed(out, **saved)  # type: ignore[arg-type]


def first_gap(runner: Any, prompt: list[int], one: list[int], other: list[int]) -> float | None:
    """Where two greedy answers part: how far apart the two tokens' logits are, computed alone. None: they do not part."""
    from relaxpack.runtime.step_plan import SequenceStep, StepPlan

    at = next((k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
    if at is None:
        return None
    ids = prompt + one[:at]
    pages = list(range(1, 2 + len(ids) // runner.page_size))
    last = (len(ids) - 1) // runner.prefill_chunk * runner.prefill_chunk
    for start in range(0, last, runner.prefill_chunk):
        runner.forward(StepPlan((SequenceStep(ids[start:start + runner.prefill_chunk], start, pages, []),)))
    row = runner.forward(StepPlan((SequenceStep(ids[last:], last, pages, [len(ids) - 1 - last]),)))[0]
    return float(abs(row[one[at]] - row[other[at]]))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def check(bundle: str, ref: str, out: str) -> None:
    from relaxpack.dist.bundle import Bundle
    from relaxpack.llm import LLM
    from relaxpack.runtime.load import load_runner

    begin = time.perf_counter()
    opened = Bundle.open(bundle)
    graphs = load_runner(opened, "cuda", 2048)
    result: dict[str, Any] = {"load_seconds": round(time.perf_counter() - begin, 2)}
    begin = time.perf_counter()
    graphs.warm_up()  # type: ignore[union-attr]
    result["capture_seconds"] = round(time.perf_counter() - begin, 2)
    eager = load_runner(opened, "cuda", 2048, graphs=False)
    saved = np.load(ref)
    agree, divergence, bits, errors = [], [], [], []
    for i in range(len(PROMPTS)):
        ids, tokens = saved[f"ids{i}"].tolist(), saved[f"tokens{i}"].tolist()
        want = log_softmax(saved[f"logits{i}"].astype(np.float64))
        got, _ = teacher_forced(graphs, ids, tokens)
        plain, _ = teacher_forced(eager, ids, tokens)
        logp = log_softmax(got.astype(np.float64))
        agree.append(float((got.argmax(-1) == want.argmax(-1)).mean()))
        divergence.append(float((np.exp(want) * (want - logp)).sum(-1).mean()))
        bits.append(bool(np.array_equal(got, plain)))
        errors.append(float(np.abs(logp - want).max()))
    result |= {"top1_agreement": agree, "kl_divergence": divergence, "graph_equals_eager": bits,
               "steps_through_buckets": dict(graphs.graph_steps)}  # type: ignore[union-attr]
    # A tie: two tokens closer than twice what the dtype may cost a logit here.
    tie = result["tie"] = 2 * max(errors)
    print(json.dumps(result, indent=1), flush=True)
    del eager
    llm = LLM(bundle, device="cuda", num_pages=4096)
    prompts = [f"Question {i}: what is the capital of France?" for i in range(32)]
    alone = [llm.generate(p, max_tokens=48, temperature=0.0).token_ids for p in prompts[:6]]
    crowd = llm.generate(prompts, max_tokens=48, temperature=0.0)
    result["crowd_equals_alone"] = [list(a) == list(c.token_ids) for a, c in zip(alone, crowd, strict=False)]
    result["crowd_first_divergence"] = gaps = [
        gap for p, a, c in zip(prompts, alone, crowd, strict=False)
        if (gap := first_gap(graphs, llm.encode(p), list(a), list(c.token_ids))) is not None]
    result["divergences_are_ties"] = all(gap <= tie for gap in gaps)
    seeded = [llm.generate(p, max_tokens=24, temperature=0.8, seed=7).token_ids for p in prompts[:2]]
    both = llm.generate(prompts[:2], max_tokens=24, temperature=0.8, seed=7)
    result["seeded_equal_in_a_crowd"] = [list(a) == list(c.token_ids) for a, c in zip(seeded, both, strict=True)]
    result["text"] = crowd[0].text
    speeds = {}
    for batch in (1, 8, 32):
        llm.generate(prompts[:batch], max_tokens=8, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts[:batch], max_tokens=256, temperature=0.0, ignore_eos=True)
        speeds[batch] = round(batch * 256 / (time.perf_counter() - begin))
    result["engine_tokens_per_second"] = speeds
    print(json.dumps({k: result[k] for k in ("crowd_equals_alone", "seeded_equal_in_a_crowd", "text",
                                             "engine_tokens_per_second")}, indent=1), flush=True)
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("reference", help="write the float32 logits of a CPU bundle")
    second = commands.add_parser("check", help="hold a GPU bundle against them")
    for command in (first, second):
        command.add_argument("bundle")
        command.add_argument("reference")
    second.add_argument("out")
    args = parser.parse_args()
    if args.command == "reference":
        reference(args.bundle, args.reference)
    else:
        check(args.bundle, args.reference, args.out)


if __name__ == "__main__":
    main()
