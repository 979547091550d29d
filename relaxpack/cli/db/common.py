"""What the `db` commands share: options, which records they mean, and how a record reads in a table."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from rich.text import Text

from relaxpack.cli.options import Location
from relaxpack.cli.show import STYLES, console, table
from relaxpack.env import tuning_database
from relaxpack.errors import EnvironmentProblem, UsageError
from relaxpack.fingerprint import compiler_fingerprint, described, difference, target_fingerprint
from relaxpack.kernel_generations import for_workload
from relaxpack.tuning_record import STATUSES, Damaged, Facts, TuningRecord, digest

if TYPE_CHECKING:
    from relaxpack.dist.tuning.merge import MergeReport
    from relaxpack.dist.tuning.store import RecordSource, RecordStore

F = TypeVar("F", bound=Callable[..., Any])
SHORT = 12   # characters of an id that are shown

db_option = click.option("--db", "location", type=Location(), metavar="LOCATION",
                         help="The database, or seed. Default: $RELAXPACK_TUNING_DB, or a file of this user's.")


def filter_options(function: F) -> F:
    """The options that choose records, for a command."""
    options = [
        click.option("--name", metavar="PATTERN", help="Workloads by name, e.g. '*gemv*'."),
        click.option("--target", metavar="TARGET", help="cpu, cuda, cuda:sm_90a, or the start of a target's hash."),
        click.option("--status", type=click.Choice(STATUSES), help="Records with this status."),
        click.option("--bucket", type=click.IntRange(1), metavar="ROWS", help="Records for so many rows."),
        click.option("--here", is_flag=True, help="Only what this machine and its compiler would use."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


class Here(NamedTuple):
    """This machine's targets, each with the compiler that builds for it here."""

    targets: tuple[tuple[Facts, Facts], ...]

    def uses(self, record: TuningRecord) -> bool:
        return any(record.key[2:] == (digest(target), digest(for_workload(compiler, record.workload)))
                   for target, compiler in self.targets)

    def why_none(self, records: Iterable[TuningRecord]) -> str:
        """Of the records that are not for here, the nearest one and what keeps it from being used."""
        nearest = min((self._distance(record, target, compiler) for record in records for target, compiler in self.targets),
                      default=(0, ""))
        return nearest[1]

    @staticmethod
    def _distance(record: TuningRecord, target: Facts, compiler: Facts) -> tuple[int, str]:
        own = for_workload(compiler, record.workload)
        parts = [text for text in (difference(target, record.target), difference(own, record.compiler)) if text]
        other_kind = record.target["kind"] != target["kind"]
        text = f"the nearest, of {described(record.target)}, differs in {', '.join(parts)}"
        return (100 if other_kind else 0) + sum(part.count(" here, ") for part in parts), text


def this_machine() -> Here:
    """Imports TVM."""
    from relaxpack.dist.host import cuda_driver
    from relaxpack.target import parse_target

    found = []
    for name in ["cpu"] + (["cuda"] if cuda_driver().gpus else []):
        try:
            found.append((target_fingerprint(parse_target(name)), compiler_fingerprint(name)))
        except EnvironmentProblem:
            continue                 # a GPU for which nothing can be compiled here
    return Here(tuple(found))


def open_store(location: str | None, create: bool = False) -> RecordStore:
    """The database to change. Raises UsageError for a location that can only be read."""
    from relaxpack.dist.tuning.layers import is_store
    from relaxpack.dist.tuning.store import open_store

    location = location or tuning_database()
    if not is_store(location):
        raise UsageError(f"--db {location}: bundles can only be read; name an SQLite file (.sqlite) or postgresql://...")
    return open_store(location, create=create)


def open_source(location: str | None) -> RecordSource:
    """"seed" means the records that come with relaxpack, as for `relaxpack build`."""
    from relaxpack.dist.tuning.layers import open_source

    if location == "seed":
        from relaxpack.tuning.lookup import SEED

        location = str(SEED)
    return open_source(location or tuning_database())


def chosen(records: Iterable[TuningRecord], *, name: str | None, target: str | None, status: str | None, bucket: int | None,
           here: Here | None) -> list[TuningRecord]:
    """Records that fit the filter options, by workload, bucket and rank."""
    found = [record for record in records
             if (name is None or fnmatch.fnmatch(record.workload.name, name))
             and (target is None or of_target(record, target))
             and (status is None or record.status == status)
             and (bucket is None or record.bucket == bucket)
             and (here is None or here.uses(record))]
    return sorted(found, key=lambda record: (record.workload.name, record.key.workload, record.bucket or 0, record.rank))


def of_target(record: TuningRecord, wanted: str) -> bool:
    kind, arch = str(record.target["kind"]), str(record.target["arch"])
    return wanted in (kind, f"{kind}:{arch}") or (len(wanted) >= 6 and record.key.target.startswith(wanted))


def choice_text(record: TuningRecord) -> str:
    """What a record chose, in a few words."""
    choice = record.choice
    if choice["kind"] == "trace":
        return f"trace of {len(choice['trace'][0])} steps"
    parameters = " ".join(f"{name}={value}" for name, value in choice["parameters"].items())
    if choice["kind"] == "library":
        return f"{choice['library']} {parameters}".strip()
    return parameters or "as untuned"


def status_text(record: TuningRecord, other_compiler: str = "", beaten: bool = False) -> Text:
    """The status as this machine sees it. `other_compiler`: how its compiler differs; `beaten`: another record of the key is
    faster."""
    if record.status == "good" and other_compiler:
        return Text("stale here", STYLES["note"])
    if record.status == "good" and beaten:
        return Text("beaten", "dim")
    return Text(record.status, STYLES[{"good": "ok", "stale": "note", "failed": "problem"}[record.status]])


def many(count: int, what: str = "record") -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def summary(record: TuningRecord) -> dict[str, Any]:
    """A record in one JSON object, without what is long."""
    return {"id": record.id, "workload": {"kind": record.workload.kind, "name": record.workload.name,
                                          "hash": record.workload.hash}, "bucket": record.bucket,
            "target": dict(record.target), "target_hash": record.key.target, "compiler": dict(record.compiler),
            "compiler_hash": record.key.compiler, "choice": choice_text(record), "median_us": record.median_us,
            "spread": record.spread, "baseline_us": record.baseline_us, "status": record.status, "reason": record.reason}


def damage_json(damaged: Sequence[Damaged]) -> list[dict[str, str]]:
    return [{"where": item.where, "problem": item.problem} for item in damaged]


def print_damage(damaged: Sequence[Damaged], what: str = "Damaged, left out") -> None:
    if damaged:
        console().print(table(what, ("where", "problem"), [(item.where, item.problem) for item in damaged]))


def merge_json(report: MergeReport) -> dict[str, Any]:
    return {"new": [record.id for record in report.new], "marked": [record.id for record in report.marked],
            "known": report.known,
            "conflicts": [{"workload": conflict.kept.workload.name, "bucket": conflict.kept.bucket, "kept": conflict.kept.id,
                           "kept_us": conflict.kept.median_us, "beaten": conflict.beaten.id,
                           "beaten_us": conflict.beaten.median_us} for conflict in report.conflicts]}


def print_merge(report: MergeReport, into: str) -> None:
    click.echo(f"{into}: {len(report.new)} new, {len(report.marked)} with a higher status, {report.known} already there")
    if report.conflicts:
        title = "The same key on both sides: the better time is used"
        console().print(table(title, ("workload", "rows", "kept", "beaten"), [
            (conflict.kept.workload.name, str(conflict.kept.bucket or ""),
             f"{conflict.kept.median_us:.4g} us ({conflict.kept.id[:SHORT]})",
             f"{conflict.beaten.median_us:.4g} us ({conflict.beaten.id[:SHORT]})") for conflict in report.conflicts]))
