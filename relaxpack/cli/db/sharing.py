"""`relaxpack db merge | push | pull`: records from one database into another, or by bundles at any URL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from relaxpack.cli.db.common import (
    Here,
    chosen,
    damage_json,
    db_option,
    filter_options,
    many,
    merge_json,
    open_source,
    open_store,
    print_damage,
    print_merge,
    this_machine,
)
from relaxpack.cli.options import json_option
from relaxpack.cli.show import print_json
from relaxpack.errors import DamagedRecordError
from relaxpack.fingerprint import described, difference
from relaxpack.kernel_generations import for_workload
from relaxpack.tuning_record import Damaged, TuningRecord, digest
from relaxpack.tvm_records import IMPORTED, scheduled


@click.command(short_help="Merge databases or bundles into one.")
@click.argument("sources", metavar="DATABASE...", nargs=-1, required=True)
@db_option
@click.option("--dry-run", is_flag=True, help="Say what would change.")
@json_option
def merge(sources: tuple[str, ...], location: str | None, dry_run: bool, as_json: bool) -> None:
    """Merge databases or bundles into one. No record crosses a target or compiler version; of one key, the better verified
    time is used; a record marked on either side is used on neither. The order of merging does not matter.

    \b
    Example:
      relaxpack db merge anna.sqlite bob.sqlite --db team.sqlite
    """
    from relaxpack.dist.tuning.merge import merge_into

    with open_store(location, create=not dry_run) as store:
        reports = []
        for name in sources:
            source = open_source(name)
            reports.append((source.location, merge_into(store, source.all(), dry_run)))
            source.close()
    if as_json:
        return print_json({"location": store.location, "dry_run": dry_run,
                           "sources": [{"location": name, **merge_json(report)} for name, report in reports]})
    for name, report in reports:
        print_merge(report, f"{name} into {store.location}")


@click.command(short_help="Give records to a database or place.")
@click.argument("url")
@db_option
@filter_options
@json_option
def push(url: str, location: str | None, as_json: bool, here: bool, **filters: Any) -> None:
    """Give records to URL: another database (postgresql://..., a .sqlite file), or a place for bundles (a folder,
    https://..., s3://bucket/..., anything fsspec knows). What is there already is not sent again.

    \b
    Examples:
      relaxpack db push postgresql://tuner:secret@db.example/tuning
      relaxpack db push s3://bucket/tuning --target cuda:sm_90a
    """
    from relaxpack.dist.tuning.exchange import push as push_bundle
    from relaxpack.dist.tuning.layers import is_store
    from relaxpack.dist.tuning.merge import merge_into

    with open_store(location) as store:
        records = chosen(store.all(), here=this_machine() if here else None, **filters)
    if is_store(url):
        with open_store(url, create=True) as other:
            report = merge_into(other, records)
        if as_json:
            return print_json({"location": other.location, "bundle": None, "damaged": [], **merge_json(report)})
        return print_merge(report, other.location)
    pushed = push_bundle(records, url)
    if as_json:
        return print_json({"location": pushed.url, "bundle": pushed.bundle, "new": [record.id for record in pushed.new],
                           "known": pushed.known, "damaged": damage_json(pushed.damaged)})
    click.echo(f"{pushed.url}: {len(pushed.new)} new, {pushed.known} already there"
               + (f"; they are in {pushed.bundle}" if pushed.bundle else ""))
    print_damage(pushed.damaged, "Damaged bundles there")


@click.command(short_help="Take records from a database or place.")
@click.argument("url")
@db_option
@click.option("--here", "only_here", is_flag=True, help="Leave out what other machines and compilers made.")
@json_option
def pull(url: str, location: str | None, only_here: bool, as_json: bool) -> None:
    """Take records from URL: another database, a place of bundles, or one bundle. Damaged ones are named and left out; those
    of other machines are kept, and never used here.

    \b
    Examples:
      relaxpack db pull postgresql://db.example/tuning
      relaxpack db pull https://example.org/tuning
    """
    records, damaged, name = read_records(url)
    receive(records, damaged, name, location, only_here, as_json)


def read_records(url: str) -> tuple[list[TuningRecord], list[Damaged], str]:
    """Records of a store or of exchanged bundles, what of them is damaged, and where they came from."""
    from relaxpack.dist.tuning.exchange import pull as pull_bundles
    from relaxpack.dist.tuning.layers import is_store

    if is_store(url):
        with open_store(url) as other:
            return list(other.all()), other.damaged(), other.location
    pulled = pull_bundles(url)
    return pulled.records, pulled.damaged, pulled.url


def receive(records: Sequence[TuningRecord], damaged: Sequence[Damaged], name: str, location: str | None, only_here: bool,
            as_json: bool) -> None:
    """Check that the traces for this machine load, merge, and say what this machine can use."""
    from relaxpack.dist.tuning.merge import merge_into, winners

    machine = this_machine()
    mine, foreign = _split(records, machine)
    loaded = [_judged(record) for record in mine]
    broken = [Damaged(record.id, record.reason) for record, old in zip(loaded, mine, strict=True) if record is not old]
    with open_store(location, create=True) as store:
        report = merge_into(store, loaded if only_here else [*loaded, *foreign])
    usable = len(winners(loaded))
    waiting = sum(record.reason == IMPORTED for record in loaded)
    why = "" if usable or not foreign else machine.why_none(foreign)
    others = Counter(_maker(record, machine) for record in foreign)
    if as_json:
        return print_json({"source": name, "location": store.location, **merge_json(report), "usable_here": usable,
                           "to_verify": waiting,
                           "other_targets_or_compilers": dict(others), "why_none": why,
                           "damaged": damage_json(damaged), "marked_stale": damage_json(broken)})
    print_merge(report, f"{name} into {store.location}")
    click.echo(f"{many(usable, 'key')} can be answered on this machine" + (f": {why}" if why else ""))
    if waiting:
        click.echo(f"{many(waiting)} to be checked and measured by `relaxpack db verify` before use")
    for maker, count in sorted(others.items()):
        click.echo(f"{many(count)} of {maker}: never used here" + (", left out" if only_here else ""))
    print_damage(damaged)
    print_damage(broken, "Do not load here, marked stale")


def _split(records: Sequence[TuningRecord], machine: Here) -> tuple[list[TuningRecord], list[TuningRecord]]:
    mine = [record for record in records if machine.uses(record)]
    return mine, [record for record in records if not machine.uses(record)]


def _maker(record: TuningRecord, machine: Here) -> str:
    """What of a record is not that of this machine: its target, or its compiler alone."""
    for target, compiler in machine.targets:
        if digest(target) == record.key.target:
            own = for_workload(compiler, record.workload)
            return f"another compiler ({described(record.target)}: {difference(own, record.compiler)})"
    return f"another target ({described(record.target)})"


def _judged(record: TuningRecord) -> TuningRecord:
    """The record, marked where it cannot be applied by the compiler it claims to be of."""
    if record.status == "good" and record.choice["kind"] == "trace":
        try:
            scheduled(record)
        except DamagedRecordError as error:
            return record.marked("stale", str(error))
    return record
