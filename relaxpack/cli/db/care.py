"""`relaxpack db verify | prune`: keep a database true and small."""

from __future__ import annotations

from typing import Any

import click

from relaxpack.cli.db.common import SHORT, chosen, db_option, filter_options, open_store, status_text, summary, this_machine
from relaxpack.cli.options import json_option
from relaxpack.cli.show import console, print_json, table
from relaxpack.errors import TuningError, UsageError
from relaxpack.fingerprint import described, other_compiler
from relaxpack.tuning_record import TuningRecord, Verdict, digest


@click.command(short_help="Check numbers, measure again.")
@db_option
@filter_options
@click.option("--no-time", is_flag=True, help="Check the numbers only; nothing is measured again.")
@json_option
def verify(location: str | None, no_time: bool, as_json: bool, here: bool, **filters: Any) -> int:
    """Build this machine's records, check their numbers, and measure them again. What fails or is not reproduced is marked
    and never used; what was imported, or made by another compiler version, is added anew where it holds. Records of other
    targets are left alone, and so are those of GPUs, which benchmarks/gpu/tune.py measures. Exits with 8 where one had to be
    marked.

    \b
    Examples:
      relaxpack db verify
      relaxpack db verify --name '*gemv*' --no-time
    """
    from relaxpack.tuning.verify import verify as judge

    machine = this_machine()
    targets = {digest(target) for target, _ in machine.targets if target["kind"] == "cpu"}
    done: list[tuple[TuningRecord, Verdict]] = []
    with open_store(location) as store:
        everything = list(store.all())
        found = chosen(everything, here=machine if here else None, **filters)
        # What was imported or comes from another compiler is measured once: then there is a record of its own.
        renewed = {record.origin.parent for record in everything if record.status == "good" and machine.uses(record)}
        mine = [record for record in found if record.key.target in targets and record.status != "failed"
                and (record.id not in renewed or (record.status == "good" and machine.uses(record)))]
        for record in mine:
            verdict = judge(record, retime=not no_time)
            if verdict.renewed is not None:
                store.add(verdict.renewed)
            if verdict.status != "good":
                store.mark(record.id, verdict.status, verdict.reason)
            done.append((record, verdict))
            if not as_json:
                click.echo(f"{verdict.status:6}  {record.id[:SHORT]}  {record.workload.name}"
                           + (f": {verdict.reason}" if verdict.reason else "")
                           + (f" → {verdict.renewed.id[:SHORT]}" if verdict.renewed else ""))
    marked = [record for record, verdict in done if verdict.status != "good" and record.status == "good"]
    if as_json:
        print_json({"location": store.location, "left_alone": len(found) - len(mine), "marked": len(marked), "records": [
            {"id": record.id, "status": verdict.status, "reason": verdict.reason,
             "renewed": verdict.renewed and verdict.renewed.id} for record, verdict in done]})
    else:
        click.echo(f"{store.location}: {len(done)} verified, {len(marked)} marked, "
                   f"{len(found) - len(mine)} left alone (of GPUs or other targets, failed before, or measured anew "
                   "before)")
    return TuningError.exit_code if marked else 0


@click.command(short_help="Remove records.")
@db_option
@filter_options
@click.option("--beaten", is_flag=True, help="Good records whose key is answered by a better one.")
@click.option("--marked", is_flag=True, help="Stale and failed ones. A pull from where they are good brings them back.")
@click.option("--other-compilers", is_flag=True, help="Records of compiler versions other than this one.")
@click.option("--other-targets", is_flag=True, help="Records of targets that this machine does not have.")
@click.option("--dry-run", is_flag=True, help="List what would go.")
@json_option
def prune(location: str | None, beaten: bool, marked: bool, other_compilers: bool, other_targets: bool, dry_run: bool,
          as_json: bool, here: bool, **filters: Any) -> None:
    """Remove records. Say which kinds; the filters narrow them down.

    \b
    Examples:
      relaxpack db prune --beaten --dry-run
      relaxpack db prune --other-compilers --target cpu
    """
    from relaxpack.dist.tuning.merge import winners

    if not (beaten or marked or other_compilers or other_targets):
        raise UsageError("say what to remove: --beaten, --marked, --other-compilers or --other-targets")
    machine = this_machine() if here or other_targets else None
    targets = {digest(target) for target, _ in machine.targets} if machine else set()
    with open_store(location) as store:
        everything = list(store.all())
        used = {record.id for record in winners(everything).values()}
        going = [record for record in chosen(everything, here=machine if here else None, **filters)
                 if (beaten and record.status == "good" and record.id not in used)
                 or (marked and record.status != "good")
                 or (other_compilers and other_compiler(record) != "")
                 or (other_targets and record.key.target not in targets)]
        if not dry_run:
            store.remove(record.id for record in going)
    if as_json:
        return print_json({"location": store.location, "dry_run": dry_run, "kept": len(everything) - len(going),
                           "removed": [summary(record) for record in going]})
    if going:
        console().print(table("Would go" if dry_run else "Gone", ("id", "workload", "rows", "target", "median", "status"), [
            (record.id[:SHORT], record.workload.name, str(record.bucket or ""), described(record.target),
             f"{record.median_us:.4g} us", status_text(record, other_compiler(record))) for record in going]))
    click.echo(f"{store.location}: {len(going)} {'would be ' * dry_run}removed, {len(everything) - len(going)} kept")
