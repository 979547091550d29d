"""The records of the H200 that come with relaxpack: of today's kernels, judged in whole layers where they change something.
A build for that card by name finds them for the shapes that were measured, and a build for another card finds none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.gpu.tune_tasks import jobs, linear_spec
from relaxpack.compile.kernels import kernel_provider
from relaxpack.dist.tuning.layers import open_source
from relaxpack.kernel_generations import for_workload
from relaxpack.kernel_spec import NormSpec
from relaxpack.relax_models.export import BuildLimits
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.lookup import SEED, DatabaseLookup
from relaxpack.tuning.named_gpu import facts_of_gpu

HOPPER = parse_target("cuda:sm_90a")
RECORDS = sorted((record for record in open_source(str(SEED)).all() if record.target["kind"] == "cuda"),
                 key=lambda record: (record.workload.name, record.bucket or 0, record.id))


RULE = {"kind": "parameters", "parameters": {}}
MEASURED = {"8b": (1, 4, 8, 16, 64, 512), "1b": (1, 4, 8), "7b": (1, 4, 8)}


def test_they_are_of_one_card_and_of_the_kernels_of_today() -> None:
    assert len(RECORDS) >= 60
    assert len({record.key for record in RECORDS}) == len(RECORDS)
    assert {(record.target["name"], record.target["arch"]) for record in RECORDS} == {("NVIDIA H200", "sm_90a")}
    for record in RECORDS:
        assert for_workload(record.compiler, record.workload) == record.compiler, record.workload.name
        assert record.median_us <= (record.baseline_us or 0) * (1.02 if record.choice == RULE else 1), record.workload.name
        assert str(record.conditions["method"]).startswith("CUDA graph replays in turn")


def test_what_differs_from_a_rule_made_whole_layers_faster() -> None:
    """Records that won by themselves made whole decode steps slower (docs/tuning.md); none needs a library."""
    changed = [record for record in RECORDS if record.choice != RULE]
    assert len(changed) >= 20 and {record.choice["kind"] for record in changed} == {"parameters"}
    for record in changed:
        chain = re.match(r"whole layers of decode_\d+ .*: ([\d.]+) us a layer by the rule, ([\d.]+) with this",
                         str(record.conditions["chain"]))
        assert chain and float(chain[2]) < float(chain[1]) * 0.997, record.workload.name


def test_what_was_not_seen_to_gain_in_whole_layers_is_left_out() -> None:
    left = [record for record in RECORDS if "left_out" in record.conditions]
    assert len(left) >= 5 and all(record.choice == RULE for record in left)
    assert all(str(record.conditions["left_out"]).startswith("faster by") for record in left)


@pytest.mark.slow
def test_a_step_with_them_has_the_kernels_they_name() -> None:
    """Where a record names the rule, the step is the one without."""
    with _lookup() as found:
        tuned, plain = kernel_provider(HOPPER, found, BuildLimits(1024, max_batch=64)), CudaKernels(HOPPER)
        family = families_for(HOPPER)["cuda.linear"]
        for part in ("qkv", "o", "down"):
            for rows in (1, 4, 8, 16, 64):
                spec = linear_spec(f"8b.{part}", rows)
                one, other = tuned.linear(spec), plain.linear(spec)
                record = found.find(family.workload(spec), [rows], "linear")
                assert record is not None and one.source.startswith("tuned:")
                same = [stage.name for stage in one.stages] == [stage.name for stage in other.stages]
                assert same == (record.choice == RULE), (part, rows)


@contextmanager
def _lookup() -> Iterator[DatabaseLookup]:
    facts = facts_of_gpu("H200", [HOPPER], ["seed"])["cuda:sm_90a"]
    with DatabaseLookup.open(["seed"], HOPPER, facts) as found:
        found.compiler = RECORDS[0].compiler            # of whoever runs this test, CUDA may be another
        yield found


@pytest.fixture(scope="module")
def lookup() -> Iterator[DatabaseLookup]:
    with _lookup() as found:
        yield found


@pytest.mark.parametrize("model", MEASURED)
def test_a_build_by_the_cards_name_finds_them(model: str, lookup: DatabaseLookup) -> None:
    linear, norm = (families_for(HOPPER)[name] for name in ("cuda.linear", "cuda.norm"))
    for rows in MEASURED[model]:
        for part in ("qkv", "o", "gate_up", "down"):
            workload = linear.workload(linear_spec(f"{model}.{part}", rows))
            record = lookup.find(workload, [rows], "linear")
            assert record is not None, (part, rows, [one.reason for one in lookup.rejected])
    hidden = linear_spec(f"{model}.o", 1).out_features
    assert lookup.find(norm.workload(NormSpec(hidden, 1e-6, "bfloat16", True)), [1], "norm") is not None


@pytest.mark.parametrize("name", [f"{model}.fused_attention@{rows}" for model in MEASURED for rows in (1, 8)])
def test_a_build_finds_its_attention(name: str, lookup: DatabaseLookup) -> None:
    job = next(job for job in jobs() if job.name == name)
    workload = families_for(HOPPER)["cuda.rope_append_attention"].workload(job.spec)
    assert lookup.find(workload, [job.bucket], "rope_append_attention") is not None, [o.reason for o in lookup.rejected]


def test_another_card_finds_none(lookup: DatabaseLookup) -> None:
    linear = families_for(HOPPER)["cuda.linear"]
    with DatabaseLookup.open(["seed"], HOPPER, {**lookup.target, "name": "NVIDIA H100 80GB HBM3"}) as other:
        other.compiler = lookup.compiler
        assert other.find(linear.workload(linear_spec("8b.o", 16)), [16], "linear") is None
        assert {one.reason for one in other.rejected} == {
            "another target: name NVIDIA H100 80GB HBM3 here, NVIDIA H200 there"}
