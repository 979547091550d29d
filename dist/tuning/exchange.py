"""Push records to a place of bundles and pull them from it. A push writes one new bundle with what the place does not know
yet; a pull reads all bundles and names what is damaged. Both may be repeated, and run at once with others'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from relaxpack.dist.tuning.merge import union
from relaxpack.dist.tuning.place import Place
from relaxpack.dist.tuning.records_file import decode, encode, file_name
from relaxpack.errors import DatabaseError
from relaxpack.tuning_record import Damaged, TuningRecord, joined


@dataclass
class Pulled:
    url: str
    bundles: int = 0
    records: list[TuningRecord] = field(default_factory=list)   # by id
    damaged: list[Damaged] = field(default_factory=list)


@dataclass
class Pushed:
    url: str
    new: list[TuningRecord]      # not there before, or there with a lower status
    known: int
    bundle: str | None           # where the new bundle lies
    damaged: list[Damaged]       # found there


def pull(url: str) -> Pulled:
    """Everything that is readable at a place. Raises DatabaseError where the place cannot be read, or holds bundles of
    which none can be read."""
    return _read(Place(url), url, must_exist=True)


def push(records: Iterable[TuningRecord], url: str) -> Pushed:
    place = Place(url)
    there = _read(place, url, must_exist=False)
    known = union(there.records)
    wanted = union(records)
    new = [record for record in wanted.values()
           if record.id not in known or joined(known[record.id], record) != known[record.id]]
    name = None
    if new:
        data = encode(new)
        name = file_name(data)
        place.write(name, data)
    return Pushed(place.shown, new, len(wanted) - len(new), name and place.path(name), there.damaged)


def _read(place: Place, url: str, *, must_exist: bool) -> Pulled:
    pulled = Pulled(place.shown)
    names = [] if place.is_one_bundle and not must_exist else place.names()
    if not names and must_exist:
        raise DatabaseError(f"no bundles of tuning records at {place.shown}{place.listing_problem}; "
                            f"`relaxpack db push {place.shown}` puts some there")
    found: dict[str, TuningRecord] = {}
    for name in names:
        where = name[:12] + ".jsonl" if name else place.shown
        try:
            data = place.read(name)
            read = decode(data, where)
        except DatabaseError as error:
            if len(names) == 1 and must_exist:
                raise
            pulled.damaged.append(Damaged(where, str(error)))
            continue
        pulled.bundles += 1
        pulled.damaged += read.damaged
        if name and not read.damaged and file_name(data) != name:
            pulled.damaged.append(Damaged(where, "its name is not the digest of its content; every record in it is whole"))
        found = union(found.values(), read.records)
    pulled.records = [found[record_id] for record_id in sorted(found)]
    return pulled
