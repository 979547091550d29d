"""The record: ids, keys, status, and every way in which its JSON can be wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxpack.errors import DamagedRecordError
from relaxpack.kernel_spec import NormSpec
from relaxpack.tuning_record import Check, TuningRecord, Workload, digest, joined
from tests.helpers.tuning_records import COMPILER, CPU, SM_80, record


def test_json_round_trip_keeps_id_key_and_times() -> None:
    for made in (record(), record(bucket=None), record(choice={"kind": "library", "library": "cublaslt"}),
                 record(choice={"kind": "trace", "trace": [[["A", [], ["x", None, 1.5], ["b"]]], [[0, [8, 2]]]]}),
                 record(check=None, status="stale", reason="imported"), record(us=1 / 3)):
        again = TuningRecord.from_json(json.loads(json.dumps(made.to_json())))
        assert again == made and again.id == made.id and again.key == made.key and again.times_us == made.times_us


def test_the_id_is_of_the_content_and_not_of_the_status() -> None:
    made = record()
    assert made.marked("stale", "slower now").id == made.id
    for changed in (replace(made, bucket=8), replace(made, times_us=(9.0,)), replace(made, target=SM_80),
                    replace(made, conditions={**made.conditions, "threads": 1}), record(seed=1)):
        assert changed.id != made.id


def test_the_key_is_workload_bucket_target_and_compiler_alone() -> None:
    made = record()
    assert made.key == (made.workload.hash, 4, digest(CPU), digest(COMPILER))
    assert replace(made, times_us=(1.0,), choice={"kind": "parameters", "parameters": {"tile": 8}}).key == made.key
    assert replace(made, workload=replace(made.workload, name="another name")).key == made.key
    for changed in (replace(made, bucket=None), replace(made, target={**CPU, "threads": 3}),
                    replace(made, compiler={**COMPILER, "llvm": 23}), record("other")):
        assert changed.key != made.key
    # Lists and tuples, and the order of facts, are the same thing.
    assert replace(made, target=dict(reversed([*CPU.items(), ("features", ["avx2", "fma"])]))).key == made.key  # type: ignore[list-item, arg-type]


def test_a_workload_of_a_kernel_names_its_spec() -> None:
    one = Workload.kernel("cpu.norm", NormSpec(64, 1e-5, "float32", False))
    assert json.loads(one.text) == {"family": "cpu.norm", "spec": {"hidden_size": 64, "epsilon": 1e-5,
                                                                   "activation_dtype": "float32", "residual": False}}
    assert one.hash == Workload.kernel("cpu.norm", NormSpec(64, 1e-5, "float32", False), "a name").hash
    assert one.hash != Workload.kernel("cpu.norm", NormSpec(64, 1e-6, "float32", False)).hash


def test_median_spread_and_rank() -> None:
    made = record(times_us=(4, 1, 2, 3, 100))
    assert made.median_us == 3 and made.spread == pytest.approx((4 - 2) / 2 / 3)
    assert record(times_us=(5,)).spread == 0
    fast, slow = record(us=1.0), record(us=2.0)
    assert fast.rank < slow.rank
    one, other = record(seed=1), record(seed=2)
    assert min(one, other, key=lambda r: r.rank).id == min(one.id, other.id)


def test_a_mark_only_goes_up() -> None:
    good = record()
    stale, failed = good.marked("stale", "b"), good.marked("failed", "wrong numbers")
    assert (stale.status, stale.reason) == ("stale", "b")
    assert stale.marked("good", "") == stale and failed.marked("stale", "a") == failed
    assert stale.marked("failed", "x").status == "failed"
    assert joined(stale, good.marked("stale", "a")).reason == "a"


def test_a_reason_becomes_one_line_that_every_database_stores() -> None:
    marked = record().marked("failed", "Traceback\n  File \0 \ud800\n" + "x" * 9999)
    assert marked.reason.startswith("Traceback File ? x") and len(marked.reason) == 500 and marked.reason.endswith("...")
    assert TuningRecord.from_json(marked.to_json()) == marked


def test_measured_again_is_a_new_good_record_with_its_parent() -> None:
    old = record(check=None, status="stale", reason="imported")
    new = old.remeasured(times_us=(3.0,), conditions=old.conditions, check=Check(1, 0.0, 0.0), origin=old.origin,
                         compiler={**COMPILER, "kernels": 2})
    assert new.status == "good" and new.origin.parent == old.id and new.id != old.id
    assert new.choice == old.choice and new.key.compiler != old.key.compiler and new.baseline_us is None


_WRONG: list[tuple[str, Any, str]] = [
    ("times_us", [10**400], "times_us"), ("bucket", 10**20, "bucket"), ("origin", {
        "created": "\0", "host": "", "tool": "", "trials": 1, "parent": None}, "origin.created"),
    ("workload", {"kind": "kernel", "name": "\ud800", "hash": "0" * 64, "text": "t"}, "workload.name"),
    ("version", 2, "version 2"), ("version", True, "version"), ("bucket", 0, "bucket"), ("bucket", 1.5, "bucket"),
    ("bucket", True, "bucket"), ("times_us", [], "times_us"), ("times_us", [1, math.nan], r"times_us\[1\]"),
    ("times_us", [-1.0], r"times_us\[0\]"), ("times_us", [0], r"times_us\[0\]"), ("times_us", [math.inf], "finite"),
    ("times_us", ["1"], "times_us"), ("times_us", [True], "times_us"), ("times_us", 5, "times_us"),
    ("baseline_us", -2, "baseline_us"), ("baseline_us", math.nan, "baseline_us"), ("status", "fine", "status"),
    ("status", None, "status"), ("reason", 3, "reason"), ("reason", "why", "good record has a reason"),
    ("target", {}, "target.kind"), ("target", {"kind": "cpu"}, "target lacks arch"), ("target", "cpu", "target"),
    ("target", {**CPU, "kind": "tpu"}, "tpu"), ("target", {**CPU, "extra": {"a": 1}}, "target.extra"),
    ("target", {**CPU, "speed": math.nan}, "target.speed"), ("compiler", {"kernels": 1}, "compiler lacks apache-tvm"),
    ("conditions", {"repeats": 3}, "conditions lacks rotated_bytes"), ("conditions", None, "conditions"),
    ("choice", {"kind": "magic"}, "choice.kind"), ("choice", {"kind": "trace"}, "choice lacks trace"),
    ("choice", {"kind": "trace", "trace": [[]]}, "choice.trace"), ("choice", {"kind": "trace", "trace": {}}, "choice.trace"),
    ("choice", {"kind": "trace", "trace": [[math.nan], []]}, "choice.trace"), ("choice", [], "choice"),
    ("choice", {"kind": ["trace"]}, "choice.kind"), ("choice", {"kind": "library", "library": ""}, "choice.library"),
    ("choice", {"kind": "parameters", "parameters": {"a": {}}}, "choice.parameters.a"),
    ("choice", {"kind": "parameters", "parameters": {}, "more": 1}, "choice has unknown fields: 'more'"),
    ("check", None, "check of a good record"), ("check", {"seed": 1}, "check lacks max_error, tolerance"),
    ("check", {"seed": 1, "max_error": 2.0, "tolerance": 1.0}, "the check failed"),
    ("check", {"seed": 1, "max_error": math.nan, "tolerance": 1.0}, "check.max_error"),
    ("check", {"seed": 0.5, "max_error": 0.0, "tolerance": 1.0}, "check.seed"),
    ("workload", {"kind": "kernel"}, "workload lacks hash, name, text"), ("workload", None, "workload"),
    ("workload", {"kind": "kernel", "name": "n", "hash": "0" * 64, "text": "t"}, "SHA-256"),
    ("workload", {"kind": "primfunc", "name": "n", "hash": "abc", "text": "t"}, "structural hash"),
    ("workload", {"kind": "other", "name": "n", "hash": "1", "text": "t"}, "workload.kind"),
    ("workload", {"kind": "primfunc", "name": "", "hash": "1", "text": "t"}, "workload.name"),
    ("origin", {"created": 1, "host": "", "tool": "", "trials": 1, "parent": None}, "origin.created"),
    ("origin", {"created": "", "host": "", "tool": "", "trials": -1, "parent": None}, "origin.trials"),
    ("id", "0" * 64, "damaged"), ("id", None, "damaged"),
]


@pytest.mark.parametrize(("field", "value", "message"), _WRONG)
def test_a_wrong_field_is_named(field: str, value: Any, message: str) -> None:
    data = json.loads(json.dumps(record().to_json())) | {field: value}
    with pytest.raises(DamagedRecordError, match=message):
        TuningRecord.from_json(data)


def test_missing_and_unknown_fields_are_named() -> None:
    data = record().to_json()
    del data["bucket"]
    with pytest.raises(DamagedRecordError, match="the record lacks bucket"):
        TuningRecord.from_json(data)
    with pytest.raises(DamagedRecordError, match="unknown fields: 'colour'"):
        TuningRecord.from_json(record().to_json() | {"colour": "red"})
    with pytest.raises(DamagedRecordError, match="not an object"):
        TuningRecord.from_json([1])


def test_a_changed_time_does_not_pass_for_the_record() -> None:
    data = record().to_json()
    data["times_us"] = [1.0]
    with pytest.raises(DamagedRecordError, match="not that of the content"):
        TuningRecord.from_json(data)


_json = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
                     max_leaves=8)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.sampled_from(sorted(record().to_json())), _json)
def test_any_json_in_any_field_is_a_record_or_one_clear_error(field: str, value: Any) -> None:
    try:
        assert TuningRecord.from_json(record().to_json() | {field: value}).id == record().id
    except DamagedRecordError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
