"""How two bundles differ in what their steps do: kernels, bytes, FLOPs, passes and memory, from both records."""

from __future__ import annotations

from collections import Counter
from typing import Any

from relaxpack.dist.bundle import Bundle
from relaxpack.explain import MEMBER, explanation
from relaxpack.step_costs import GPUS, Machine

_CPU = Machine("a CPU", 50e9, 0.4e12, "the same for both sides of a comparison")


def step_differences(left: Bundle, right: Bundle) -> dict[str, Any]:
    """`facts`: name → [left, right] where they differ; `kernels`: name → [calls left, calls right] of a decode step where
    they differ. Empty where a bundle has no record. Times are predicted for one machine, that of the left bundle."""
    if MEMBER not in left or MEMBER not in right:
        return {"facts": {}, "kernels": {}}
    target = left.manifest.targets[0].target
    machine = GPUS[target.arch] if target.kind == "cuda" else _CPU
    context = min(1024, *(bundle.manifest.model_info.max_context - 1 for bundle in (left, right)))
    a, b = (explanation(bundle, context=context, machine=machine) for bundle in (left, right))
    sides = [_facts(a), _facts(b)]
    facts = {name: [side.get(name) for side in sides] for name in sides[0] if sides[0][name] != sides[1].get(name)}
    calls = [Counter(k["kernel"] for k in what["step"]["kernels"]) for what in (a, b)]
    kernels = {name: [calls[0][name], calls[1][name]] for name in {**calls[0], **calls[1]}
               if calls[0][name] != calls[1][name]}
    return {"facts": facts, "kernels": kernels}


def _facts(what: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for step, name in (("step", "decode step"), ("prefill", f"prefill of {what['prefill']['rows']} tokens")):
        found |= {f"{name}: {field}": what[step][field] for field in ("launches", "bytes", "flops")}
        found[f"{name}: at least, us"] = round(what[step]["seconds"] * 1e6, 1)
    found["passes left out"] = ", ".join(what["disabled"]) or "none"
    found["passes"] = len(what["passes"])
    found["memory: intermediates"] = what["memory"]["arena_bytes"]
    found["memory: lower bound"] = what["memory"]["live_bytes"]
    return found
