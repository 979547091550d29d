"""The key of an artifact: a hash of everything that changes the output. Two builds with the same key give the same
bundle, so a build may be skipped where a bundle with its key stands. Values are given; nothing is looked up here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaxpack.dist.integrity import canonical_json, sha256_bytes


def artifact_key(*, source_digest: str, relaxpack_version: str, compiler: Mapping[str, str],
                 targets: list[dict[str, Any]], weights: str, build_options: Mapping[str, Any],
                 tuning_records: list[str] | None = None) -> str:
    """SHA-256 in hex over the canonical JSON of the arguments. `source_digest` names the checkpoint's content,
    `targets` are `TargetSpec.to_json()` values, `tuning_records` the ids of the records the build may use."""
    return sha256_bytes(canonical_json({
        "source_digest": source_digest, "relaxpack_version": relaxpack_version, "compiler": dict(compiler),
        "targets": targets, "weights": weights, "build_options": dict(build_options),
        "tuning_records": sorted(tuning_records or [])}))
