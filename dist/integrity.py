"""Digests, limits and member names: what a reader checks before it trusts a byte. Knows nothing of what members mean.

A digest proves that a member is the one the manifest names. It proves origin only where the manifest itself came from
someone trusted: a bundle's library is code that the runtime will run.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, BinaryIO

from relaxpack.errors import DamagedMemberError, UnsafeMemberError

MAX_MANIFEST_BYTES = 64 << 20
MAX_MEMBERS = 100_000
MAX_NAME_LENGTH = 255
_CHUNK = 1 << 20
# One path segment: starts with a letter, digit or "_", so neither "." nor "..", nor a hidden file, nor an option.
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")


def check_member_name(name: str) -> str:
    """`name` itself, if it is a plain relative path of safe segments. Raises UnsafeMemberError."""
    if (len(name) > MAX_NAME_LENGTH
            or not all(_SEGMENT.fullmatch(segment) for segment in name.split("/"))):
        raise UnsafeMemberError(f"unsafe member name {name[:80]!r}: a member is a relative path of letters, digits and "
                                "._+- in each segment; do not load this bundle")
    return name


def sha256_bytes(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_stream(stream: BinaryIO) -> str:
    """Digest of everything left in `stream`."""
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def canonical_json(value: Any, first: str | None = None) -> bytes:
    """The one UTF-8 form of a JSON value: keys sorted (with `first` before all others at the top), two spaces of
    indent, no NaN or infinity, a newline at the end."""
    if first is not None:
        value = {first: value[first], **{k: v for k, v in sorted(value.items()) if k != first}}
        value = {k: json.loads(json.dumps(v, sort_keys=True)) for k, v in value.items()}
    text = json.dumps(value, sort_keys=first is None, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def parse_json(member: str, data: bytes) -> Any:
    """JSON of a member; duplicate keys, NaN and deep nesting are damage. Raises DamagedMemberError."""
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key stands twice")
        return result

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedMemberError(f"{member} is damaged: not valid JSON ({error})") from None
