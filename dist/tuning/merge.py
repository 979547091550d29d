"""The merge rule (docs/tuning_database.md): a database is a set of records, merging is the union of the sets, and of one
record's copies the higher status wins. So order and repetition do not matter, and nothing crosses a key.

Which record a key is answered with is not stored but follows from the set: the good one of least rank. The beaten ones
stay, because the winner may be marked by someone else later; `prune` removes them where wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from relaxpack.dist.tuning.store import RecordStore, best
from relaxpack.tuning_record import RecordKey, TuningRecord, joined

log = logging.getLogger(__name__)
_MANY_KEYS = 30


class Conflict(NamedTuple):
    """Both sides had a good record of one key. Which of them is kept does not depend on which side was merged into which."""

    kept: TuningRecord
    beaten: TuningRecord

    def __str__(self) -> str:
        kept, beaten = (f"{record.id[:12]} with {record.median_us:.4g} us" for record in self)
        return f"{self.kept.workload.name}, bucket {self.kept.bucket}: {kept} kept, {beaten} beaten"


@dataclass
class MergeReport:
    new: list[TuningRecord] = field(default_factory=list)
    marked: list[TuningRecord] = field(default_factory=list)    # known here with a lower status
    known: int = 0
    conflicts: list[Conflict] = field(default_factory=list)


def union(*sides: Iterable[TuningRecord]) -> dict[str, TuningRecord]:
    """All records of all sides by id: the merge itself."""
    result: dict[str, TuningRecord] = {}
    for side in sides:
        for record in side:
            result[record.id] = joined(result[record.id], record) if record.id in result else record
    return result


def by_key(records: Iterable[TuningRecord]) -> dict[RecordKey, list[TuningRecord]]:
    result: dict[RecordKey, list[TuningRecord]] = {}
    for record in records:
        result.setdefault(record.key, []).append(record)
    return result


def winners(records: Iterable[TuningRecord]) -> dict[RecordKey, TuningRecord]:
    """What each key is answered with."""
    found = {key: best(candidates) for key, candidates in by_key(records).items()}
    return {key: record for key, record in found.items() if record is not None}


def merge_into(store: RecordStore, records: Iterable[TuningRecord], dry_run: bool = False) -> MergeReport:
    """Merge `records` into `store`, in one transaction, and say what that changed. Conflicts are logged."""
    report = MergeReport()
    incoming = union(records)
    keys = by_key(incoming.values())
    # One question for each key, or one for all: over a network the number of questions is what takes time.
    stored = by_key(store.all()) if len(keys) > _MANY_KEYS else {key: store.candidates(key) for key in keys}
    for key, theirs in keys.items():
        ours = {record.id: record for record in stored.get(key, ())}
        for record in theirs:
            old = ours.get(record.id)
            if old is None:
                report.new.append(record)
            elif joined(old, record) != old:
                report.marked.append(record)
            else:
                report.known += 1
        if conflict := _conflict(ours, {record.id: record for record in theirs}):
            report.conflicts.append(conflict)
            log.info("%s: conflict: %s", store.location, conflict)
    if not dry_run:
        store.add_all(incoming.values())
    return report


def _conflict(ours: Mapping[str, TuningRecord], theirs: Mapping[str, TuningRecord]) -> Conflict | None:
    """The two sides' winners, judged with all that both sides know."""
    known = union(ours.values(), theirs.values())
    sides = [best(known[record_id] for record_id in side) for side in (ours, theirs)]
    if None in sides or sides[0] == sides[1]:
        return None
    kept, beaten = sorted((record for record in sides if record is not None), key=lambda record: record.rank)
    return Conflict(kept, beaten)
