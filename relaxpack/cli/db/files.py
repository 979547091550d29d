"""`relaxpack db export | import`: records as a file of ours, or as the two files of TVM's own database."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from relaxpack.cli.db.common import (
    chosen,
    damage_json,
    db_option,
    filter_options,
    many,
    open_source,
    print_damage,
    this_machine,
)
from relaxpack.cli.db.sharing import read_records, receive
from relaxpack.cli.options import json_option
from relaxpack.cli.show import print_json
from relaxpack.errors import UsageError
from relaxpack.tuning_record import Damaged


@click.command(short_help="Write records to a file.")
@click.argument("path", type=click.Path(path_type=Path))
@db_option
@filter_options
@click.option("--tvm", is_flag=True, help="Write TVM's two JSON files into the folder PATH (traces of one target only).")
@click.option("--force", is_flag=True, help="Replace what is there.")
@json_option
def export(path: Path, location: str | None, tvm: bool, force: bool, as_json: bool, here: bool, **filters: Any) -> None:
    """Write records to PATH: one bundle (.jsonl), which `relaxpack db import` reads anywhere.

    \b
    Examples:
      relaxpack db export h200.jsonl --target cuda:sm_90a
      relaxpack db export tvm_database --tvm --here
    """
    from relaxpack.dist.tuning.records_file import SUFFIX, encode
    from relaxpack.tvm_records import RECORDS, WORKLOADS, export_tvm

    source = open_source(location)
    records = chosen(source.all(), here=this_machine() if here else None, **filters)
    left: list[Damaged] = []
    if not tvm and path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file, or --tvm for TVM's two files")
    if not tvm and path.suffix != SUFFIX:
        raise UsageError(f"{path}: a bundle's name ends in {SUFFIX}; for TVM's two files give a folder and --tvm")
    for there in (path / WORKLOADS, path / RECORDS) if tvm else (path,):
        if there.exists() and not force:
            raise UsageError(f"{there} exists already; choose another name, or --force to replace it")
    try:
        if tvm:
            count, left = export_tvm(records, path)
        else:
            _write(path, encode(records))
            count = len(records)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place") from None
    if as_json:
        return print_json({"path": str(path), "records": count, "left_out": damage_json(left)})
    click.echo(f"{path}: {many(count)}")
    print_damage(left, "Left out")


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@click.command("import", short_help="Read records from a file.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@db_option
@click.option("--target", default="cpu", show_default=True, metavar="TARGET",
              help="Of TVM's files: the target of this machine that they were tuned for.")
@click.option("--bucket", type=click.IntRange(1), metavar="ROWS", help="Of TVM's files: the rows they were tuned for.")
@click.option("--here", "only_here", is_flag=True, help="Leave out what other machines and compilers made.")
@json_option
def import_(path: Path, location: str | None, target: str, bucket: int | None, only_here: bool, as_json: bool) -> None:
    """Read records from PATH: a bundle, a folder of bundles, another database, or a folder with TVM's two JSON files
    (database_workload.json, database_tuning_record.json). What TVM's files hold is used once `relaxpack db verify` has
    checked and measured it. Damaged lines are named and left out.

    \b
    Examples:
      relaxpack db import h200.jsonl
      relaxpack db import tvm_work_dir --target cuda
    """
    from relaxpack.fingerprint import compiler_fingerprint, target_fingerprint
    from relaxpack.target import parse_target
    from relaxpack.tvm_records import WORKLOADS, import_tvm

    if not (path / WORKLOADS).exists():
        records, damaged, name = read_records(str(path))
        return receive(records, damaged, name, location, only_here, as_json)
    spec = parse_target(target)
    imported = import_tvm(path, target_fingerprint(spec), compiler_fingerprint(spec.kind), bucket)
    receive(imported.records, imported.damaged, str(path), location, only_here, as_json)
