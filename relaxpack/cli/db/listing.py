"""`relaxpack db ls | show | stats | diff`: what is in a database. Nothing here changes one."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import click

from relaxpack.cli.db.common import (
    SHORT,
    choice_text,
    chosen,
    damage_json,
    db_option,
    filter_options,
    many,
    open_source,
    print_damage,
    status_text,
    summary,
    this_machine,
)
from relaxpack.cli.options import json_option
from relaxpack.cli.show import console, print_json, table
from relaxpack.errors import DatabaseError
from relaxpack.fingerprint import described, other_compiler
from relaxpack.readable import printable
from relaxpack.tuning_record import STATUSES, TuningRecord


@click.command(short_help="List records.")
@db_option
@filter_options
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Show the first N.")
@json_option
def ls(location: str | None, limit: int | None, as_json: bool, here: bool, **filters: Any) -> None:
    """List records. Of several good ones of one key, the best is used and the others are shown as "beaten".

    A good record of another compiler version is shown as "stale here": `relaxpack db verify` measures it with this one.

    \b
    Examples:
      relaxpack db ls --target cuda:sm_90a --bucket 16
      relaxpack db ls --db postgresql://db/tuning --name '*gemv*'
    """
    from relaxpack.dist.tuning.merge import winners

    source = open_source(location)
    everything = list(source.all())
    machine = this_machine() if here else None
    found = chosen(everything, here=machine, **filters)
    shown = found if limit is None else found[:limit]
    if as_json:
        return print_json({"location": source.location, "count": len(found),
                           "records": [summary(record) for record in shown]})
    if not found:
        why = f": {reason}" if machine and (reason := machine.why_none(everything)) else ""
        fits = "is for this machine" if machine else "fits"
        return click.echo(f"{source.location}: none of {many(len(everything))} {fits}{why}")
    used = {record.id for record in winners(everything).values()}
    rows = [(record.id[:SHORT], record.workload.name, str(record.bucket or ""), described(record.target),
             choice_text(record)[:60], f"{record.median_us:.4g} us ±{record.spread:.0%}", gain(record),
             status_text(record, other_compiler(record), record.id not in used)) for record in shown]
    title = source.location + (f" (the first {limit} of {len(found)})" if len(shown) < len(found) else "")
    console().print(table(title, ("id", "workload", "rows", "target", "choice", "median", "untuned", "status"), rows))


def gain(record: TuningRecord) -> str:
    if record.baseline_us is None:
        return ""
    return f"{record.baseline_us / record.median_us:.2f}x of {record.baseline_us:.4g} us"


@click.command(short_help="Show one record.")
@click.argument("record_id", metavar="ID")
@db_option
@json_option
def show(record_id: str, location: str | None, as_json: bool) -> None:
    """Show one record, by its id or the beginning of it. --json prints all of it, the trace included.

    \b
    Example:
      relaxpack db show 2d64473850e3
    """
    source = open_source(location)
    found = [record for record in source.all() if record.id.startswith(record_id)]
    if len(found) != 1:
        raise DatabaseError(f"{source.location} has {len(found) or 'no'} records whose id starts with {record_id!r}; "
                            "`relaxpack db ls` lists them")
    record, = found
    if as_json:
        return print_json(record.to_json() | {"median_us": record.median_us, "spread": record.spread})
    check = "none"
    if record.check is not None:
        check = (f"error {record.check.max_error:.3g} of at most {record.check.tolerance:.3g}, inputs of seed "
                 f"{record.check.seed}")
    origin = record.origin
    rows = [
        ("workload", f"{record.workload.name} ({record.workload.kind}, hash {record.workload.hash})"),
        ("rows", str(record.bucket or "any")),
        ("target", _facts(record.target)),
        ("compiler", _facts(record.compiler)),
        ("choice", choice_text(record)),
        ("median", f"{record.median_us:.4g} us ±{record.spread:.1%} over {len(record.times_us)} repeats"),
        ("untuned", gain(record) or "not measured"),
        ("conditions", _facts(record.conditions)),
        ("check", check),
        ("origin", f"{origin.created} on {origin.host} by {origin.tool}, {origin.trials} trials"
                   + (f", measures {origin.parent[:SHORT]} again" if origin.parent else "")),
        ("status", record.status + (f": {record.reason}" if record.reason else "")),
        ("elsewhere", other_compiler(record) or "the compiler here is the same"),
    ]
    out = console()
    out.print(table(record.id, ("", ""), rows))
    if record.choice["kind"] == "trace":
        out.print()
        out.print(table("Trace", ("", "instruction", "on", "with"), [
            (str(number), *(printable(str(part)) for part in step[:3]))
            for number, step in enumerate(record.choice["trace"][0], 1) if isinstance(step, list)]))


def _facts(facts: Any) -> str:
    return ", ".join(f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
                     for name, value in facts.items())


@click.command(short_help="Count records, say what was gained.")
@db_option
@json_option
def stats(location: str | None, as_json: bool) -> None:
    """Count records, keys and targets, say how much tuning gained, and name records that are damaged.

    \b
    Example:
      relaxpack db stats --db postgresql://db/tuning --json
    """
    from relaxpack.dist.tuning.merge import winners
    from relaxpack.dist.tuning.store import RecordStore

    source = open_source(location)
    records = list(source.all())
    damaged = source.damaged() if isinstance(source, RecordStore) else []
    groups: dict[tuple[str, str], list[TuningRecord]] = {}
    for record in records:
        groups.setdefault((record.key.target, record.key.compiler), []).append(record)
    what: list[dict[str, Any]] = []
    for _, group in sorted(groups.items()):
        best = list(winners(group).values())
        gains = [record.baseline_us / record.median_us for record in best if record.baseline_us is not None]
        what.append({
            "target": described(group[0].target), "target_hash": group[0].key.target, "compiler": dict(group[0].compiler),
            "compiler_hash": group[0].key.compiler, "other_compiler": other_compiler(group[0]),
            "records": len(group), "keys": len(best),
            "choices": dict(sorted(Counter(str(record.choice["kind"]) for record in best).items())),
            "statuses": {status: sum(record.status == status for record in group) for status in STATUSES},
            "gain": math.exp(sum(map(math.log, gains)) / len(gains)) if gains else None})
    if as_json:
        return print_json({"location": source.location, "records": len(records), "groups": what,
                           "damaged": damage_json(damaged)})
    out = console()
    out.print(table(f"{source.location}: {many(len(records))}", (
        "target", "hash", "compiler", "keys", "answered by", *STATUSES, "gain"), [
        (str(group["target"]), str(group["target_hash"])[:SHORT], _facts(group["compiler"]), str(group["keys"]),
         ", ".join(f"{count} {kind}" for kind, count in group["choices"].items()),
         *(str(count) for count in group["statuses"].values()),
         "" if group["gain"] is None else f"{group['gain']:.2f}x") for group in what]))
    print_damage(damaged, "Damaged")


@click.command(short_help="Compare two databases.")
@click.argument("left", metavar="DATABASE")
@click.argument("right", metavar="OTHER")
@json_option
def diff(left: str, right: str, as_json: bool) -> int:
    """Show what two databases (or bundles) do not have in common, and which keys they answer differently. Exits with 0
    where they are equal and with 1 where they are not.

    \b
    Example:
      relaxpack db diff tuning.sqlite postgresql://db/tuning
    """
    from relaxpack.dist.tuning.merge import union, winners

    a, b = (union(open_source(location).all()) for location in (left, right))
    best_a, best_b = winners(a.values()), winners(b.values())
    only_left, only_right = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    marks = [(record, b[record.id]) for record in a.values()
             if record.id in b and (record.status, record.reason) != (b[record.id].status, b[record.id].reason)]
    answers = [(best_a.get(key), best_b.get(key)) for key in sorted(best_a.keys() | best_b.keys(), key=repr)
               if best_a.get(key) != best_b.get(key)]
    equal = not (only_left or only_right or marks)
    if as_json:
        print_json({"equal": equal, "only_left": only_left, "only_right": only_right,
                    "marks": [{"id": one.id, "left": one.status, "right": other.status} for one, other in marks],
                    "answers": [{"left": one and summary(one), "right": other and summary(other)}
                                for one, other in answers]})
    elif equal:
        click.echo("equal")
    else:
        click.echo(f"only in {left}: {len(only_left)}; only in {right}: {len(only_right)}; other status: {len(marks)}")
        out = console()
        if marks:
            out.print(table("Other status", ("id", left, right), [
                (one.id[:SHORT], *(f"{record.status} {record.reason}".strip() for record in (one, other)))
                for one, other in marks]))
        if answers:
            out.print(table("Answered differently", ("workload", "rows", "target", left, right), [
                (known.workload.name, str(known.bucket or ""), described(known.target), _answer(one), _answer(other))
                for one, other in answers if (known := one or other)]))
    return 0 if equal else 1


def _answer(record: TuningRecord | None) -> str:
    return "nothing" if record is None else f"{record.median_us:.4g} us, {choice_text(record)[:40]} ({record.id[:SHORT]})"
