"""The store on SQLite and on PostgreSQL: the same answers, concurrent writers, SIGKILL, damage, foreign databases."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from relaxpack.dist.tuning import schema
from relaxpack.dist.tuning.engine import connect
from relaxpack.dist.tuning.store import Query, open_store
from relaxpack.errors import DatabaseError, NewerDatabaseError
from relaxpack.tuning_record import digest
from tests.helpers import tuning_crowd, tuning_writers
from tests.helpers.tuning_records import COMPILER, CPU, SM_80, SM_90, record, traced
from tests.helpers.tuning_writers import KILLS, WRITERS, own, shared


@contextmanager
def tampering(location: str) -> Iterator[sa.Connection]:
    """A transaction behind the store's back."""
    engine = connect(location, create=False)
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def test_what_is_added_is_found_again(location: str) -> None:
    made = [record(us=3.0), record(us=2.0, seed=1), record("other", bucket=None), traced(), record(target=SM_90)]
    with open_store(location) as store:
        assert [store.add(one) for one in made] == [True] * 5
        assert not store.add(made[0]) and len(store) == 5
        assert list(store.all()) == sorted(made, key=lambda one: one.id)
    with open_store(location, create=False) as store:
        assert store.get(made[3].id[:10]) == made[3] and store.damaged() == []
        assert store.candidates(made[0].key) == [made[1], made[0]]
        for query, expected in ((Query(status="stale"), []), (Query(bucket=0), [made[2], made[3]]),
                                (Query(target_hash=digest(SM_90)), [made[4]]), (Query(ids=(made[2].id,)), [made[2]]),
                                (Query(workload_hash=made[2].workload.hash, compiler_hash=digest(COMPILER)), [made[2]])):
            assert sorted(store.all(query), key=lambda one: one.id) == sorted(expected, key=lambda one: one.id)


def test_a_lookup_never_crosses_target_compiler_or_bucket(location: str) -> None:
    made = record()
    workload, rows, target, compiler = made.key
    with open_store(location) as store:
        store.add(made)
        assert store.lookup(workload, rows, target, compiler) == made
        assert store.lookup(workload, 8, target, compiler) is None
        assert store.lookup(workload, None, target, compiler) is None
        assert store.lookup(workload, rows, digest(SM_80), compiler) is None
        assert store.lookup(workload, rows, digest({**CPU, "threads": 1}), compiler) is None
        assert store.lookup(workload, rows, target, digest({**COMPILER, "llvm": 23})) is None


def test_the_best_good_record_answers_and_a_mark_is_never_taken_back(location: str) -> None:
    slow, fast, twin = record(us=3.0), record(us=2.0), record(us=2.0, seed=1)
    with open_store(location) as store:
        store.add_all([slow, fast, twin])
        first, second = sorted([fast, twin], key=lambda one: one.id)
        assert store.lookup(*slow.key) == first
        assert store.mark(first.id, "stale", "not reproduced")
        assert store.lookup(*slow.key) == second
        assert store.mark(second.id, "failed", "wrong numbers") and not store.mark(second.id, "stale", "slow")
        assert store.lookup(*slow.key) == slow
        assert not store.add(second) and store.get(second.id).reason == "wrong numbers"   # the good copy changes nothing
        assert store.add(slow.marked("failed", "too")) and store.lookup(*slow.key) is None
        third = record("third")
        store.add(third)
        assert store.mark(third.id, "failed", "error:\n\0 line 2") and store.get(third.id) == third.marked(
            "failed", "error: line 2")
        with pytest.raises(DatabaseError, match="no record 0000"):
            store.mark("0" * 64, "stale", "")


def test_removing_records_takes_their_workloads_with_them(location: str) -> None:
    one, other, lonely = record(), record(seed=1), record("lonely")
    with open_store(location) as store:
        store.add_all([one, other, lonely])
        assert store.remove([one.id, lonely.id, "f" * 64]) == 2
        assert list(store.all()) == [other]
    with tampering(location) as connection:
        assert connection.execute(sa.select(schema.workloads.c.name)).scalars().all() == ["cpu.gemv"]


def test_an_id_prefix_must_be_of_one_record(location: str) -> None:
    with open_store(location) as store:
        store.add_all([record(), record(seed=1)])
        with pytest.raises(DatabaseError, match="several records"):
            store.get("")
        with pytest.raises(DatabaseError, match="no record whose id starts with '%'"):
            store.get("%")


def test_concurrent_writers_and_a_killed_one_lose_nothing(location: str) -> None:
    count = 12
    done = subprocess.run([sys.executable, tuning_writers.__file__, location, str(count)], capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    with open_store(location, create=False) as store:
        assert store.damaged() == []
        found = {made.id: made for made in store.all()}
    expected = [own(writer, number) for writer in range(WRITERS) for number in range(count)]
    assert sorted(record_id for told in said["acknowledged"] for record_id in told) == sorted(made.id for made in expected)
    assert all(found[made.id] == made for made in expected)
    assert len(said["killed"]) == KILLS and all(said["killed"])
    for life, told in enumerate(said["killed"]):
        assert [found[record_id] for record_id in told] == [own(1000 + life, number) for number in range(len(told))]
    for number in range(5):
        assert found[shared(number).id] == shared(number).marked("failed", "writer 0")
    assert said["reader"]["seen"] == len(found) and said["reader"]["rounds"] >= 2


def test_a_crowd_that_shares_workloads_and_a_remover_stay_out_of_each_others_way(location: str) -> None:
    done = subprocess.run([sys.executable, tuning_crowd.__file__, location, "8"], capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert (done.stdout, done.stderr) == ("True []\n", "")


def test_first_users_at_once_make_one_database(location: str) -> None:
    program = ("import sys; from relaxpack.dist.tuning.store import open_store; sys.stdin.read(1)\n"
               "with open_store(sys.argv[1]) as store: print(len(store))")
    starting = [subprocess.Popen([sys.executable, "-c", program, location], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
                for _ in range(4)]
    for process in starting:                 # all have imported, or will start the sooner after it
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    assert [process.communicate() for process in starting] == [("0\n", "")] * 4


def test_a_store_opened_before_a_fork_serves_both_processes(location: str) -> None:
    program = """if True:
        import os, sys
        from relaxpack.dist.tuning.store import open_store
        from tests.helpers.tuning_records import record
        with open_store(sys.argv[1]) as store:
            store.add(record("before"))
            child = os.fork()
            for number in range(20):
                store.add(record(f"{'child' if child == 0 else 'parent'} {number}"))
                assert len(store) >= number + 2
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            print(len(list(store.all())), store.damaged())
    """
    done = subprocess.run([sys.executable, "-c", program, location], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert (done.stdout, done.stderr) == ("41 []\n", "")


def test_a_newer_schema_is_refused(location: str) -> None:
    open_store(location).close()
    with tampering(location) as connection:
        connection.execute(schema.facts.update().values(value="2"))
    for create in (True, False):
        with pytest.raises(NewerDatabaseError, match=r"schema 2, this one knows 1\); upgrade relaxpack"):
            open_store(location, create=create)
    with tampering(location) as connection:
        connection.execute(schema.facts.update().values(value="new"))
    with pytest.raises(DatabaseError, match="no readable schema version"):
        open_store(location)


@pytest.mark.parametrize("column", ["content", "target_hash", "workload"])
def test_a_damaged_row_is_named_and_the_others_answer(location: str, column: str) -> None:
    damaged, whole = record(us=1.0), record("other")
    with open_store(location) as store:
        store.add_all([damaged, whole])
        with tampering(location) as connection:
            if column == "workload":
                connection.execute(schema.workloads.delete().where(schema.workloads.c.name == damaged.workload.name))
            else:
                value = {"content": schema.records.c.content + "}", "target_hash": digest(SM_80)}[column]
                connection.execute(schema.records.update().where(schema.records.c.id == damaged.id).values({column: value}))
        assert [found.where for found in store.damaged()] == [damaged.id]
        assert list(store.all()) == [whole] and store.lookup(*whole.key) == whole
        assert store.lookup(*damaged.key) is None
        assert store.lookup(damaged.key.workload, 4, digest(SM_80), damaged.key.compiler) is None   # a torn key is no key


def test_a_missing_or_foreign_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="no tuning database at"):
        open_store(str(tmp_path / "none.sqlite"), create=False)
    text = tmp_path / "text.sqlite"
    text.write_text("not a database " * 100)
    with pytest.raises(DatabaseError, match="not an SQLite database"):
        open_store(str(text))
    with pytest.raises(DatabaseError, match="is a folder"):
        open_store(str(tmp_path))
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    with pytest.raises(DatabaseError, match="something else .tables recipes."):
        open_store(str(other))
    with pytest.raises(DatabaseError, match="holds no tuning records yet"):
        open_store(str(other), create=False)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match=r"file/tuning.sqlite: .*name another place"):
        open_store(str(tmp_path / "file" / "tuning.sqlite"))


def test_a_store_in_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made beside it, as on a read-only mount, where nothing could be."""
    path = tmp_path / "what? a %20 name.sqlite"
    made = record()
    with open_store(str(path)) as store:
        store.add(made)
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    with open_store(str(path), create=False) as store:
        assert list(store.all()) == [made] and [entry.name for entry in tmp_path.iterdir()] == [path.name]
        with pytest.raises(DatabaseError, match="cannot be opened for writing"):
            store.add(record(us=1.0))
    beside = tmp_path / f"{path.name}-wal"      # someone writes, or was killed: what is there counts
    beside.touch()
    with open_store(str(path), create=False) as store:
        assert store.add(record(us=1.0))


def test_a_file_overwritten_in_its_middle_is_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    with open_store(str(path)) as store:
        store.add_all(record(f"kernel {number}" + "x" * 3000, seed=number) for number in range(50))
    with path.open("r+b") as f:
        f.seek(4096)
        f.write(b"\xff" * 4096 * 10)
    with pytest.raises(DatabaseError, match=r"tuning.sqlite: the file is damaged"), open_store(str(path)) as store:
        list(store.all())


def test_no_password_in_an_error(postgresql_server: str) -> None:
    nobody = postgresql_server.replace("://tuner:", "://nobody:")
    with pytest.raises(DatabaseError, match="password authentication failed") as refused:
        open_store(nobody)
    absent = postgresql_server.rsplit("/", 1)[0] + "/absent"
    with pytest.raises(DatabaseError, match='database "absent" does not exist') as missing:
        open_store(absent)
    unreachable = "postgresql://u:p%40ss@127.0.0.1:1/x"
    with pytest.raises(DatabaseError, match="the database server refused") as unreached:
        open_store(unreachable)
    for error in (refused, missing, unreached):
        assert "p%40ss" not in str(error.value) and "p@ss" not in str(error.value)
    with pytest.raises(DatabaseError, match="not a database URL"):
        open_store("postgresql://host:port/name")


def test_an_empty_postgresql_database_is_said_to_be_empty(postgresql_database: str) -> None:
    with pytest.raises(DatabaseError, match="holds no tuning records yet"):
        open_store(postgresql_database, create=False)


def test_a_postgresql_user_who_may_only_read_reads(postgresql_database: str) -> None:
    with open_store(postgresql_database) as store:
        store.add(record())
    with tampering(postgresql_database) as connection:
        name = "reader_" + postgresql_database.rsplit("_", 1)[1]
        connection.execute(sa.text(f"CREATE ROLE {name} LOGIN PASSWORD 'r'"))
        connection.execute(sa.text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}"))
    reading = f"postgresql://{name}:r@" + postgresql_database.rsplit("@", 1)[1]
    with open_store(reading, create=False) as store:
        assert store.lookup(*record().key) == record()
        with pytest.raises(DatabaseError, match="permission denied"):
            store.add(record("other"))
