"""What a visit to a GPU measures in one process, over a GPU bundle: one function for each question, each gives JSON.

No torch: times are taken around whole runs of steps that end in one wait for the device. `visit.py` calls these, on a GPU
machine each in a process of its own; tests call them over stand-ins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaxpack.dist.bundle import Bundle
from relaxpack.runtime import cuda_memory, upload
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.load import LoadReport, load_runner
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import SequenceStep

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILLS = (128, 512, 2048, 8192)
TOKENS_FOR_TABLES = 1 << 18     # that pages are taken for, at most


def upload_rates(bundle: Path, most_bytes: int = 8 << 30) -> dict[str, Any]:
    """GB/s of weights from the page cache to the device: by chunk size, and straight from the mapping."""
    opened = Bundle.open(bundle)
    entry = opened.target("cuda")
    params = opened.open_params(entry)
    regions, size = [], 0
    for name in entry.param_order:
        region = params.region(name)
        if regions and size + region.bytes > most_bytes:
            break
        regions.append(region)
        size += region.bytes
    for region in regions:      # into the page cache
        with region.file.open("rb") as file:
            file.seek(region.offset)
            for start in range(0, region.bytes, 1 << 24):
                file.read(min(1 << 24, region.bytes - start))
    from relaxpack.runtime.load import device_for

    device = device_for("cuda")
    rates = {}
    for chunk in (4 << 20, 16 << 20, 64 << 20):
        rates[f"pinned chunks of {chunk >> 20} MiB"] = max(
            upload.upload(regions, device, chunk_bytes=chunk).gigabytes_per_second for _ in range(2))
    import tvm

    begin, copied = time.perf_counter(), 0
    for region in regions[:8]:
        raw = params[region.name].reshape(-1).view(np.uint8)
        tvm.runtime.empty((region.bytes,), "uint8", device).copyfrom(raw)
        copied += region.bytes
    cuda_memory.synchronize()
    rates["pageable, from the mapping"] = copied / (time.perf_counter() - begin) / 1e9
    return {"bytes": size, "gigabytes_per_second": rates}


def loading(bundle: Path) -> dict[str, Any]:
    """What loading, capture and memory take, and what the driver says at each point."""
    report = LoadReport("", 0)
    begin = time.perf_counter()
    runner = _runner(Bundle.open(bundle), report=report)
    seconds = time.perf_counter() - begin
    taken_at_load = runner.compare_plan().taken
    captured = runner.warm_up()
    compared = runner.compare_plan()
    runner.prefill([SequenceStep([1] * min(64, runner.prefill_chunk // 2), 0, _pages(runner, 64), [0, 1])])    # eager
    cuda_memory.synchronize()
    eager = runner.compare_plan().taken
    plan = runner.plan
    return {"seconds": seconds, "load": report.to_json(), "capture": captured.to_json(), "after_capture": compared.to_json(),
            "at_load": {"planned": plan.weights + plan.kv + plan.workspace, "taken": taken_at_load},
            "after_an_eager_step": {"planned": plan.total, "taken": eager}, "text": [str(report), str(plan), str(captured),
                                                                                     str(compared)]}


def tables(bundle: Path, context: int = 512, batches: Sequence[int] = BATCHES, prefills: Sequence[int] = PREFILLS,
           new: int = 64) -> dict[str, Any]:
    """Decode by batch size and prefill by length, with graphs and without: bare steps, and the whole engine."""
    opened = Bundle.open(bundle)
    graphs = _runner(opened)
    eager = _runner(opened, graphs=False)
    took = graphs.warm_up()
    fits = (graphs.num_pages - 1) * graphs.page_size
    context = min(context, graphs.max_context // 2)
    sizes = [b for b in batches if b <= graphs.max_batch and b * (context + new + graphs.page_size) <= fits]
    lengths = [n for n in prefills if n <= min(graphs.prefill_chunk, graphs.max_context, fits)]
    rows = [{"batch": batch, "context": context,
             **{name: _decode_ms(runner, batch, context) for name, runner in (("graph_ms", graphs), ("eager_ms", eager))},
             **{f"engine_{key}": value for key, value in _engine(graphs, batch, context, new).items()}} for batch in sizes]
    return {"capture": took.to_json(), "weight_bytes": graphs.plan.weights, "decode": rows,
            "prefill": [{"tokens": n, **{name: _prefill_ms(runner, n) for name, runner in (("graph_ms", graphs),
                                                                                          ("eager_ms", eager))}}
                        for n in lengths],
            "eager_steps_with_graphs": dict(graphs.eager_steps)}


def _runner(bundle: Bundle, graphs: bool = True, report: LoadReport | None = None) -> CudaModelRunner:
    """With pages for the tables, not for all of the device: two runners have to fit."""
    info = bundle.manifest.info_for(bundle.target("cuda"))
    pages = min(info.max_batch * info.max_pages_per_sequence, TOKENS_FOR_TABLES // info.page_size) + 1
    runner = load_runner(bundle, "cuda", pages, graphs, report=report)
    assert isinstance(runner, CudaModelRunner)
    return runner


def _pages(runner: CudaModelRunner, tokens: int, first: int = 1) -> list[int]:
    return list(range(first, first + -(-tokens // runner.page_size)))


def _milliseconds(work: Callable[[], None], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        cuda_memory.synchronize()
        begin = time.perf_counter()
        work()
        cuda_memory.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times)


def _decode_ms(runner: CudaModelRunner, batch: int, context: int, steps: int = 20) -> float:
    """Of one step in a run of steps that nobody waits for in between, sampling included."""
    each = -(-(context + steps) // runner.page_size)
    tables = [_pages(runner, context + steps, 1 + i * each) for i in range(batch)]

    def work() -> None:
        for k in range(steps):
            runner.decode([SequenceStep([k + 1], context + k, table, [0]) for table in tables])
    work()      # captures
    return _milliseconds(work) / steps


def _prefill_ms(runner: CudaModelRunner, tokens: int) -> float:
    step = SequenceStep([1 + i % 50 for i in range(tokens)], 0, _pages(runner, tokens), [tokens - 1])

    def work() -> None:
        runner.prefill([step])
    work()
    return _milliseconds(work)


def _engine(runner: CudaModelRunner, batch: int, prompt: int, new: int) -> dict[str, float]:
    """The engine with Python in the loop: time to the first token of all, then tokens a second."""
    engine = Engine(runner, executor=CudaExecutor(runner))
    rng = np.random.default_rng(batch)

    def drive(tokens: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        requests = [engine.add(rng.integers(0, runner.vocab_size, prompt).tolist(), params) for _ in range(batch)]
        while not all(r.first_token_time for r in requests):
            engine.step()
        first = time.perf_counter()
        had = sum(len(r.sequences[0].output_ids) for r in requests)
        while engine.has_work:
            engine.step()
        total = sum(len(r.sequences[0].output_ids) for r in requests)
        return (first - begin) * 1e3, (total - had) / (time.perf_counter() - first)
    drive(4)
    runs = [drive(new) for _ in range(3)]
    return {"first_token_ms": statistics.median(r[0] for r in runs), "tokens_per_second": max(r[1] for r in runs)}
