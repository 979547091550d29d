"""Several databases that answer as one: what each knows is merged by the merge rule, so their order does not matter and a
record marked in one of them is used from none. Any location is opened by what it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from relaxpack.dist.tuning.engine import is_postgresql
from relaxpack.dist.tuning.exchange import pull
from relaxpack.dist.tuning.merge import by_key, union
from relaxpack.dist.tuning.store import ANY, Query, RecordSource, best, open_store
from relaxpack.errors import DatabaseError
from relaxpack.tuning_record import RecordKey, TuningRecord

log = logging.getLogger(__name__)
_SQLITE = b"SQLite format 3\x00"
STORE_SUFFIXES = (".sqlite", ".sqlite3", ".db")


class Records:
    """Records in memory, e.g. those of a bundle."""

    def __init__(self, records: Iterable[TuningRecord], location: str) -> None:
        self.location = location
        self._by_key = {key: sorted(found, key=lambda record: record.rank)
                        for key, found in by_key(union(records).values()).items()}

    def lookup(self, workload_hash: str, bucket: int | None, target_hash: str, compiler_hash: str) -> TuningRecord | None:
        return best(self.candidates(RecordKey(workload_hash, bucket, target_hash, compiler_hash)))

    def candidates(self, key: RecordKey) -> list[TuningRecord]:
        return list(self._by_key.get(key, ()))

    def all(self, query: Query = ANY) -> Iterator[TuningRecord]:
        found = (record for records in self._by_key.values() for record in records if matches(record, query))
        yield from sorted(found, key=lambda record: record.id)

    def close(self) -> None:
        pass


class Layers:
    def __init__(self, sources: Sequence[RecordSource]) -> None:
        self.sources = tuple(sources)
        self.location = ", ".join(source.location for source in sources)

    def lookup(self, workload_hash: str, bucket: int | None, target_hash: str, compiler_hash: str) -> TuningRecord | None:
        return best(self.candidates(RecordKey(workload_hash, bucket, target_hash, compiler_hash)))

    def candidates(self, key: RecordKey) -> list[TuningRecord]:
        merged = union(*(source.candidates(key) for source in self.sources))
        return sorted(merged.values(), key=lambda record: record.rank)

    def all(self, query: Query = ANY) -> Iterator[TuningRecord]:
        # The status is judged after merging: a good record here may be a marked one there.
        merged = union(*(source.all(query._replace(status=None)) for source in self.sources))
        yield from (merged[record_id] for record_id in sorted(merged) if query.status in (None, merged[record_id].status))

    def close(self) -> None:
        for source in self.sources:
            source.close()


def matches(record: TuningRecord, query: Query) -> bool:
    key = record.key
    return ((query.status in (None, record.status)) and query.workload_hash in (None, key.workload)
            and (query.bucket is None or query.bucket == (key.bucket or 0))
            and query.target_hash in (None, key.target) and query.compiler_hash in (None, key.compiler)
            and (query.ids is None or record.id in query.ids))


def is_store(location: str) -> bool:
    """Whether a location is a store (PostgreSQL or SQLite) and not a place or file of bundles."""
    if is_postgresql(location):
        return True
    if "://" in location:
        return False
    path = Path(location)
    if path.is_file():
        with path.open("rb") as f:
            return f.read(len(_SQLITE)) == _SQLITE or path.suffix in STORE_SUFFIXES
    return path.suffix in STORE_SUFFIXES and not path.is_dir()


def open_source(location: str) -> RecordSource:
    """A store, a bundle, or a place of bundles, to read. Damaged records of a bundle are logged and left out. Raises
    DatabaseError where nothing is there."""
    if is_store(location):
        return open_store(location, create=False)
    if "://" not in location and not Path(location).exists():
        raise DatabaseError(f"there is nothing at {location}: neither a tuning database nor bundles")
    pulled = pull(location)
    for damaged in pulled.damaged:
        log.warning("%s: %s", damaged.where, damaged.problem)
    return Records(pulled.records, pulled.url)
