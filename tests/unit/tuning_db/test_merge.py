"""The merge rule as laws: order, grouping and repetition do not matter; nothing crosses a key; a mark wins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxpack.dist.tuning.layers import Layers, Records
from relaxpack.dist.tuning.merge import by_key, merge_into, union, winners
from relaxpack.dist.tuning.records_file import encode
from relaxpack.dist.tuning.store import Query, open_store
from relaxpack.tuning_record import TuningRecord
from tests.helpers.tuning_records import COMPILER, SM_80, SM_90, record

laws = settings(deadline=None, derandomize=True, max_examples=150)

# Few values of everything, so that records meet: the same key, the same id with different marks, equal times.
_marks = st.one_of(st.just(("good", "")), st.tuples(st.sampled_from(["stale", "failed"]), st.sampled_from(["x", "y"])))
_records = st.builds(
    lambda name, us, bucket, target, compiler, seed, mark:
        record(name, us, bucket=bucket, target=target, compiler=compiler, seed=seed).marked(*mark),
    st.sampled_from(["a", "b"]), st.sampled_from([1.0, 2.0]), st.sampled_from([None, 4]), st.sampled_from([SM_80, SM_90]),
    st.sampled_from([COMPILER, {**COMPILER, "llvm": 23}]), st.integers(0, 1), _marks)
_databases = st.lists(_records, max_size=8).map(union)
Database = Mapping[str, TuningRecord]


def merged(*databases: Database) -> Database:
    return union(*(database.values() for database in databases))


@laws
@given(_databases, _databases)
def test_either_order_gives_the_same_database(a: Database, b: Database) -> None:
    assert merged(a, b) == merged(b, a)
    assert encode(merged(a, b).values()) == encode(merged(b, a).values())
    assert winners(merged(a, b).values()) == winners(merged(b, a).values())


@laws
@given(_databases, _databases, _databases)
def test_any_grouping_gives_the_same_database(a: Database, b: Database, c: Database) -> None:
    assert merged(merged(a, b), c) == merged(a, merged(b, c)) == merged(c, a, b)


@laws
@given(_databases, _databases)
def test_merging_again_changes_nothing(a: Database, b: Database) -> None:
    assert merged(a, a) == a
    assert merged(merged(a, b), b) == merged(a, b)


@laws
@given(_databases, _databases)
def test_a_winner_is_the_best_good_record_of_its_own_key(a: Database, b: Database) -> None:
    both = merged(a, b)
    for key, winner in winners(both.values()).items():
        assert winner.key == key and winner.status == "good"
        good = [one for one in both.values() if one.key == key and one.status == "good"]
        assert winner.rank == min(one.rank for one in good)
    for side in (a, b):
        for one in side.values():
            assert both[one.id].status != "good" or one.status == "good"      # a mark on either side holds


@laws
@given(st.lists(_databases, min_size=1, max_size=3))
def test_layers_answer_like_one_merged_database(databases: list[Database]) -> None:
    layers = Layers([Records(database.values(), f"layer {number}") for number, database in enumerate(databases)])
    both = merged(*databases)
    assert list(layers.all()) == [both[record_id] for record_id in sorted(both)]
    for key in by_key(both.values()):
        assert layers.lookup(*key) == winners(both.values()).get(key)
    for status in ("good", "failed"):
        assert [one.id for one in layers.all(Query(status=status))] == sorted(
            one.id for one in both.values() if one.status == status)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(_databases, _databases)
def test_stores_merge_like_sets(tmp_path_factory: pytest.TempPathFactory, a: Database, b: Database) -> None:
    folder = tmp_path_factory.mktemp("stores")
    with open_store(str(folder / "ab.sqlite")) as ab, open_store(str(folder / "ba.sqlite")) as ba:
        merge_into(ab, a.values())
        one = merge_into(ab, b.values())
        merge_into(ba, b.values())
        other = merge_into(ba, a.values())
        assert list(ab.all()) == list(ba.all()) == list(Records(merged(a, b).values(), "").all())
        assert sorted(one.conflicts, key=repr) == sorted(other.conflicts, key=repr)
        assert {one.id for one in one.new} == b.keys() - a.keys()
        assert one.known + len(one.marked) + len(one.new) == len(b)
        for key in by_key(merged(a, b).values()):
            assert ab.lookup(*key) == winners(merged(a, b).values()).get(key)
        again = merge_into(ab, merged(a, b).values())
        assert not again.new and not again.marked and not again.conflicts and again.known == len(merged(a, b))


def test_sm_80_and_sm_90_stay_apart_and_both_stay(tmp_path: Path) -> None:
    """C37: the record of sm_80 is faster, and a build for sm_90 never takes it."""
    sm_80, sm_90 = record(us=1.0, target=SM_80), record(us=9.0, target=SM_90)
    assert sm_80.workload.hash == sm_90.workload.hash
    with open_store(str(tmp_path / "team.sqlite")) as team:
        for one in (sm_80, sm_90):
            assert not merge_into(team, [one]).conflicts
        assert len(team) == 2
        assert team.lookup(*sm_90.key) == sm_90 and team.lookup(*sm_80.key) == sm_80
        team.mark(sm_90.id, "failed", "wrong numbers")
        assert team.lookup(*sm_90.key) is None


def test_the_same_key_keeps_the_better_time_and_logs_the_conflict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C37, second part, in both orders."""
    slow, fast = record(us=3.0), record(us=2.0)
    caplog.set_level(logging.INFO, "relaxpack.dist.tuning.merge")
    for number, (first, second) in enumerate([(slow, fast), (fast, slow)]):
        with open_store(str(tmp_path / f"{number}.sqlite")) as team:
            merge_into(team, [first])
            conflict, = merge_into(team, [second]).conflicts
            assert (conflict.kept, conflict.beaten) == (fast, slow) and team.lookup(*slow.key) == fast
            assert f"{fast.id[:12]} with 2 us kept, {slow.id[:12]} with 3 us beaten" in caplog.messages[-1]
            team.mark(fast.id, "stale", "not reproduced")
            assert team.lookup(*slow.key) == slow            # the beaten one has stayed for this


def test_a_record_of_another_compiler_is_kept_and_not_used(tmp_path: Path) -> None:
    """C37, third part."""
    old, new = record(us=1.0, compiler={**COMPILER, "apache-tvm": "0.26"}), record(us=5.0)
    with open_store(str(tmp_path / "team.sqlite")) as team:
        assert not merge_into(team, [old, new]).conflicts
        assert team.lookup(*new.key) == new
        team.remove([new.id])
        assert team.lookup(*new.key) is None and team.get(old.id) == old


def test_a_dry_run_reports_and_changes_nothing(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "team.sqlite")) as team:
        assert [one.id for one in merge_into(team, [record()], dry_run=True).new] == [record().id]
        assert len(team) == 0
