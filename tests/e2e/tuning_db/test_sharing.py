"""Sharing as users do it: machine A pushes to PostgreSQL, a web server and S3, machine B (another home, another process)
pulls and is answered the same; with one fact of its target changed it is answered nothing and told why.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaxpack.cli.db.common import this_machine
from relaxpack.dist.tuning.exchange import pull, push
from relaxpack.dist.tuning.merge import by_key
from relaxpack.dist.tuning.records_file import encode, file_name
from relaxpack.dist.tuning.store import open_store
from relaxpack.errors import DatabaseError
from relaxpack.tuning_record import TuningRecord
from tests.helpers.exchange_servers import s3_server, web_server
from tests.helpers.tuning_records import BROKEN_TRACE, SM_80, SM_90, record, traced


class Machine:
    """A user with a home of their own, running `relaxpack` there."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home, self.environment = home, environment
        home.mkdir()

    @property
    def database(self) -> str:
        return str(self.home / ".local" / "share" / "relaxpack" / "tuning.sqlite")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        unset = ("XDG_DATA_HOME", "RELAXPACK_TUNING_DB", "RELAXPACK_NUM_THREADS")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        return subprocess.run([sys.executable, "-m", "relaxpack", "db", *arguments], cwd=self.home, text=True,
                              capture_output=True, check=False, stdin=subprocess.DEVNULL, env={
                                  **inherited, "HOME": str(self.home), "PYTHONPATH": os.getcwd(), **self.environment})

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tuned() -> list[TuningRecord]:
    """What machine A has: a trace, parameters, a beaten record, one of another compiler, two of other targets."""
    target, compiler = this_machine().targets[0]
    own: Mapping[str, Any] = {"target": target, "compiler": compiler}
    return [traced(us=7.0, **own), record(us=2.0, **own), record(us=3.0, seed=1, **own), record("failed", **own).marked(
        "failed", "wrong numbers"), record(us=1.0, target=target, compiler={**compiler, "kernels": 0}),
        record(us=0.5, target=SM_80), record(us=1.0, target=SM_90)]


@pytest.fixture
def machine_a(tmp_path: Path, tuned: list[TuningRecord]) -> Machine:
    machine = Machine(tmp_path / "a")
    with open_store(machine.database) as store:
        store.add_all(tuned)
    return machine


def _same_answers(machine: Machine, tuned: list[TuningRecord]) -> None:
    with open_store(machine.database, create=False) as store:
        assert list(store.all()) == sorted(tuned, key=lambda one: one.id)
        for key in by_key(tuned):
            good = [one for one in tuned if one.key == key and one.status == "good"]
            assert store.lookup(*key) == min(good, key=lambda one: one.rank, default=None)


@pytest.mark.slow
def test_by_postgresql(machine_a: Machine, tuned: list[TuningRecord], tmp_path: Path, postgresql_database: str) -> None:
    assert len(machine_a.json("push", postgresql_database)["new"]) == len(tuned)
    again = machine_a.json("push", postgresql_database)
    assert again["new"] == [] and again["known"] == len(tuned)
    machine_b = Machine(tmp_path / "b")
    pulled = machine_b.json("pull", postgresql_database)
    assert pulled["usable_here"] == 2 and pulled["why_none"] == "" and pulled["damaged"] == []
    _same_answers(machine_b, tuned)
    assert "p%40ss" not in pulled["source"] and "***" in pulled["source"]

    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core, there is no other number of threads")
    changed = Machine(tmp_path / "changed", RELAXPACK_NUM_THREADS="1")
    pulled = changed.json("pull", postgresql_database)
    assert pulled["usable_here"] == 0 and len(pulled["new"]) == len(tuned)
    assert "differs in threads 1 here, " in pulled["why_none"]
    listed = changed.run("ls", "--here")
    assert listed.returncode == 0 and f"none of {len(tuned)} records is for this machine: the nearest" in listed.stdout
    assert "threads 1 here" in listed.stdout


@pytest.mark.slow
def test_by_a_web_server(machine_a: Machine, tuned: list[TuningRecord], tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    with web_server(folder) as address:
        pushed = machine_a.json("push", f"{address}/team")
        assert len(pushed["new"]) == len(tuned) and pushed["bundle"].startswith(f"{address}/team/")
        machine_b = Machine(tmp_path / "b")
        assert machine_b.json("pull", f"{address}/team")["usable_here"] == 2
        _same_answers(machine_b, tuned)
        # B finds one record wrong and says so; A hears of it.
        wrong = tuned[1]
        with open_store(machine_b.database) as store:
            store.mark(wrong.id, "failed", "wrong numbers on B")
        assert machine_b.json("push", f"{address}/team")["new"] == [wrong.id]
    with web_server(folder, "no-uploads", "no-listing") as address:      # as many web servers are
        heard = machine_a.json("pull", f"{address}/team")
        assert heard["marked"] == [wrong.id] and heard["new"] == []
        with open_store(machine_a.database) as store:
            assert store.lookup(*wrong.key) == tuned[2]
        refused = machine_a.run("push", f"{address}/other".replace("://", "://user:secret@"))
        assert refused.returncode == 8 and "must take PUT" in refused.stderr and refused.stderr.count("\n") == 1
        assert "secret" not in refused.stderr and "***@" in refused.stderr
        nothing = machine_a.run("pull", f"{address}/other")
        assert nothing.returncode == 8 and "no bundles of tuning records at" in nothing.stderr


@pytest.mark.slow
def test_by_s3(machine_a: Machine, tuned: list[TuningRecord], tmp_path: Path) -> None:
    with s3_server("tuning") as environment:
        machine_a.environment |= environment
        assert len(machine_a.json("push", "s3://tuning/team")["new"]) == len(tuned)
        machine_b = Machine(tmp_path / "b", **environment)
        assert machine_b.json("pull", "s3://tuning/team")["usable_here"] == 2
        _same_answers(machine_b, tuned)
        refused = machine_b.run("push", "s3://no-such-bucket/team")
        assert refused.returncode == 8 and "s3://no-such-bucket/team" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_place_with_every_kind_of_damage(tuned: list[TuningRecord], tmp_path: Path) -> None:
    """Cut in its last line, a flipped byte, another GPU, another compiler, a trace that no longer loads, no bundle at all:
    the good records load, the bad ones are named."""
    target, compiler = this_machine().targets[0]
    folder = tmp_path / "place"
    folder.mkdir()
    broken = traced(trace=BROKEN_TRACE, us=1.0, target=target, compiler=compiler)
    cut = [record(f"cut {number}", target=target, compiler=compiler) for number in range(3)]
    flipped = [record(f"flipped {number}", target=target, compiler=compiler) for number in range(3)]
    whole, cut_bytes, flipped_bytes = encode([*tuned, broken]), encode(cut), encode(flipped)
    last = cut_bytes.rstrip(b"\n").rindex(b"\n") - 40
    middle = len(flipped_bytes) // 2
    flipped_bytes_now = flipped_bytes[:middle] + bytes([flipped_bytes[middle] ^ 4]) + flipped_bytes[middle + 1:]
    names = [file_name(data) for data in (whole, cut_bytes, flipped_bytes)]
    for name, data in zip(names, (whole, cut_bytes[:last], flipped_bytes_now), strict=True):
        (folder / name).write_bytes(data)
    other = "0" * 64 + ".jsonl"
    (folder / other).write_bytes(b"<html>not found</html>")
    (folder / "notes.txt").write_text("anything else is not looked at")

    machine = Machine(tmp_path / "b")
    pulled = machine.json("pull", str(folder))
    assert {found["where"].partition(":")[0] for found in pulled["damaged"]} == {
        names[1][:12] + ".jsonl", names[2][:12] + ".jsonl", other[:12] + ".jsonl"}
    assert {found["where"] for found in pulled["damaged"]} >= {f"{names[1][:12]}.jsonl:4", f"{names[2][:12]}.jsonl:3"}
    assert [found["where"] for found in pulled["marked_stale"]] == [broken.id]
    assert "its trace no longer loads" in pulled["marked_stale"][0]["problem"]
    assert sum(pulled["other_targets_or_compilers"].values()) == 3
    with open_store(machine.database) as store:
        assert store.lookup(*broken.key) == tuned[0]         # it was the faster one, but does not load
        loaded = {one.id for one in store.all()}
    expected = {one.id for one in [*tuned, broken]}
    assert loaded > expected and len(loaded) == len(expected) + 2 + 2
    assert {one.id for one in sorted(cut, key=lambda one: one.id)[:2]} < loaded
    text = machine.run("pull", str(folder)).stdout
    assert "Do not load here, marked stale" in text and "no bundle of tuning records" in text


def test_a_folder_keeps_what_is_there_and_takes_what_is_new(tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    with pytest.raises(DatabaseError, match="no bundles of tuning records at"):
        pull(str(place))
    first = push([record()], str(place))
    assert first.bundle is not None and Path(first.bundle).read_bytes() == encode([record()])
    assert file_name(Path(first.bundle).read_bytes()) == Path(first.bundle).name
    assert push([record()], str(place)).bundle is None
    second = push([record().marked("stale", "slower"), record(seed=1)], f"file://{place}")
    assert len(second.new) == 2 and len(pull(str(place)).records) == 2
    assert pull(str(place)).records == sorted([record().marked("stale", "slower"), record(seed=1)], key=lambda one: one.id)
    assert pull(first.bundle).records == [record()]          # one bundle by its own name
    with pytest.raises(DatabaseError, match="is one bundle, which is never changed"):
        push([record(seed=7)], first.bundle)
    # A damaged bundle costs its records until somebody who has them pushes again; its own name heals it.
    Path(first.bundle).write_bytes(b"")
    healed = push([record()], str(place))
    assert healed.new == [] and healed.damaged           # the second bundle has it, with a mark
    shutil.rmtree(place)
    assert push([record()], str(place)).bundle == first.bundle


def test_a_half_written_bundle_is_no_bundle(tmp_path: Path) -> None:
    push([record()], str(tmp_path))
    (tmp_path / f".{'a' * 64}.jsonl.123").write_bytes(b"half")
    assert len(pull(str(tmp_path)).records) == 1 and not pull(str(tmp_path)).damaged
    (tmp_path / "index.json").write_text('["../../etc/passwd", 3, "' + "b" * 64 + '.jsonl"]')
    pulled = pull(str(tmp_path))
    assert len(pulled.records) == 1 and [found.where for found in pulled.damaged] == ["b" * 12 + ".jsonl"]


def test_an_unknown_protocol_is_one_clear_error() -> None:
    with pytest.raises(DatabaseError, match="cannot open carrier-pigeon://loft: Protocol not known"):
        pull("carrier-pigeon://loft")


def test_a_target_is_equal_in_every_fact_or_another(tuned: list[TuningRecord]) -> None:
    machine = this_machine()
    assert machine.uses(tuned[0])
    for fact in tuned[0].target:
        changed = {**tuned[0].target, fact: "other"} if fact != "kind" else SM_90
        assert not machine.uses(replace(tuned[0], target=changed))
