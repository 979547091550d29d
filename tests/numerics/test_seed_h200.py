"""The records of the H200 that come with relaxpack: they build, a build for that card by name finds them for the shapes of
Llama-3.2-1B, Llama-3.1-8B and Qwen2.5-7B, and a build for another card finds none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.gpu.tune_tasks import linear_spec
from relaxpack.dist.tuning.layers import open_source
from relaxpack.fingerprint import KERNELS_GENERATION
from relaxpack.kernel_spec import NormSpec
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.lookup import SEED, DatabaseLookup
from relaxpack.tuning.named_gpu import facts_of_gpu
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import TuningRecord

HOPPER = parse_target("cuda:sm_90a")
RECORDS = sorted((record for record in open_source(str(SEED)).all() if record.target["kind"] == "cuda"),
                 key=lambda record: (record.workload.name, record.bucket or 0, record.id))
CHOSEN = [record for record in RECORDS if record.choice["kind"] == "library" or record.choice["parameters"]]


def test_they_are_of_one_card_and_of_the_kernels_of_today() -> None:
    assert len(RECORDS) >= 60 and len(CHOSEN) >= 20
    assert {(record.target["name"], record.target["arch"]) for record in RECORDS} == {("NVIDIA H200", "sm_90a")}
    assert {record.compiler["kernels"] for record in RECORDS} == {KERNELS_GENERATION["cuda"]}
    for record in RECORDS:
        assert record.median_us <= (record.baseline_us or 0) * 1.02, record.workload.name
        assert str(record.conditions["method"]).startswith("CUDA graph replays in turn")


def _parameters(record: TuningRecord) -> dict[str, Any]:
    library = {"library": record.choice["library"]} if record.choice["kind"] == "library" else {}
    return {**record.choice["parameters"], **library}


@pytest.mark.slow
def test_every_choice_makes_a_kernel() -> None:
    families, made = families_for(HOPPER), 0
    for record in CHOSEN[::3]:
        family, spec = family_and_spec(record.workload)
        kernel = families[family].make(spec, _parameters(record))
        part = families[family].part(spec, record.bucket or 1)
        assert part is not None and set(_parameters(record)) <= part.space.names, record.workload.name
        assert kernel.stages and kernel.source.startswith(("rule:", "library:"))
        made += 1
    assert made >= 7


@pytest.fixture(scope="module")
def lookup() -> Iterator[DatabaseLookup]:
    facts = facts_of_gpu("H200", [HOPPER], ["seed"])["cuda:sm_90a"]
    with DatabaseLookup.open(["seed"], HOPPER, facts) as found:
        found.compiler = RECORDS[0].compiler            # of whoever runs this test, CUDA may be another
        yield found


@pytest.mark.parametrize("model", ["1b", "8b", "7b"])
def test_a_build_by_the_cards_name_finds_them(model: str, lookup: DatabaseLookup) -> None:
    linear, norm = (families_for(HOPPER)[name] for name in ("cuda.linear", "cuda.norm"))
    for rows in (1, 8, 16, 64, 512):
        for part in ("qkv", "o", "gate_up", "down"):
            workload = linear.workload(linear_spec(f"{model}.{part}", rows))
            record = lookup.find(workload, [rows], "linear")
            assert record is not None, (part, rows, [one.reason for one in lookup.rejected])
    hidden = linear_spec(f"{model}.o", 1).out_features
    assert lookup.find(norm.workload(NormSpec(hidden, 1e-6, "bfloat16", True)), [1], "norm") is not None


def test_another_card_finds_none(lookup: DatabaseLookup) -> None:
    linear = families_for(HOPPER)["cuda.linear"]
    with DatabaseLookup.open(["seed"], HOPPER, {**lookup.target, "name": "NVIDIA H100 80GB HBM3"}) as other:
        other.compiler = lookup.compiler
        assert other.find(linear.workload(linear_spec("8b.o", 16)), [16], "linear") is None
        assert {one.reason for one in other.rejected} == {
            "another target: name NVIDIA H100 80GB HBM3 here, NVIDIA H200 there"}
