"""The store of tuning records: one SQLite file, or a PostgreSQL database by URL. Any number of processes may read and
write it at once; what `add` has returned from survives a kill -9 of anyone. Knows keys and ids, not what a record means.

    with open_store("tuning.sqlite") as store:          # or "postgresql://user:password@host/name"
        store.add(record)                               # True where it is new
        best = store.lookup(workload.hash, 16, digest(target), digest(compiler))
        store.mark(record.id, "stale", "time not reproduced: 40 us, then 61 us")

`lookup` answers with the good record of least rank (median time, then id), or None: never with a record of another
target or compiler, never with a marked one. A row that is damaged is passed over, logged, and named by `damaged()`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa

from relaxpack.dist.tuning import schema
from relaxpack.dist.tuning.engine import Forkable, clear_errors, connect, shown
from relaxpack.dist.tuning.writing import add_records, raise_status, remove_records
from relaxpack.errors import DamagedRecordError, DatabaseError
from relaxpack.tuning_record import Damaged, RecordKey, Status, TuningRecord, tidy

log = logging.getLogger(__name__)


class Query(NamedTuple):
    """Which records; None is any. `bucket` 0 means records without a bucket."""

    status: Status | None = None
    workload_hash: str | None = None
    bucket: int | None = None
    target_hash: str | None = None
    compiler_hash: str | None = None
    ids: tuple[str, ...] | None = None


ANY = Query()


class RecordSource(Protocol):
    """What a build reads: a store, a bundle, or several of them (`relaxpack.dist.tuning.layers`)."""

    location: str

    def lookup(self, workload_hash: str, bucket: int | None, target_hash: str,
               compiler_hash: str) -> TuningRecord | None: ...
    def candidates(self, key: RecordKey) -> list[TuningRecord]: ...
    def all(self, query: Query = ANY) -> Iterator[TuningRecord]: ...
    def close(self) -> None: ...


def open_store(location: str, *, create: bool = True) -> RecordStore:
    """Raises DatabaseError where it cannot be reached or is something else, NewerDatabaseError for a newer schema. With
    `create` a missing SQLite file or an empty PostgreSQL database becomes a store."""
    return RecordStore(location, create=create)


class RecordStore:
    def __init__(self, location: str, *, create: bool = True) -> None:
        self.location = shown(location)
        self._given = location
        with clear_errors(location):
            self._forkable = Forkable(connect(location, create=create))
            try:
                self._prepare(create)
            except BaseException:
                self._forkable.engine.dispose()
                raise

    def _prepare(self, create: bool) -> None:
        with self._forkable.engine.connect().execution_options(reading=True) as connection, connection.begin():
            if sa.inspect(connection).has_table(schema.facts.name):
                return schema.check_version(connection, self.location)
        if not create:
            raise DatabaseError(f"{self.location} holds no tuning records yet; push some with `relaxpack db push`")
        with self._forkable.engine.begin() as connection:
            schema.prepare(connection, self.location)

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._forkable.engine.dispose()

    def add(self, record: TuningRecord) -> bool:
        """Store one record, or the higher status of one that is there. True where something changed."""
        return self.add_all([record]) > 0

    def add_all(self, records: Iterable[TuningRecord]) -> int:
        """All or none, in one transaction. Returns how many were new or got a higher status."""
        with clear_errors(self._given), self._forkable.engine.begin() as connection:
            return add_records(connection, records)

    def mark(self, record_id: str, status: Status, reason: str) -> bool:
        """Raise the status of a record; True where it changed. A lower or equal mark changes nothing. Raises DatabaseError
        for an unknown id."""
        with clear_errors(self._given), self._forkable.engine.begin() as connection:
            if not connection.execute(sa.select(schema.records.c.id).where(schema.records.c.id == record_id)).first():
                raise DatabaseError(f"{self.location} has no record {record_id[:16]}")
            return raise_status(connection, record_id, status, tidy(reason)) > 0

    def remove(self, ids: Iterable[str]) -> int:
        """Delete records, and workloads that no record has any more."""
        with clear_errors(self._given), self._forkable.engine.begin() as connection:
            return remove_records(connection, ids)

    def lookup(self, workload_hash: str, bucket: int | None, target_hash: str, compiler_hash: str) -> TuningRecord | None:
        """The best good record of this key, or None."""
        return best(self.candidates(RecordKey(workload_hash, bucket, target_hash, compiler_hash)))

    def candidates(self, key: RecordKey) -> list[TuningRecord]:
        """All records of the key, marked ones included, in the order of their ranks."""
        found = self.all(Query(workload_hash=key.workload, bucket=key.bucket or 0, target_hash=key.target,
                               compiler_hash=key.compiler))
        return sorted(found, key=lambda record: record.rank)

    def get(self, prefix: str) -> TuningRecord:
        """The record whose id starts with `prefix`. Raises DatabaseError where none or several do, DamagedRecordError where
        it cannot be read."""
        column = schema.records.c.id
        with clear_errors(self._given), self._reading() as connection:
            ids = connection.execute(sa.select(column).where(column.startswith(prefix, autoescape=True)).limit(2)).scalars()
            ids = list(ids)
        if len(ids) != 1:
            raise DatabaseError(f"{self.location} has {'several records' if ids else 'no record'} whose id starts with "
                                f"{prefix!r}; `relaxpack db ls` lists them")
        for row in self._rows(Query(ids=(ids[0],))):
            return _record(row)
        raise DatabaseError(f"record {prefix!r} was removed meanwhile")

    def all(self, query: Query = ANY) -> Iterator[TuningRecord]:
        """Every readable record that fits, by id. A snapshot: what is written meanwhile is not seen."""
        for row in self._rows(query):
            try:
                yield _record(row)
            except DamagedRecordError as error:
                log.warning("%s: record %s is passed over: %s", self.location, row.id, error)

    def damaged(self) -> list[Damaged]:
        """Rows that cannot be read as the record they claim to be, with the reason."""
        found = []
        for row in self._rows(Query()):
            try:
                _record(row)
            except DamagedRecordError as error:
                found.append(Damaged(row.id, str(error)))
        return found

    def __len__(self) -> int:
        with clear_errors(self._given), self._reading() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(schema.records)).scalar_one()

    def _reading(self) -> Any:
        return self._forkable.engine.connect().execution_options(reading=True)

    def _rows(self, query: Query) -> Iterator[Any]:
        table = schema.records
        # An outer join, so that a record without its workload is named as damaged and not silently missing.
        statement = sa.select(table, schema.workloads.c.kind, schema.workloads.c.name, schema.workloads.c.hash,
                              schema.workloads.c.text).join(
            schema.workloads, table.c.workload_digest == schema.workloads.c.digest, isouter=True).order_by(table.c.id)
        for column, wanted in ((table.c.status, query.status), (table.c.workload_hash, query.workload_hash),
                               (table.c.target_hash, query.target_hash), (table.c.compiler_hash, query.compiler_hash)):
            if wanted is not None:
                statement = statement.where(column == wanted)
        if query.bucket is not None:
            statement = statement.where(table.c.bucket.is_(None) if query.bucket == 0 else table.c.bucket == query.bucket)
        if query.ids is not None:
            statement = statement.where(table.c.id.in_(query.ids))
        with clear_errors(self._given), self._reading() as connection:
            rows = connection.execute(statement).all()
        yield from rows


def best(candidates: Iterable[TuningRecord]) -> TuningRecord | None:
    """The good record of least rank. Candidates have one key."""
    return min((record for record in candidates if record.status == "good"), key=lambda record: record.rank, default=None)


def _record(row: Any) -> TuningRecord:
    if row.text is None:
        raise DamagedRecordError("its workload is missing")
    try:
        content = json.loads(row.content)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"its content is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DamagedRecordError("its content is not a JSON object")
    record = TuningRecord.from_json({
        **content, "id": row.id, "status": row.status, "reason": row.reason,
        "workload": {"kind": row.kind, "name": row.name, "hash": row.hash, "text": row.text}})
    if record.key != (row.workload_hash, row.bucket, row.target_hash, row.compiler_hash):
        raise DamagedRecordError("its key is not that of its content")
    return record
