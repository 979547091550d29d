"""How two bundles differ: what their manifests say, and which members. Compares digests, never contents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relaxpack.dist.bundle import Bundle


def diff(left: Bundle, right: Bundle) -> dict[str, Any]:
    """`equal`; `fields`: manifest path → [left, right] (None where absent), parameter lists as counts; `members`: name →
    [left bytes, right bytes] of those whose digests differ."""
    a, b = (dict(_leaves(_comparable(bundle))) for bundle in (left, right))
    fields = {path: [a.get(path), b.get(path)] for path in sorted(a.keys() | b.keys()) if a.get(path) != b.get(path)}
    ours, theirs = left.manifest.members, right.manifest.members
    members = {name: [ours[name].bytes if name in ours else None, theirs[name].bytes if name in theirs else None]
               for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)}
    return {"left": str(left.location), "right": str(right.location), "equal": not fields and not members,
            "fields": fields, "members": members}


def _comparable(bundle: Bundle) -> dict[str, Any]:
    """The manifest without its members, targets by name instead of by place."""
    manifest = bundle.manifest.to_json()
    del manifest["members"]
    manifest["targets"] = {entry.target.name: described for entry, described in
                           zip(bundle.manifest.targets, manifest["targets"], strict=True)}
    return manifest


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and len(value) > 16:
        yield f"{path} (count)", len(value)
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
