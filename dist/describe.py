"""What `relaxpack inspect` tells, as data: sizes, targets and their fit for a host, config audit, build options. Reads
the manifest and small members only; runs nothing.
"""

from __future__ import annotations

from typing import Any

from relaxpack.dist.bundle import Bundle
from relaxpack.dist.compat import choose_target, interface_reasons, reasons_against
from relaxpack.dist.host import Host, detect_host
from relaxpack.dist.manifest import MANIFEST, TargetEntry

AUDIT = "audit.json"


def describe(bundle: Bundle, host: Host | None = None) -> dict[str, Any]:
    """JSON-ready description. `targets[i].reasons` is empty where the host (default: this machine) can run it, and
    `chosen` names the target that would run."""
    host = detect_host() if host is None else host
    manifest = bundle.manifest
    chosen = choose_target(manifest.targets, host)
    if chosen is not None and interface_reasons(chosen, manifest.relaxpack_version):
        chosen = None       # it would be taken, and refused
    audit = bundle.read_json(AUDIT) if AUDIT in bundle else {}
    described = manifest.to_json()
    members = described.pop("members")
    return {
        "path": str(bundle.location),
        "form": "folder" if bundle.location.is_dir() else "single file",
        "bytes": sum(member.bytes for member in manifest.members.values()) + len(manifest.to_bytes()),
        "sizes": _sizes(bundle),
        "host": {"machine": host.machine, "cpu_features": list(host.cpu_features),
                 "gpus": [{"name": gpu.name, "capability": "{}.{}".format(*gpu.capability),
                           "memory_bytes": gpu.memory_bytes} for gpu in host.gpus]},
        "chosen": chosen.target.name if chosen else None,
        "targets": [_describe_target(bundle, entry, host) for entry in manifest.targets],
        "audit": audit,
        "manifest": described,
        "members": members,
    }


def _describe_target(bundle: Bundle, entry: TargetEntry, host: Host) -> dict[str, Any]:
    members, info = bundle.manifest.members, bundle.manifest.info_for(entry)
    weights = entry.memory_plan.get("weight_bytes")      # older writers did not say; then nothing is shared either
    if not isinstance(weights, int):
        weights = sum(members[name].bytes for name in bundle.param_members(entry.params))
    return {"name": entry.target.name, "features": list(entry.target.features),
            "reasons": [*reasons_against(entry.target, host),
                        *interface_reasons(entry, bundle.manifest.relaxpack_version)],
            "library_bytes": members[entry.library].bytes,
            "params_bytes": weights, "shared_with": shared_with(bundle, entry),
            "activation_dtype": info.activation_dtype, "kv_dtype": info.kv_dtype, "canary": dict(entry.canary),
            "libraries": dict(entry.libraries), "activations": entry.activations or "float",
            "tensors": len(entry.param_order), "functions": list(entry.functions), "kernels": dict(entry.kernels),
            "memory_plan": {name: value for name, value in entry.memory_plan.items() if isinstance(value, int)},
            "symbolic_bounds": dict(entry.symbolic_bounds),
            "buckets": {name: list(sizes) for name, sizes in entry.buckets.items()}}


def shared_with(bundle: Bundle, entry: TargetEntry) -> list[str]:
    """Names of other targets with which parameters are shared."""
    stems = {entry.params, *entry.shared_params}
    return [other.target.name for other in bundle.manifest.targets
            if other is not entry and stems & {other.params, *other.shared_params}]


def _sizes(bundle: Bundle) -> dict[str, int]:
    """Bytes by kind of member."""
    sizes = {"libraries": 0, "parameters": 0, "tokenizer": 0, "other": len(bundle.manifest.to_bytes())}
    kinds = {"lib": "libraries", "params": "parameters", "tokenizer": "tokenizer"}
    for name, member in bundle.manifest.members.items():
        if name != MANIFEST:
            sizes[kinds.get(name.partition("/")[0], "other")] += member.bytes
    return sizes
