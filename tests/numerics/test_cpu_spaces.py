"""Every parameter of the CPU kernels' search spaces: right numbers for any rows, the rule's own function for no parameters,
and what a build puts together out of the records of a kernel's parts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm_ffi
from relaxpack.kernel_spec import AttentionSpec, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.schedules.tuning.tuned import TunedKernels, bucket_sizes
from relaxpack.target import TargetSpec, host_cpu_features, parse_target
from relaxpack.tuning.candidates import families_for, family_for
from relaxpack.tuning.jobs import check, compile_candidate
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning.verify import verify
from relaxpack.tuning_record import TuningRecord, Workload
from relaxpack.weight_format import FORMATS
from tests.helpers.tuning_records import record

ATTENTION = AttentionSpec(4, 4, 2, 32, 32, 8, 64, 512, "float32", "float16", 32**-0.5)
SPECS: dict[str, tuple[str, Any]] = {
    "q4 decode": ("linear", LinearSpec(70, 96, FORMATS["q4_1"], "decode", "float32", "float32", residual=True)),
    "q8 prefill": ("linear", LinearSpec(96, 64, FORMATS["q8_0"], "prefill", "float32", "float32", glu="swiglu")),
    "f16 decode": ("linear", LinearSpec(70, 77, FORMATS["f16"], "decode", "float32", "float32", bias=True)),
    "f32 prefill": ("linear", LinearSpec(64, 77, FORMATS["f32"], "prefill", "float32", "float32")),
    "norm": ("norm", NormSpec(77, 1e-5, "float32", True)),
    "decode attention": ("decode_attention", ATTENTION), "prefill attention": ("prefill_attention", ATTENTION),
    "rope": ("rope_append", ATTENTION)}


@pytest.fixture(params=["x86-64-v3", "x86-64-v4"])
def target(request: pytest.FixtureRequest) -> TargetSpec:
    spec = parse_target(f"cpu:{request.param}")
    if missing := set(spec.features) - set(host_cpu_features()):
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    return spec


@pytest.mark.parametrize("name", SPECS)
def test_choices_are_right(name: str, target: TargetSpec, tmp_path: Path) -> None:
    """Two choices of each part: its last, which differs most from the rule's, and a drawn one."""
    operation, spec = SPECS[name]
    family = family_for(families_for(target), operation, spec)
    assert family is not None
    workload = family.workload(spec)
    assert family_and_spec(workload) == (family.name, family.canonical(spec))
    for number, part in enumerate(family.parts(spec)):
        choices = list(part.space.all())
        for index, choice in enumerate([choices[-1], random.Random(name + str(number)).choice(choices)]):
            path = str(tmp_path / f"{number}_{index}.so")
            compile_candidate(workload, {"kind": "parameters", "parameters": choice}, target, path)
            worst, where = check(path, workload, max(part.low, 8 if part.covers(8) else 1), 0)
            assert worst <= 1, (choice, worst, where)


@pytest.mark.parametrize("name", SPECS)
def test_without_records_a_kernel_is_the_rules(name: str, target: TargetSpec) -> None:
    operation, spec = SPECS[name]
    family = family_for(families_for(target), operation, spec)
    assert family is not None
    stage, = getattr(CpuKernels(target), operation)(spec).stages
    assert tvm_ffi.structural_equal(family.make(spec, {}), stage.func)
    defaults = {key: value for part in family.parts(spec) for key, value in part.space.default.items()}
    assert tvm_ffi.structural_equal(family.make(spec, defaults), stage.func)


class Known:
    """Records by bucket, for any work."""

    def __init__(self, *records: TuningRecord) -> None:
        self.records = {one.bucket: one for one in records}
        self.asked: list[tuple[int, ...]] = []
        self.used: list[str] = []
        self.rejected: list[tuple[str, str]] = []

    def find(self, workload: Workload, buckets: Sequence[int], kernel: str) -> TuningRecord | None:
        self.asked.append(tuple(buckets))
        return next((self.records[bucket] for bucket in buckets if bucket in self.records), None)

    def use(self, record: TuningRecord, kernel: str) -> None:
        self.used.append(record.id)

    def reject(self, record: TuningRecord, kernel: str, reason: str) -> None:
        self.rejected.append((record.id, reason))


def _provider(known: Known) -> CpuKernels:
    target = parse_target("cpu:x86-64-v3")
    families = families_for(target)
    return CpuKernels(target, TunedKernels(known, lambda operation, spec: family_for(families, operation, spec),
                                           {"decode": 6, "prefill": 48}))


def test_a_build_puts_the_parts_of_a_kernel_together() -> None:
    one = record(bucket=1, parameters={"prefetch": 512, "threads": False})
    four = record(bucket=4, parameters={"tiles": (2, 6), "tile_prefetch": False})
    known = Known(one, four, record(bucket=2, parameters={"tiles": (2,)}))
    _, spec = SPECS["q4 decode"]
    kernel = _provider(known).linear(spec)
    assert kernel.source == f"tuned:{one.id[:16]}+{four.id[:16]}" and known.used == [one.id, four.id]
    assert known.asked == [(1,), (6, 4, 2)]          # what the build can have, large to small
    family = families_for(parse_target("cpu:x86-64-v3"))["cpu.linear_quantized"]
    expected = family.make(spec, {"prefetch": 512, "threads": False, "tiles": (2, 6), "tile_prefetch": False})
    assert tvm_ffi.structural_equal(kernel.stages[0].func, expected)


def test_prefill_kernels_are_looked_up_by_the_chunk() -> None:
    known = Known()
    provider = _provider(known)
    assert provider.linear(SPECS["q8 prefill"][1]).source == "rule:cpu.linear"
    assert provider.prefill_attention(ATTENTION).source == "rule:cpu.prefill_attention"
    assert known.asked == [(48, 32, 16, 8, 4, 2, 1)] * 2


@pytest.mark.parametrize(("choice", "reason"), [
    ({"kind": "parameters", "parameters": {"no_such": 1}}, "parameters no_such does not belong"),
    ({"kind": "parameters", "parameters": {"tiles": (2,)}}, "parameters tiles does not belong"),    # of another part
    ({"kind": "parameters", "parameters": {"prefetch": "far"}}, "prefetch is 'far', not a int"),
    ({"kind": "trace", "trace": [[], []]}, "a trace does not belong"),
    ({"kind": "library", "library": "cublaslt", "parameters": {}}, "parameters library does not belong")])
def test_a_record_that_does_not_fit_is_rejected_by_name_and_the_rule_stands(choice: dict[str, Any], reason: str) -> None:
    bad = record(bucket=1, choice=choice)
    known = Known(bad)
    assert _provider(known).linear(SPECS["q4 decode"][1]).source == "rule:cpu.linear"
    assert known.used == [] and known.rejected[0][0] == bad.id and reason in known.rejected[0][1]


def test_sizes_that_are_looked_for() -> None:
    assert bucket_sizes(1) == [1] and bucket_sizes(8) == [8, 4, 2, 1] and bucket_sizes(6) == [6, 4, 2, 1]


def test_a_record_is_verified_on_this_machine() -> None:
    target = replace(parse_target("cpu"), threads=1)
    facts = {"kind": "cpu", "arch": target.arch, "features": target.features, "threads": 1}
    workload = families_for(target)["cpu.norm"].workload(NormSpec(64, 1e-5, "float32", False))
    real = replace(record(parameters={"chains": 2}, bucket=1, target=facts), workload=workload)
    assert verify(real, retime=False).status == "good"
    strange = replace(real, choice={"kind": "parameters", "parameters": {"chians": 2}})
    verdict = verify(strange, retime=False)
    assert verdict.status == "failed" and "NormTuning has no parameter chians" in verdict.reason
