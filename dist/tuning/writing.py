"""What changes a store, statement by statement, inside the transaction of the caller. Several writers may be at it at once:

- Rows are touched in one order (workloads by digest, then records by id, then marks by id), so two writers never wait for
  each other in a circle.
- On PostgreSQL who removes is alone: it takes away workloads that no record has any more, and a writer beside it could be
  about to use one. SQLite has one writer at a time anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from relaxpack.dist.tuning import schema
from relaxpack.tuning_record import STATUSES, Status, TuningRecord, canonical, digest, joined

_BATCH = 500
_LOCK = 0x72707772       # an advisory lock of ours
T = TypeVar("T")


def add_records(connection: sa.Connection, records: Iterable[TuningRecord]) -> int:
    """How many were new or got a higher status."""
    _lock(connection, "pg_advisory_xact_lock_shared")
    wanted: dict[str, TuningRecord] = {}
    for record in records:
        wanted[record.id] = joined(wanted[record.id], record) if record.id in wanted else record
    new = _unknown(connection, sorted(wanted))
    workloads, rows = {}, []
    for record_id in new:
        record = wanted[record_id]
        content, key = record.content(), record.key
        workload = content.pop("workload")
        name = digest(workload)
        workloads[name] = {"digest": name, **workload}
        rows.append({"id": record_id, "workload_digest": name, "workload_hash": key.workload, "bucket": key.bucket,
                     "target_hash": key.target, "compiler_hash": key.compiler, "status": record.status,
                     "reason": record.reason, "content": canonical(content)})
    _insert(connection, schema.workloads, [workloads[name] for name in sorted(workloads)])
    changed = _insert(connection, schema.records, rows)
    for record_id in sorted(wanted):
        record = wanted[record_id]
        if record.status != "good":
            changed += raise_status(connection, record_id, record.status, record.reason)
    return changed


def raise_status(connection: sa.Connection, record_id: str, status: Status, reason: str) -> int:
    """The rule of `tuning_record.joined`, in the database: 1 where the mark is higher than what is there, else 0."""
    table = schema.records
    lower = STATUSES[:STATUSES.index(status)]
    return connection.execute(table.update().where(
        table.c.id == record_id,
        sa.or_(table.c.status.in_(lower), sa.and_(table.c.status == status, table.c.reason > reason)),
    ).values(status=status, reason=reason)).rowcount


def remove_records(connection: sa.Connection, ids: Iterable[str]) -> int:
    """Delete records, and workloads that no record has any more. Returns how many records there were."""
    _lock(connection, "pg_advisory_xact_lock")
    removed = sum(connection.execute(schema.records.delete().where(schema.records.c.id.in_(batch))).rowcount
                  for batch in _batches(sorted(set(ids))))
    if removed:
        used = sa.select(schema.records.c.workload_digest)
        connection.execute(schema.workloads.delete().where(schema.workloads.c.digest.not_in(used)))
    return removed


def _unknown(connection: sa.Connection, ids: Sequence[str]) -> list[str]:
    known: set[str] = set()
    for batch in _batches(ids):
        known.update(connection.execute(sa.select(schema.records.c.id).where(schema.records.c.id.in_(batch))).scalars())
    return [record_id for record_id in ids if record_id not in known]


def _insert(connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> int:
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert
    statement = insert(table).on_conflict_do_nothing()
    return sum(connection.execute(statement, batch, execution_options={"preserve_rowcount": True}).rowcount
               for batch in _batches(rows))


def _lock(connection: sa.Connection, function: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"SELECT {function}(:lock)"), {"lock": _LOCK})


def _batches(items: Sequence[T]) -> Iterator[list[T]]:
    for start in range(0, len(items), _BATCH):
        yield list(items[start:start + _BATCH])
