"""Parts of an explanation as both the terminal and the page show them."""

from __future__ import annotations

from typing import Any


def by_kernel(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls of one kernel added up, in order of first launch."""
    sums: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        known = sums.setdefault(kernel["kernel"], {**kernel, "calls": 0, "bytes": 0, "flops": 0, "seconds": 0.0,
                                                   **({"measured_seconds": 0.0} if "measured_seconds" in kernel else {})})
        known["calls"] += 1
        for field in ("bytes", "flops", "seconds", "measured_seconds"):
            if field in kernel:
                known[field] += kernel[field]
    return list(sums.values())


def chain_text(step: dict[str, Any]) -> str:
    """Whether kernels could run side by side."""
    beside = step["launches"] - step["chain"]
    if not step["chain"]:
        return ""
    return (f"{beside} of them could run beside others: they do not wait for their results." if beside
            else "Each waits for the result of the one before, so none could run beside another.")


def changes(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The passes after which the module was another size, or the IR another."""
    kept: list[dict[str, Any]] = []
    for one in passes:
        last = kept[-1] if kept else {}
        if one.get("ir") or any(one[size] != last.get(size) for size in ("bindings", "prim_funcs")):
            kept.append(one)
    return kept


def step_functions(what: dict[str, Any]) -> tuple[str, ...]:
    """Whose sizes are shown pass by pass. A bundle that only embeds has one."""
    return ("decode", "prefill") if what["step"]["kernels"] else (what["prefill"]["function"],)
