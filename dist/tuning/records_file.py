"""The exchange bundle's bytes: JSON lines, one record each with its digest, between a header and a trailer. Deterministic:
equal records give equal bytes, and a bundle's name is the digest of its bytes. A damaged line costs that line only.

    {"count": 2, "format": "relaxpack tuning records", "version": 1}
    {"record": {...}, "sha256": "<of the record's canonical JSON, status included>"}
    ...
    {"count": 2, "sha256": "<of all bytes above>"}
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from relaxpack.dist.integrity import parse_json
from relaxpack.dist.tuning.merge import union
from relaxpack.errors import DamagedMemberError, DamagedRecordError, DatabaseError, NewerDatabaseError
from relaxpack.tuning_record import Damaged, TuningRecord, canonical, digest

FORMAT, VERSION = "relaxpack tuning records", 1
SUFFIX = ".jsonl"
MAX_BYTES = 1 << 30
NAME = re.compile(r"[0-9a-f]{64}\.jsonl")


class Read(NamedTuple):
    records: list[TuningRecord]
    damaged: list[Damaged]


def encode(records: Iterable[TuningRecord]) -> bytes:
    chosen = union(records)
    lines = [canonical({"format": FORMAT, "version": VERSION, "count": len(chosen)})]
    for record_id in sorted(chosen):
        record = chosen[record_id].to_json()
        lines.append(canonical({"record": record, "sha256": digest(record)}))
    body = "".join(line + "\n" for line in lines).encode()
    return body + canonical({"count": len(chosen), "sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n"


def file_name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() + SUFFIX


def decode(data: bytes, where: str) -> Read:
    """The records of a bundle called `where`, and what is wrong with the rest, line by line. Raises DatabaseError for bytes
    that are no bundle at all and NewerDatabaseError for a newer version."""
    if len(data) > MAX_BYTES:
        raise DatabaseError(f"{where} has {len(data)} bytes, more than {MAX_BYTES}: not read")
    lines = data.split(b"\n")
    count = _count(lines[0], where)
    records: list[TuningRecord] = []
    damaged: list[Damaged] = []
    trailer: dict[str, Any] | None = None
    end = 0                                  # where the current line begins
    for number, line in enumerate(lines[1:], 2):
        end += len(lines[number - 2]) + 1
        if line == b"" or trailer is not None:
            if line != b"":
                damaged.append(Damaged(f"{where}:{number}", "a line after the end of the bundle"))
            continue
        try:
            found = parse_json("the line", line)
            if isinstance(found, dict) and found.keys() == {"count", "sha256"}:
                trailer = found
                if found["sha256"] != hashlib.sha256(data[:end]).hexdigest() and not damaged:
                    damaged.append(Damaged(where, "the digest of the whole is wrong; every line read is whole by its own"))
                continue
            records.append(_record(found))
        except (DamagedMemberError, DamagedRecordError) as error:
            damaged.append(Damaged(f"{where}:{number}", _cut(str(error), number == len(lines))))
    if trailer is None:
        damaged.append(Damaged(where, f"cut short: {count} records announced, {len(records)} read whole"))
    elif len(records) != count and not damaged:
        damaged.append(Damaged(where, f"{count} records announced, {len(records)} found"))
    return Read(records, damaged)


def _count(line: bytes, where: str) -> int:
    try:
        header = parse_json("the header", line)
    except DamagedMemberError as error:
        raise DatabaseError(f"{where} is no bundle of tuning records: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DatabaseError(f"{where} is no bundle of tuning records")
    version, count = header.get("version"), header.get("count")
    if isinstance(version, int) and version > VERSION:
        raise NewerDatabaseError(f"{where} was written by a newer relaxpack (version {version}, this one reads {VERSION}); "
                                 "upgrade relaxpack")
    if version != VERSION or not isinstance(count, int):
        raise DatabaseError(f"{where} has a damaged header: version {version!r}, count {count!r}")
    return count


def _record(found: Any) -> TuningRecord:
    if not isinstance(found, dict) or found.keys() != {"record", "sha256"}:
        raise DamagedRecordError("not a line of a bundle")
    if digest(found["record"]) != found["sha256"]:
        raise DamagedRecordError("the digest of the line is wrong")
    return TuningRecord.from_json(found["record"])


def _cut(problem: str, last: bool) -> str:
    return f"cut short: {problem}" if last else problem
