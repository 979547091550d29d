"""Everything `relaxpack explain` shows, as one JSON document, from a bundle's own record. Compiles and runs nothing
(measured times are handed in).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from relaxpack.dist.bundle import Bundle
from relaxpack.dist.describe import AUDIT
from relaxpack.errors import BundleError
from relaxpack.step_costs import KernelCost, Machine, floor_bytes, machine_for, step_costs


def explanation(bundle: Bundle, rows: int = 1, context: int = 1024, machine: Machine | None = None,
                measured: Sequence[tuple[str, float]] = (), target: str | None = None) -> dict[str, Any]:
    """`target`: its name; None: the first one. `measured`: seconds of each kernel of the decode step, in launch order.
    Context is cut to what the bundle allows."""
    manifest = bundle.manifest
    entry = bundle.target(target)
    info = manifest.info_for(entry)
    machine = machine or machine_for(entry.target.kind, entry.target.arch, entry.target.features)
    record = bundle.read_json(entry.explain)
    try:
        shown = explain_record(record, entry.buckets, entry.memory_plan.get("arena_bytes"), info.max_context,
                               info.prefill_chunk, machine, rows, context, measured)
    except (AttributeError, KeyError, TypeError, ValueError) as error:      # of an older relaxpack, say
        raise BundleError(f"{bundle.location}: {entry.explain} is not a record of kernels and passes as this relaxpack "
                          f"reads it (the bundle is of relaxpack {manifest.relaxpack_version}): build it again") from error
    return {
        "model": info.to_json(), "target": entry.target.name, "compiler": dict(manifest.compiler),
        "weights": dict(manifest.weights.formats), "options": dict(manifest.build_options),
        "activations": entry.activations or "float",
        **shown,
        "tuning_records": list(entry.tuning_records),
        "audit": bundle.read_json(AUDIT) if AUDIT in bundle else {},
    }


def explain_record(record: Mapping[str, Any], buckets: Mapping[str, Sequence[int]], arena_bytes: int | None,
                   max_context: int, prefill_chunk: int, machine: Machine, rows: int = 1, context: int = 1024,
                   measured: Sequence[tuple[str, float]] = ()) -> dict[str, Any]:
    """What follows from the record of a lowering (`Lowered.explanation`) alone."""
    context = min(context, max_context - 1)
    sources = {kernel["name"]: kernel["source"] for kernel in record["kernels"]}
    decode = decode_function(buckets, rows)
    steps = record.get("steps", {})
    costs = step_costs(steps.get(decode, ()), sources, machine, rows, context)
    kernels = [{**asdict(cost), **_measurement(cost, measured, i)} for i, cost in enumerate(costs)]
    chunk = min(prefill_chunk, context)
    prompts = "prefill" if "prefill" in steps else "embed"     # a bundle that only embeds
    prefill = step_costs(steps.get(prompts, ()), sources, machine, chunk, chunk)
    floor = floor_bytes(steps.get(decode, ()), rows, context)
    return {
        "machine": asdict(machine), "rows": rows, "context": context,
        "step": {"function": decode, **_totals(costs, measured), "floor_bytes": floor,
                 "chain": max((call.get("depth", 0) for call in steps.get(decode, ())), default=0),
                 "bytes_over_floor": sum(c.bytes for c in costs) / floor if floor else None, "kernels": kernels},
        "prefill": {"function": prompts, "rows": chunk, **_totals(prefill, ()),
                    "kernels": [asdict(cost) for cost in prefill]},
        "passes": record.get("passes", []), "disabled": record.get("disabled", []), "enabled": record.get("enabled", []),
        "notes": record.get("notes", []), "phases": record["phases"],
        "schedules": dict(sorted(Counter(k["source"].split(":")[0] for k in record["kernels"]).items())),
        "not_ours": [k for k in record["kernels"] if k["source"] in ("fallback", "dlight")],
        "functions": [{"name": name, **_function(plan, steps.get(name, ()))}
                      for name, plan in sorted(record["memory_plan"].items(), key=lambda item: _by_bucket(item[0]))],
        "memory": {"arena_bytes": arena_bytes,
                   "live_bytes": max((p.get("live_bytes", 0) for p in record["memory_plan"].values()), default=0)},
        "memory_plan": record["memory_plan"], "calls": record["calls"], "tuning": record.get("tuning", {}),
    }


def _by_bucket(name: str) -> tuple[str, int]:
    """decode, decode_1, decode_16, decode_spread_1."""
    base, _, size = name.rpartition("_")
    return (base, int(size)) if size.isdigit() else (name, 0)


def decode_function(buckets: Mapping[str, Sequence[int]], rows: int) -> str:
    """The function that decodes `rows` sequences: the smallest bucket that holds them, else the symbolic one."""
    fitting = sorted(size for size in buckets.get("decode", ()) if size >= rows)
    return f"decode_{fitting[0]}" if fitting else "decode"


def _measurement(cost: KernelCost, measured: Sequence[tuple[str, float]], index: int) -> dict[str, Any]:
    if index >= len(measured):
        return {}
    name, seconds = measured[index]
    assert name == cost.kernel, (name, cost.kernel)
    return {"measured_seconds": seconds, "share_of_roofline": cost.seconds / seconds if seconds else None}


def _totals(costs: Sequence[KernelCost], measured: Sequence[tuple[str, float]]) -> dict[str, Any]:
    return {"launches": len(costs), "bytes": sum(c.bytes for c in costs), "flops": sum(c.flops for c in costs),
            "seconds": sum(c.seconds for c in costs),
            **({"measured_seconds": sum(s for _, s in measured)} if measured else {})}


def _function(plan: dict[str, Any], calls: Sequence[Any]) -> dict[str, Any]:
    return {"captured": plan.get("captured", False), "launches": len(calls), "storages": plan["storages"],
            "bytes": plan["bytes"], "live_bytes": plan.get("live_bytes", 0),
            "result_bytes": plan.get("result_bytes", 0), "tensors": len(plan["tensors"]),
            "tensor_bytes": sum(t["size"] for t in plan["tensors"])}
