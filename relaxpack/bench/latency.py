"""Latency and throughput of a bundle in this process, without HTTP: how long a first token and each further one take, by
batch size. The engine runs as it does in the server, but prompts are random token ids, so that nothing is cached.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from relaxpack.bench.report import environment, spread
from relaxpack.bench.step import StepFacts
from relaxpack.errors import UsageError
from relaxpack.llm import LLM
from relaxpack.runtime.engine import TokenEvent
from relaxpack.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class LatencyCase:
    batch: int
    prompt_tokens: int
    output_tokens: int


def measure(llm: LLM, case: LatencyCase, runs: int, rng: random.Random) -> dict[str, Any]:
    """Times in seconds. The best run by total time counts: noise only ever adds. `rng` goes on from case to case: prompts of
    an earlier one would be cached."""
    limit = llm.engine.max_tokens
    if case.prompt_tokens + case.output_tokens > limit:
        raise UsageError(f"{case.prompt_tokens} prompt and {case.output_tokens} output tokens do not fit into the context "
                         f"of {limit}: ask for fewer")
    best: dict[str, Any] | None = None
    for _ in range(runs):
        result = _once(llm, case, rng)
        if best is None or result["seconds"] < best["seconds"]:
            best = result
    assert best is not None
    return best


def _once(llm: LLM, case: LatencyCase, rng: random.Random) -> dict[str, Any]:
    vocabulary = llm.engine.runner.vocab_size     # a tokenizer may have more tokens than its model
    prompts = [[rng.randrange(vocabulary) for _ in range(case.prompt_tokens)] for _ in range(case.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=case.output_tokens, ignore_eos=True)
    arrivals: dict[str, list[float]] = {}
    started = time.perf_counter()

    def on_event(event: TokenEvent) -> None:
        arrivals.setdefault(event.request.id, []).append(time.perf_counter() - started)
    outputs = llm.engine.generate(prompts, params, on_event=on_event)
    seconds = time.perf_counter() - started
    for output in outputs:
        if output.choices[0].error is not None:
            raise UsageError(f"the model failed: {output.choices[0].error}")
    times = list(arrivals.values())
    last_first = max(t[0] for t in times)
    decoded = sum(len(t) for t in times) - len(times)
    between = [after - before for t in times for before, after in pairwise(t)]
    return {"batch": case.batch, "prompt_tokens": case.prompt_tokens, "output_tokens": case.output_tokens,
            "seconds": seconds, "time_to_first_token": spread([t[0] for t in times]), "inter_token_latency": spread(between),
            "prefill_tokens_per_second": case.batch * case.prompt_tokens / last_first,
            "decode_tokens_per_second": decoded / (seconds - last_first) if decoded else 0.0,
            "output_tokens_per_second": sum(len(t) for t in times) / seconds}


def latency_report(bundle: str, cases: Sequence[LatencyCase], *, runs: int = 3, device: str | None = None,
                   progress: Callable[[LatencyCase], None] = lambda case: None,
                   loading: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """`loading`: see `LLM`."""
    llm = LLM(bundle, device=device, progress=loading)
    prepared = _prepare(llm)
    rng = random.Random(0)
    measure(llm, LatencyCase(1, 8, 4), 1, rng)
    results = []
    steps = _step_facts(llm)
    for case in cases:
        progress(case)
        result = measure(llm, case, runs, rng)
        between = result["inter_token_latency"]
        if steps is not None and between:
            context = min(case.prompt_tokens + case.output_tokens // 2, llm.engine.max_tokens - 1)
            result["step"] = steps.of(case.batch, context, between["p50"])
        results.append(result)
    name = llm.info.name if llm.info is not None else bundle
    return {"model": name, "runs": runs, "results": results, **prepared, "environment": environment()}


def _step_facts(llm: LLM) -> StepFacts | None:
    """None where the bundle does not say what its steps do."""
    if llm.loaded is None or llm.loaded.bundle.target(llm.loaded.report.target).explain not in llm.loaded.bundle:
        return None
    return StepFacts(llm)


def _prepare(llm: LLM) -> dict[str, Any]:
    """What loading took; on a GPU also the capture of its graphs, and the plan of its memory against the driver."""
    loaded = llm.loaded
    if loaded is None:
        return {"load": None, "capture": None, "memory": None}
    captured = loaded.warm_up()
    compared = loaded.compare_plan() if captured is not None else None
    return {"load": loaded.report.to_json(), "capture": captured.to_json() if captured else None,
            "memory": compared.to_json() if compared else None}
