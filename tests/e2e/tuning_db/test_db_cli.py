"""`relaxpack db` command by command, in one process: what it prints, its JSON, its exit codes and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from relaxpack.cli import run
from relaxpack.cli.db.common import Here, this_machine
from relaxpack.dist.host import cuda_driver
from relaxpack.dist.tuning.records_file import decode
from relaxpack.dist.tuning.store import open_store
from relaxpack.tuning_record import Check, TuningRecord, Verdict
from tests.helpers.tuning_records import BROKEN_TRACE, COMPILER, SM_80, SM_90, record, traced


class Cli:
    """Commands on one database."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._capsys = str(path), capsys
        self.code = 0

    def __call__(self, *arguments: str) -> str:
        """Standard output; where the command failed, the one line of standard error."""
        self.code = run(["db", *arguments])
        said = self._capsys.readouterr()
        if said.err:
            assert said.err.count("\n") == 1 and said.err.startswith("relaxpack: "), said.err
        return said.err or said.out

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture(scope="module")
def own() -> Mapping[str, Any]:
    target, compiler = this_machine().targets[0]
    return {"target": target, "compiler": compiler}


@pytest.fixture
def records(own: Mapping[str, Any]) -> dict[str, TuningRecord]:
    return {"trace": traced(us=7.0, **own), "best": record(us=2.0, **own), "beaten": record(us=3.0, **own),
            "failed": record("failed", **own).marked("failed", "wrong numbers"),
            "old": record(us=1.0, target=own["target"], compiler={**own["compiler"], "kernels": 0}),
            "sm_80": record(us=0.5, target=SM_80),
            "sm_90": record("cuda.gemv", us=1.0, target=SM_90, bucket=16,
                            choice={"kind": "library", "library": "cublaslt", "parameters": {"split": 2}})}


@pytest.fixture
def db(tmp_path: Path, records: dict[str, TuningRecord], capsys: pytest.CaptureFixture[str],
       monkeypatch: pytest.MonkeyPatch) -> Cli:
    path = tmp_path / "tuning.sqlite"
    with open_store(str(path)) as store:
        store.add_all(records.values())
    monkeypatch.setenv("RELAXPACK_TUNING_DB", str(path))
    return Cli(path, capsys)


def _ids(found: Any) -> list[str]:
    return [one["id"] for one in found["records"]]


def test_ls_lists_by_key_and_says_what_is_used(db: Cli, records: dict[str, TuningRecord]) -> None:
    text = db("ls")
    rows = {line.split()[0]: line for line in text.splitlines()[2:]}
    assert rows.keys() == {one.id[:12] for one in records.values()}
    for name, status in (("best", "good"), ("beaten", "beaten"), ("failed", "failed"), ("old", "stale here"),
                         ("sm_80", "good"), ("trace", "good")):
        assert rows[records[name].id[:12]].rstrip().endswith(status), name
    assert "cublaslt split=2" in rows[records["sm_90"].id[:12]] and "trace of 4 steps" in rows[records["trace"].id[:12]]


def test_ls_filters(db: Cli, records: dict[str, TuningRecord]) -> None:
    for arguments, names in ((["--target", "cuda:sm_90a"], ["sm_90"]), (["--target", "cuda"], ["sm_80", "sm_90"]),
                             (["--target", records["sm_80"].key.target[:8]], ["sm_80"]), (["--bucket", "16"], ["sm_90"]),
                             (["--status", "failed"], ["failed"]), (["--name", "doub*"], ["trace"]),
                             (["--here"], ["best", "beaten", "trace", "failed"]),
                             (["--here", "--status", "good", "--limit", "1"], ["best"])):
        assert sorted(_ids(db.json("ls", *arguments))) == sorted(records[name].id for name in names), arguments
    assert "none of 7 records fits" in db("ls", "--name", "nothing") and db.code == 0
    assert "(the first 2 of 7)" in db("ls", "--limit", "2")


def test_ls_here_says_why_there_is_nothing(db: Cli, tmp_path: Path, records: dict[str, TuningRecord]) -> None:
    with open_store(str(tmp_path / "others.sqlite")) as store:
        store.add_all([records["old"], records["sm_80"]])
    text = db("ls", "--here", "--db", str(tmp_path / "others.sqlite"))
    assert "none of 2 records is for this machine: the nearest" in text and "differs in kernels 1 here, 0 there" in text


def test_show(db: Cli, records: dict[str, TuningRecord]) -> None:
    text = db("show", records["trace"].id[:10])
    for part in ("doubling (primfunc", "7 us ±5.0% over 3 repeats", "2.00x of 14 us", "seed 0", "machine-a", "GetSBlock"):
        assert part in text
    assert TuningRecord.from_json({name: value for name, value in db.json("show", records["sm_90"].id).items()
                                   if name not in ("median_us", "spread")}) == records["sm_90"]
    assert "failed: wrong numbers" in db("show", records["failed"].id)
    assert "kernels 1 here, 0 there" in db("show", records["old"].id)
    assert "no records whose id starts with 'zz'" in db("show", "zz") and db.code == 8


def test_stats_count_gain_and_damage(db: Cli, records: dict[str, TuningRecord]) -> None:
    found = db.json("stats")
    assert found["records"] == 7 and found["damaged"] == []
    here = next(group for group in found["groups"] if group["records"] == 4)
    assert here["keys"] == 2 and here["gain"] == pytest.approx(2) and here["other_compiler"] == ""
    assert here["statuses"] == {"good": 3, "stale": 0, "failed": 1} and here["choices"] == {"parameters": 1, "trace": 1}
    import sqlite3

    with sqlite3.connect(db.path) as connection:
        connection.execute("UPDATE relaxpack_records SET content = 'torn' WHERE id = ?", (records["best"].id,))
    connection.close()
    assert [one["where"] for one in db.json("stats")["damaged"]] == [records["best"].id]
    assert "not JSON" in db("stats")
    assert records["best"].id not in _ids(db.json("ls")) and db.code == 0


def test_diff(db: Cli, tmp_path: Path, records: dict[str, TuningRecord]) -> None:
    other, better = tmp_path / "other.sqlite", record(us=1.5, target=SM_80, seed=3)
    assert db("diff", db.path, db.path) == "equal\n" and db.code == 0
    with open_store(str(other)) as store:
        store.add_all([records["best"].marked("stale", "slower here"), better])
    found = db.json("diff", db.path, str(other))
    assert db.code == 1 and not found["equal"] and found["only_right"] == [better.id] and len(found["only_left"]) == 6
    assert found["marks"] == [{"id": records["best"].id, "left": "good", "right": "stale"}]
    answers = {(one["left"] and one["left"]["id"], one["right"] and one["right"]["id"]) for one in found["answers"]}
    assert (records["sm_80"].id, better.id) in answers and (records["best"].id, None) in answers
    text = db("diff", db.path, str(other))
    assert "only in" in text and "stale slower here" in text and "nothing" in text


def test_merge_into_a_new_database_and_its_conflicts(db: Cli, tmp_path: Path, records: dict[str, TuningRecord],
                                                     own: Mapping[str, Any]) -> None:
    bob, team = tmp_path / "bob.sqlite", tmp_path / "team.sqlite"
    faster = record(us=1.5, seed=9, **own)
    with open_store(str(bob)) as store:
        store.add_all([faster, records["trace"].marked("stale", "not reproduced")])
    planned = db.json("merge", str(bob), "--dry-run")
    assert planned["sources"][0]["new"] == [faster.id] and len(_ids(db.json("ls"))) == 7
    text = db("merge", db.path, str(bob), "--db", str(team))
    assert "7 new" in text and "1 new, 1 with a higher status" in text and f"1.5 us ({faster.id[:12]})" in text
    merged = db.json("merge", str(bob), db.path, "--db", str(tmp_path / "other order.sqlite"))
    assert merged["sources"][1]["conflicts"][0]["kept"] == faster.id
    assert db("diff", str(team), str(tmp_path / "other order.sqlite")) == "equal\n"
    assert "bundles can only be read" in db("merge", str(bob), "--db", str(tmp_path)) and db.code == 2


def test_export_and_import_of_a_bundle(db: Cli, tmp_path: Path, records: dict[str, TuningRecord]) -> None:
    bundle, fresh = tmp_path / "some.jsonl", str(tmp_path / "fresh.sqlite")
    assert "3 records" in db("export", str(bundle), "--name", "cpu.gemv", "--target", "cpu")
    assert {one.id for one in decode(bundle.read_bytes(), "").records} == {
        records[name].id for name in ("best", "beaten", "old")}
    text = db("import", str(bundle), "--db", fresh)
    assert "3 new" in text and "1 key can be answered on this machine" in text
    assert "1 record of another compiler" in text and "kernels 1 here, 0 there" in text
    assert db.json("import", str(bundle), "--db", fresh)["known"] == 3
    only = db.json("import", str(bundle), "--here", "--db", str(tmp_path / "only.sqlite"))
    assert sorted(only["new"]) == sorted(records[name].id for name in ("best", "beaten"))
    assert "--force to replace it" in db("export", str(bundle)) and db.code == 2
    assert "3 records" in db("export", str(bundle), "--name", "cpu.gemv", "--target", "cpu", "--force")
    assert "a bundle's name ends in .jsonl" in db("export", str(tmp_path / "a.json")) and db.code == 2
    assert "is a folder" in db("export", str(tmp_path)) and db.code == 2
    assert "cannot write" in db("export", str(tmp_path / "no" / "b.jsonl")) and db.code == 2
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "database_tuning_record.json").write_text("precious")
    assert "--force to replace it" in db("export", str(tmp_path / "tvm"), "--tvm") and db.code == 2
    assert (tmp_path / "tvm" / "database_tuning_record.json").read_text() == "precious"
    assert db.json("ls", "--db", str(bundle))["count"] == 3                 # a bundle can be read like a database


def test_export_and_import_of_tvms_files(db: Cli, tmp_path: Path, records: dict[str, TuningRecord]) -> None:
    folder, fresh = str(tmp_path / "tvm"), str(tmp_path / "fresh.sqlite")
    exported = db.json("export", folder, "--tvm", "--here")
    assert exported["records"] == 1
    assert {one["where"] for one in exported["left_out"]} == {records[name].id for name in ("best", "beaten", "failed")}
    imported = db.json("import", folder, "--db", fresh)
    assert len(imported["new"]) == 1 and imported["to_verify"] == 1 and imported["usable_here"] == 0
    assert "to be checked and measured by `relaxpack db verify`" in db("import", folder, "--db", fresh)
    assert "known GPU architectures are" in db("import", folder, "--target", "cuda:sm_1", "--db", fresh) and db.code == 2
    if not cuda_driver().gpus:
        assert "this machine has no GPU" in db("import", folder, "--target", "cuda:sm_90a", "--db", fresh) and db.code == 6


def test_prune(db: Cli, records: dict[str, TuningRecord]) -> None:
    assert "say what to remove" in db("prune") and db.code == 2
    assert "would be removed" in db("prune", "--beaten", "--dry-run") and len(_ids(db.json("ls"))) == 7
    for option, names in (("--beaten", ["beaten"]), ("--marked", ["failed"]), ("--other-compilers", ["old"]),
                          ("--other-targets", ["sm_80", "sm_90"])):
        found = db.json("prune", option)
        assert sorted(one["id"] for one in found["removed"]) == sorted(records[name].id for name in names)
    assert sorted(_ids(db.json("ls"))) == sorted(records[name].id for name in ("best", "trace"))
    assert "0 removed, 2 kept" in db("prune", "--beaten")


def test_verify_marks_renews_and_leaves_alone(db: Cli, records: dict[str, TuningRecord], own: Mapping[str, Any],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does with the verdicts; the verdicts themselves are tested with the tuner."""
    asked: list[tuple[str, bool]] = []

    def verdict(one: TuningRecord, retime: bool = True) -> Verdict:
        asked.append((one.id, retime))
        if one.id == records["best"].id:
            return Verdict("failed", "error 3, at most 1e-05")
        if one.id == records["old"].id:
            return Verdict("good", "", one.remeasured(times_us=(2.5,), conditions=one.conditions, check=Check(1, 0.0, 0.0),
                                                      origin=one.origin, compiler=own["compiler"]))
        return Verdict("good")

    monkeypatch.setattr("relaxpack.tuning.verify.verify", verdict)
    found = db.json("verify", "--no-time")
    assert db.code == 8 and found["marked"] == 1 and found["left_alone"] == 3
    assert sorted(asked) == sorted((records[name].id, False) for name in ("best", "beaten", "old", "trace"))
    with open_store(db.path) as store:
        assert store.get(records["best"].id).reason == "error 3, at most 1e-05"
        answer = store.lookup(*records["best"].key)
        assert answer is not None and answer.origin.parent == records["old"].id and answer.median_us == 2.5
        assert store.get(records["old"].id).status == "good"          # it is so for those who have that compiler
    asked.clear()
    text = db("verify")
    assert db.code == 0 and "3 verified, 0 marked, 5 left alone" in text
    assert {record_id for record_id, retime in asked if retime} == {
        records["beaten"].id, records["trace"].id, answer.id}         # neither the failed one nor the one measured anew


def test_verify_leaves_the_records_of_a_gpu_alone_even_on_its_machine(db: Cli, monkeypatch: pytest.MonkeyPatch,
                                                                     tmp_path: Path) -> None:
    one = record(target=SM_90, compiler={**COMPILER, "cuda": "13.0"})
    where = str(tmp_path / "gpu.sqlite")
    with open_store(where) as store:
        store.add(one)
    monkeypatch.setattr("relaxpack.cli.db.care.this_machine", lambda: Here(((one.target, one.compiler),)))
    assert "0 verified, 0 marked, 1 left alone (of GPUs" in db("verify", "--db", where) and db.code == 0
    with open_store(where) as store:
        assert store.get(one.id).status == "good"


def test_pull_marks_a_trace_that_does_not_load(db: Cli, tmp_path: Path, records: dict[str, TuningRecord],
                                               own: Mapping[str, Any]) -> None:
    broken, other = traced(us=1.0, trace=BROKEN_TRACE, **own), str(tmp_path / "other.sqlite")
    with open_store(other) as store:
        store.add(broken)
    pulled = db.json("pull", other)
    assert [one["where"] for one in pulled["marked_stale"]] == [broken.id]
    with open_store(db.path) as store:
        assert store.lookup(*broken.key) == records["trace"] and store.get(broken.id).status == "stale"


@pytest.mark.parametrize(("arguments", "message", "code"), [
    (["ls", "--db", "nowhere/tuning.sqlite"], "no tuning database at nowhere/tuning.sqlite", 8),
    (["ls", "--db", "nowhere"], "there is nothing at nowhere", 8),
    (["push", "place", "--db", "nowhere.sqlite"], "no tuning database at nowhere.sqlite", 8),
    (["pull", "nowhere.sqlite"], "no tuning database at nowhere.sqlite", 8),
    (["pull", "nowhere"], "no bundles of tuning records at", 8),
    (["import", __file__], "neither a tuning database (SQLite) nor a bundle of records (NAME.jsonl)", 8),
    (["import", "nowhere"], "does not exist", 2), (["merge"], "Missing argument", 2),
    (["list"], "No such command 'list'", 2),
    (["prune", "--marked", "--db", ""], "it is empty; leave the option out for the default", 2),
    (["ls", "--db", "postgresql://user:secret@127.0.0.1:1/x"], "postgresql://user:***@127.0.0.1:1/x: the database", 8)])
def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                             arguments: list[str], message: str, code: int) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RELAXPACK_TUNING_DB", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    cli = Cli(tmp_path / "unused", capsys)
    said = cli(*arguments)
    assert cli.code == code and message in said and "secret" not in said


def test_help_of_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(Path("unused"), capsys)
    commands = ("ls", "show", "stats", "diff", "merge", "push", "pull", "export", "import", "verify", "prune")
    assert all(f"\n  {command} " in cli("--help") for command in commands)
    for command in commands:
        text = cli(command, "--help")
        assert cli.code == 0 and f"relaxpack db {command}" in text.partition("Example")[2] and "--json" in text


def test_a_lean_installation_has_help_and_says_what_to_install() -> None:
    program = ("import sys; sys.modules['sqlalchemy'] = None\n"
               "from relaxpack.cli import run\n"
               "assert run(['db', 'push', '--help']) == 0 and 'tvm' not in sys.modules\n"
               "sys.exit(run(['db', 'ls']))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == 6
    assert done.stderr == "relaxpack: the tuning database needs SQLAlchemy: pip install 'relaxpack[tuning]'\n"
