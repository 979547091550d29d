"""Prefill attention on one Hopper GPU: every variant against float64, then its times beside torch's SDPA (contiguous
keys) and FlashAttention-3 out of vLLM's wheel (contiguous and paged), all taking turns: a warm GPU is a slow one.

    python -m tests.helpers.attention_builds .carry/prefill --prefill       # anywhere with nvcc
    python -m benchmarks.gpu.prefill_attention .carry/prefill --out DIR --flash VLLM_SITE --limit 120

VLLM_SITE is the folder that holds the package `vllm`; vLLM itself is not initialised. A kernel with a wrong number is
not timed. DIR/prefill_attention.json is written again after each step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

import tvm_ffi
from tests.helpers import attention_device as dev

TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4}      # of ‖out - ref‖ / ‖ref‖: rounding of P and of the output
EDGES = [1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 127, 128, 129, 700]
CHECKS: list[tuple[list[int], list[int], float]] = [                # lengths, queries, magnitude
    ([1], [1], 1.0), ([128], [128], 1.0), ([129], [129], 1.0), ([n + 5 for n in EDGES], EDGES, 1.0),
    (EDGES, EDGES, 30.0), (EDGES, EDGES, 1e-3), ([1, 300, 1000, 129, 40], [1, 0, 200, 129, 33], 1.0),
    ([n + 3 for n in range(70)], [n % 3 for n in range(70)], 1.0), ([2048], [1024], 1.0)]
SHAPES: dict[str, tuple[list[int], list[int]]] = {                  # lengths, queries
    "512": ([512], [512]), "2048": ([2048], [2048]), "8192": ([8192], [8192]), "512 of 8192": ([8192], [512]),
    "4 x 2048": ([2048] * 4, [2048] * 4), "ragged 6144": ([3000, 1000, 1500, 400, 200, 44],) * 2,
    "32 x 1 of 2048": ([2048] * 32, [1] * 32), "16384": ([16384], [16384])}
OF_ALL = ("512", "2048", "8192", "512 of 8192")                     # what models other than the 8B are timed on
LAYERS = 4
FLASH_HEAD_DIMS = (64, 128)                                         # a packed vLLM may hold no others: the process would die


class Report:
    """The results so far, on disk after every step, and the time that is left."""

    def __init__(self, path: Path, limit: float) -> None:
        self.path, self.end, self.data = path, time.monotonic() + limit, {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": {}, "times": [], "failures": []}

    def out_of_time(self) -> bool:
        return time.monotonic() > self.end

    def write(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")

    def failed(self, what: str) -> None:
        print("FAILED", what, flush=True)
        self.data["failures"].append(what)


def flash_attention_3(site: Path | None) -> tuple[Callable[..., Any] | None, str]:
    """vLLM's `flash_attn_varlen_func` without vLLM's own initialisation, or None and why not."""
    if site is None:
        return None, "no --flash given"
    if not (site / "vllm" / "vllm_flash_attn").is_dir():
        return None, f"{site} holds no vllm/vllm_flash_attn"
    package = types.ModuleType("vllm")                  # its own __init__ would import the whole engine
    package.__path__ = [str(site / "vllm")]
    sys.modules["vllm"] = package
    sys.path.append(str(site))
    try:
        from vllm.vllm_flash_attn import FA3_AVAILABLE, flash_attn_varlen_func
    except (ImportError, OSError, RuntimeError) as error:
        inner = sys.modules.get("vllm.vllm_flash_attn.flash_attn_interface")
        return None, f"not importable: {getattr(inner, 'FA3_UNAVAILABLE_REASON', None) or error}"
    return (flash_attn_varlen_func, "") if FA3_AVAILABLE else (None, "not importable: the wheel's FA3 did not load")


def check(lib: dev.Library, name: str, report: Report) -> bool:
    """All shapes over poisoned pages, then 100 times over poisoned outputs: every answer the same bits."""
    spec, worst, good = lib.spec(name), 0.0, True
    for i, (lengths, queries, magnitude) in enumerate(CHECKS):
        if max(lengths) > spec["max_pages"] * spec["page_size"]:
            continue
        case = dev.PagedCase(spec, lengths, queries, magnitude=magnitude, seed=i)
        launch = lib.prepare(name, case.buffers(1))
        launch()
        different = dev.other_bits(launch, case.y)
        error = dev.relative_error(case.y, case.reference(1))
        worst = max(worst, error)
        if error >= TOLERANCE[spec["kv_dtype"]] or different:
            good = False
            report.failed(f"{name} case {i}: error {error:.2e}, {different} of {dev.REPEATS} repeats differ")
    report.data["checks"][name] = worst
    print(f"check  {name:28s} error {worst:.2e}", flush=True)
    report.write()
    return good


def work_of(spec: dict[str, Any], lengths: list[int], queries: list[int]) -> int:
    pairs = sum(q * n - q * (q - 1) // 2 for n, q in zip(lengths, queries, strict=True))
    return 4 * pairs * spec["num_heads"] * spec["head_dim"]


def peers(case: dev.PagedCase, flash: Callable[..., Any] | None) -> dict[str, list[Callable[[], Any]]]:
    """The same work by others, one call per layer."""
    spec, lengths, queries = case.spec, case.lengths_host, case.queries
    heads, kv_heads, dim = spec["num_heads"], spec["num_kv_heads"], spec["head_dim"]
    found: dict[str, list[Callable[[], Any]]] = {}
    if lengths == queries and len(set(lengths)) == 1:
        many = torch.randn((LAYERS, 3, len(lengths), heads, lengths[0], dim), device=dev.DEVICE, dtype=torch.bfloat16)
        found["sdpa"] = [lambda x=x: F.scaled_dot_product_attention(*x, is_causal=True) for x in many]
    if flash is None or dim not in FLASH_HEAD_DIMS:
        return found
    rows = case.q.reshape(-1, heads, dim)
    common = dict(max_seqlen_q=max(queries), cu_seqlens_q=case.query_start, max_seqlen_k=max(lengths), causal=True,
                  softmax_scale=spec["scale"], fa_version=3)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=dev.DEVICE)
    whole = [torch.randn((2, sum(lengths), kv_heads, dim), device=dev.DEVICE, dtype=torch.bfloat16) for _ in range(LAYERS)]
    found["fa3"] = [lambda kv=kv: flash(rows, kv[0], kv[1], cu_seqlens_k=starts, **common) for kv in whole]
    count = sum(-(-n // spec["page_size"]) for n in lengths) + 1
    paged = [torch.randn((2, count, spec["page_size"], kv_heads, dim), device=dev.DEVICE, dtype=torch.bfloat16)
             for _ in range(LAYERS)]
    table = case.page_table[:, :-(-max(lengths) // spec["page_size"])].contiguous()
    found["fa3 paged"] = [lambda kv=kv: flash(rows, kv[0], kv[1], seqused_k=case.lengths, block_table=table, **common)
                          for kv in paged]
    return found


def capture(calls: list[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
        for call in calls:
            call()
    return graph


def take_turns(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 7, replays: int = 5) -> dict[str, float]:
    """Seconds of one call of each: the median over rounds of the median over replays."""
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times = []
            graph.replay()
            for _ in range(replays):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e-3 / LAYERS)
            seconds[name].append(sorted(times)[replays // 2])
    return {name: sorted(values)[rounds // 2] for name, values in seconds.items()}


def time_model(lib: dev.Library, model: str, shape: str, good: set[str], flash: Callable[..., Any] | None,
               report: Report) -> None:
    names = [n for n in lib.names(f"prefill.{model}") if n in good and n.split(".")[1].split("@")[0] == model]
    if not names:
        return
    spec = lib.spec(names[0])
    lengths, queries = SHAPES[shape]
    case = dev.PagedCase(spec, lengths, queries, layers=LAYERS)
    work = work_of(spec, lengths, queries)
    reference = case.reference(LAYERS - 1, rows=64)
    calls = peers(case, flash)                          # kept: the graphs read what these hold
    graphs = {name: capture(of_peer) for name, of_peer in calls.items()}
    for name in names:
        case.y.fill_(dev.POISON)
        calls[name] = [lib.prepare(name, case.buffers(layer)) for layer in range(LAYERS)]
        graphs[name] = capture(calls[name])
        case.y.fill_(dev.POISON)
        graphs[name].replay()
        if (error := dev.relative_error(case.y, reference)) >= TOLERANCE[spec["kv_dtype"]]:
            report.failed(f"{name} {shape}: error {error:.2e}")
    for name, seconds in take_turns(graphs).items():
        report.data["times"].append({"model": model, "shape": shape, "kernel": name, "us": seconds * 1e6,
                                     "tflops": work / seconds / 1e12})
        print(f"{model:5s}{shape:16s}{name:28s}{seconds * 1e6:9.1f} us{work / seconds / 1e12:8.1f} TFLOP/s", flush=True)
    report.write()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--flash", type=Path)
    parser.add_argument("--limit", type=float, default=120)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out / "prefill_attention.json", args.limit)
    lib = dev.Library(args.folder)
    flash, reason = flash_attention_3(args.flash)
    report.data["flash_attention_3"] = reason or "loaded"
    print(report.data["device"], "FlashAttention-3:", reason or "loaded", flush=True)
    good = {name for name in lib.names("prefill.") if check(lib, name, report)}
    for shape in SHAPES:
        for model in ("8b", "1b", "7b", "d256"):
            if not report.out_of_time() and (model == "8b" or shape in OF_ALL):
                time_model(lib, model, shape, good, flash, report)
    report.data["finished"] = not report.out_of_time()
    report.write()
    return 1 if report.data["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
