"""What a step must cost: the step table of a bundle evaluated for rows and context, on the roofline of a machine.

Knows neither TVM nor how the table came about (`passes/step_table.py`). A prediction is a lower bound: the larger of
bytes over bandwidth and FLOPs over peak, kernel by kernel, without launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Machine:
    """`bandwidth` in bytes/s, `peak` in FLOP/s of the activations' dtype, half of that of fp8; `origin` says where the
    numbers are from."""

    name: str
    bandwidth: float
    peak: float
    origin: str


# Data sheets: memory bandwidth, dense 16-bit tensor throughput with float32 sums.
GPUS = {
    "sm_80": Machine("A100 SXM 80GB", 2.039e12, 312e12, "data sheet"),
    "sm_86": Machine("RTX 3090", 0.936e12, 71e12, "data sheet"),
    "sm_89": Machine("RTX 4090", 1.008e12, 165e12, "data sheet"),
    "sm_90": Machine("H200 SXM", 4.8e12, 989e12, "data sheet"),
    "sm_90a": Machine("H200 SXM", 4.8e12, 989e12, "data sheet"),
    "sm_100a": Machine("B200", 8.0e12, 2250e12, "data sheet"),
    "sm_120": Machine("RTX 5090", 1.792e12, 209e12, "data sheet"),
}
# FLOP/s of one core: two fused multiply-adds of 8 (AVX2) or 16 (AVX-512) float32 a cycle at 3 GHz.
_CORE = {"avx512f": 2 * 2 * 16 * 3e9, "avx2": 2 * 2 * 8 * 3e9}


def machine_for(kind: str, arch: str, features: Iterable[str], bandwidth: float | None = None,
                peak: float | None = None) -> Machine:
    """The machine of a target. Numbers that are given replace the known ones; a CPU's bandwidth is measured here."""
    if kind == "cuda":
        known = GPUS[arch]
    else:
        from relaxpack.env import num_threads

        core = next((flops for feature, flops in _CORE.items() if feature in set(features)), _CORE["avx2"])
        measured = 0.0 if bandwidth is not None else host_bandwidth(num_threads())
        known = Machine(f"this CPU, {num_threads()} threads", measured, core * num_threads(),
                        "bandwidth measured here, FLOP/s at 3 GHz")
    if bandwidth is None and peak is None:
        return known
    return Machine(known.name, bandwidth or known.bandwidth, peak or known.peak, "given")


def host_bandwidth(threads: int) -> float:
    """Bytes/s that `threads` threads read from memory (best of some passes over 64 MiB each)."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    arrays = [np.ones(1 << 23, np.int64) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(20):
            start = time.perf_counter()
            list(pool.map(np.add.reduce, arrays))
            best = min(best, time.perf_counter() - start)
    return threads * arrays[0].nbytes / best


@dataclass(frozen=True)
class KernelCost:
    kernel: str
    operation: str
    shape: str
    source: str
    bytes: int
    flops: int
    seconds: float     # on the roofline


def step_costs(calls: Iterable[Mapping[str, Any]], sources: Mapping[str, str], machine: Machine, rows: int,
               context: int, logit_rows: int = 1) -> list[KernelCost]:
    """One step of `rows` rows, each with `context` tokens behind it. In a prefill, rows of one sequence share its keys
    and values and see half of the context on average; `logit_rows` of them get logits."""
    costs = []
    for call in calls:
        count = call["rows"] if isinstance(call["rows"], int) else logit_rows if call["rows"] == "r" else rows
        shared = call["rows"] == "t" and rows > 1 and "prefill" in call["kernel"]
        keys = context * call["context_bytes"] * (1 if shared else count)
        moved = call["weight_bytes"] + count * call["row_bytes"] + keys
        flops = count * (call["row_flops"] + context * call["context_flops"] // (2 if shared else 1))
        peak = machine.peak * (2 if call["shape"].startswith("uint8[") else 1)      # both operands are fp8
        costs.append(KernelCost(call["kernel"], call["operation"], call["shape"], sources.get(call["kernel"], "?"),
                                moved, flops, max(moved / machine.bandwidth, flops / peak)))
    return costs


def floor_bytes(calls: Iterable[Mapping[str, Any]], rows: int, context: int) -> int:
    """What no decode step can avoid: weights, keys and values, and the logits."""
    calls = list(calls)
    head = next((c for c in reversed(calls) if c["operation"] == "linear"), None)
    logits = 4 * head["row_flops"] // (2 * _inner(head)) if head else 0
    return sum(c["weight_bytes"] for c in calls) + rows * (
        logits + context * sum(c["context_bytes"] for c in calls))


def _inner(call: Mapping[str, Any]) -> int:
    """K of a linear call, from its shape "dtype[t, K] → ..."."""
    return int(call["shape"].split("]")[0].rsplit(",", 1)[1])
