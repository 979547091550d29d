"""How two bundles, or builds of one model with other options, differ in what their steps do: kernels, bytes, FLOPs, passes
and memory, from the records of both.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from relaxpack.dist.bundle import Bundle
from relaxpack.explain.document import explanation
from relaxpack.step_costs import GPUS, Machine
from relaxpack.target import TargetSpec

_CPU = Machine("a CPU", 50e9, 0.4e12, "the same for both sides of a comparison")


def step_differences(left: Bundle, right: Bundle) -> dict[str, Any]:
    """`facts`: name → [left, right] where they differ; `kernels`: name → [calls left, calls right] of a decode step where
    they differ. Targets that both have are compared, each named where there are several; the first ones where they have
    none in common. Empty where a bundle has no record."""
    names = [entry.target.name for entry in left.manifest.targets]
    common = [name for name in names if name in {entry.target.name for entry in right.manifest.targets}]
    pairs = [(name, name) for name in common] or [(names[0], right.manifest.targets[0].target.name)]
    found: dict[str, Any] = {"facts": {}, "kernels": {}}
    for one, other in pairs:
        if left.target(one).explain in left and right.target(other).explain in right:
            prefix = f"{one}: " if len(pairs) > 1 else ""
            for kind, values in _differences(left, one, right, other).items():
                found[kind] |= {f"{prefix}{name}": value for name, value in values.items()}
    return found


def _differences(left: Bundle, one: str, right: Bundle, other: str) -> dict[str, Any]:
    """Of one target of each. Times are predicted for one machine, that of the left one."""
    machine = machine_of(left.target(one).target)
    context = min(1024, *(bundle.manifest.model_info.max_context - 1 for bundle in (left, right)))
    a, b = (explanation(bundle, context=context, machine=machine, target=name)
            for bundle, name in ((left, one), (right, other)))
    return compare(a, b)


def machine_of(target: TargetSpec) -> Machine:
    return GPUS[target.arch] if target.kind == "cuda" else _CPU


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of two explanations."""
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
    found["passes on request"] = ", ".join(what["enabled"]) or "none"
    found["passes"] = len(what["passes"])
    if "parameter_bytes" in what:
        found["parameters: bytes"] = what["parameter_bytes"]
    found["memory: intermediates"] = what["memory"]["arena_bytes"]
    found["memory: lower bound"] = what["memory"]["live_bytes"]
    return found
