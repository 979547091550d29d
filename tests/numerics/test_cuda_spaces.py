"""The search spaces of the CUDA kernels, without a GPU: every choice makes a kernel, some are compiled, and records of a GPU
choose kernels and libraries in a build for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from relaxpack.kernel_spec import AttentionSpec, FusedAttentionSpec, LinearSpec, NormSpec
from relaxpack.model_info import FP8
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.schedules.tuning.tuned import TunedKernels, as_choice, as_parameters
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for, family_for, prim_func
from relaxpack.tuning.tasks import Task, without_libraries
from relaxpack.tuning_record import TuningRecord, Workload, canonical
from relaxpack.weight_format import FORMATS
from tests.helpers import cuda_harness
from tests.helpers.tuning_records import SM_90, record

HOPPER = parse_target("cuda:sm_90a")
ATTENTION = AttentionSpec(2, 8, 2, 64, 64, 16, 64, 1024, "bfloat16", "bfloat16", 0.125)


def linear(rows: int | None, **changes: object) -> LinearSpec:
    spec = LinearSpec(1024, 1024, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=rows)
    return replace(spec, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [16, 512])
def test_every_matmul_choice_makes_a_kernel(rows: int) -> None:
    family = families_for(HOPPER)["cuda.linear"]
    part, = family.parts(linear(rows))
    choices = list(part.space.all())
    assert len(choices) >= 7 and part.covers(rows) and not part.covers(rows + 1)
    assert dict(part.space.default) not in choices and {"library": "cublaslt"} in choices
    names = {family.make(linear(rows), choice).stages[0].name for choice in choices}
    assert len(names) == len(choices)
    rule, = family.make(linear(rows), {}).stages
    assert rule.name == CudaKernels(HOPPER).linear(linear(rows)).stages[0].name
    assert family.make(linear(rows), part.space.default).stages[0].name == rule.name


@pytest.mark.parametrize(("weight", "rows"), [("q4_1", 1), ("q4_1", 64), ("q4_1", 128), ("fp8", 16), ("q6_k", 16)])
def test_every_choice_of_a_quantised_matmul_makes_a_kernel(weight: str, rows: int) -> None:
    """With the packed weight, or, for many rows, with an unpacked copy of it."""
    spec = linear(rows, weight=FORMATS[weight])
    family = families_for(HOPPER)["cuda.linear"]
    part, = family.parts(spec)
    choices = list(part.space.all())
    made = {canonical(choice): family.make(spec, choice) for choice in choices[::max(1, len(choices) // 40)]}
    assert len(made) >= 3 and {len(kernel.stages) for kernel in made.values()} <= ({1} if rows <= 32 else {1, 2})
    names = {tuple(stage.name for stage in kernel.stages) for kernel in made.values()}
    assert len(names) == len(made)
    rule = CudaKernels(HOPPER).linear(spec)
    assert [stage.name for stage in family.make(spec, part.space.default).stages] == [stage.name for stage in rule.stages]
    assert dict(part.space.default) not in choices


def test_a_record_chooses_the_kernel_of_a_quantised_matmul() -> None:
    choice = {"family": "gemm_few_quant", "columns": 16, "strips": 2, "warps": 4, "split": 4}
    spec = linear(16, weight=FORMATS["q4_1"])
    workload = families_for(HOPPER)["cuda.linear"].workload(spec)
    kernels, _ = _built(replace(record(bucket=16, target=SM_90, parameters=choice), workload=workload))
    kernel = kernels.linear(spec)
    assert kernel.source.startswith("tuned:") and "st2_wa4_sp4" in kernel.stages[0].name


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_every_choice_of_the_fused_attention_makes_a_kernel(rows: int) -> None:
    spec = FusedAttentionSpec(replace(ATTENTION, num_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128), rows)
    family = families_for(HOPPER)["cuda.rope_append_attention"]
    part, = family.parts(spec)
    choices = list(part.space.all())
    assert len(choices) >= 20 and part.covers(rows) and not part.covers(rows + 1)
    assert dict(part.space.default) not in choices
    for choice in choices[::17]:
        assert family.make(spec, choice).stages[0].name != family.make(spec, {}).stages[0].name
    rule = CudaKernels(HOPPER).rope_append_attention(spec.attention, rows)
    assert rule is not None and family.make(family.canonical(spec), {}).stages[0].name.startswith("rope_append_attention")
    assert family.make(spec, part.space.default).stages[0].name == rule.stages[0].name


def test_a_record_chooses_the_fused_attention_of_its_rows_alone() -> None:
    spec, family = FusedAttentionSpec(ATTENTION, 4), families_for(HOPPER)["cuda.rope_append_attention"]
    part, = family.parts(spec)
    choice = next(one for one in part.space.all() if one["cluster"] != part.space.default["cluster"])
    kernels, _ = _built(replace(record(bucket=4, target=SM_90, parameters=choice), workload=family.workload(spec)))
    kernel, other = kernels.rope_append_attention(ATTENTION, 4), kernels.rope_append_attention(ATTENTION, 2)
    assert kernel is not None and kernel.source.startswith("tuned:") and f"_c{choice['cluster']}w" in kernel.stages[0].name
    assert other is not None and other.source == "rule:cuda.rope_append_attention"
    assert kernels.rope_append_attention(ATTENTION, 4) is kernel
    # Where the rule keeps the kernels apart there is nothing to choose.
    assert family.parts(FusedAttentionSpec(ATTENTION, 4096)) == () and kernels.rope_append_attention(ATTENTION, 4096) is None


def test_over_e4m3_pages_a_record_chooses_between_both_prefill_kernels() -> None:
    spec = replace(ATTENTION, num_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128, kv_dtype=FP8)
    family = families_for(HOPPER)["cuda.prefill_attention"]
    part, = family.parts(spec)
    choices = list(part.space.all())
    portable = [choice for choice in choices if "warps" in choice]
    assert {"consumers", "raw_stages"} < set(part.space.default) and dict(part.space.default) not in choices
    assert 3 < len(portable) < len(choices) - 10 and all("packed" in one for one in choices if one not in portable)
    rule = CudaKernels(HOPPER).prefill_attention(spec)
    assert family.make(spec, {}).source == rule.source == "rule:cuda.prefill_attention_hopper"
    assert family.make(spec, portable[0]).source == "rule:cuda.prefill_attention"
    kernels, _ = _built(replace(record(bucket=512, target=SM_90, parameters=portable[0]), workload=family.workload(spec)))
    chosen = kernels.prefill_attention(spec)
    assert chosen.source.startswith("tuned:") and "tensormap" not in chosen.stages[0].func.script()
    # Pages that no bulk copy fits have the portable kernel alone.
    odd, = family.parts(replace(spec, page_size=4))
    assert not any("consumers" in choice for choice in odd.space.all())


@pytest.mark.parametrize("shape", [(2048, 2048, 64), (2048, 8192, 512), (896, 11008, 192), (1024, 11008, 256)])
def test_no_matmul_has_bits_that_depend_on_which_block_is_last(shape: tuple[int, int, int]) -> None:
    """An H200 gave other bits in a second run with three pieces of K and a last tile that overlaps the one before."""
    n, k, rows = shape
    spec = replace(linear(rows), out_features=n, in_features=k)
    part, = families_for(HOPPER)["cuda.linear"].parts(spec)
    for choice in (*part.space.all(), dict(part.space.default)):
        assert choice.get("family") != "gemm_many" or choice.get("split", 1) <= 2 or n % choice["tile_n"] == 0, choice


def test_a_library_is_a_choice_that_can_be_left_out() -> None:
    family, spec = families_for(HOPPER)["cuda.linear"], linear(16)
    part, = family.parts(spec)
    task = Task("o", family.workload(spec), 16, 1.0, 1.0, part, "")
    left, = without_libraries([task])
    assert left.part is not None and task.part is not None
    libraries = [choice for choice in task.part.space.all() if "library" in choice]
    assert libraries and not any("library" in choice for choice in left.part.space.all())
    assert left.part.space.size() == task.part.space.size() - len(libraries)
    for choice in (libraries[-1], next(iter(left.part.space.all()))):
        recorded = as_choice(choice)
        assert recorded["kind"] == ("library" if "library" in choice else "parameters")
        assert as_parameters(recorded) == dict(choice)
        assert prim_func(task.workload, recorded, HOPPER).stages[0].name == family.make(spec, choice).stages[0].name


def test_a_matmul_with_its_norm_inside_stays_one(rows: int = 8) -> None:
    """Another kernel would bring the norm's own back, which no time of the matmul shows."""
    space = families_for(HOPPER)["cuda.linear"].parts(linear(rows, norm_epsilon=1e-5))[0].space
    assert {choice["family"] for choice in space.all()} == {"gemm_rows"}
    plain = families_for(HOPPER)["cuda.linear"].parts(linear(rows))[0].space
    assert {"gemm_rows", "gemm_few"} <= {choice.get("family") for choice in plain.all()}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_choice_of_a_norm_makes_a_kernel(arch: str) -> None:
    spec = NormSpec(4096, 1e-6, "bfloat16", True)
    family = families_for(parse_target(f"cuda:{arch}"))["cuda.norm"]
    part, = family.parts(spec)
    names = {family.make(spec, choice).stages[0].name for choice in part.space.all()}
    assert len(names) == part.space.size() >= (20 if arch == "sm_90a" else 10)
    rule, = family.make(spec, {}).stages
    assert rule.name == CudaKernels(parse_target(f"cuda:{arch}")).norm(spec).stages[0].name and rule.name not in names
    assert ("tirx.use_programtic_dependent_launch" in str(rule.func.attrs)) == (arch == "sm_90a")
    assert any("in_turn" in name for name in names) == (arch == "sm_90a")
    assert any("_bl" in name for name in names)
    assert family.workload(spec) == family.workload(replace(spec, epsilon=1e-5))    # a record serves both


def test_symbolic_rows_and_older_cards_have_no_choice_yet() -> None:
    assert families_for(HOPPER)["cuda.linear"].parts(linear(None)) == ()
    assert families_for(parse_target("cuda:sm_80"))["cuda.linear"].parts(linear(8)) == ()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_attention_choice_makes_a_kernel(arch: str) -> None:
    target = parse_target(f"cuda:{arch}")
    for operation in ("decode_attention", "prefill_attention"):
        family = family_for(families_for(target), operation, ATTENTION)
        assert family is not None
        part, = family.parts(ATTENTION)
        choices = list(part.space.all())
        assert len(choices) >= 2
        for choice in (choices[0], choices[-1]):
            assert family.make(ATTENTION, choice).stages


@pytest.mark.slow
def test_choices_compile() -> None:
    """To machine code, by nvcc, for one choice of each kernel."""
    known = families_for(HOPPER)
    many = known["cuda.linear"].make(linear(512), {"family": "gemm_many", "tile_n": 64, "cluster": 2})
    few = known["cuda.linear"].make(linear(16), {"family": "gemm_few", "columns": 16, "consumers": 2, "split": 2, "share": 1,
                                                 "blocks_per_sm": 2})
    decode = known["cuda.decode_attention"].make(ATTENTION, {"warps": 8, "stages": 3, "key_tiles": 1, "blocks": 132})
    funcs = {f"kernel{i}": stage.func for i, stage in enumerate([*many.stages, *few.stages, *decode.stages])}
    assert cuda_harness.lower(funcs, "sm_90a") is not None


def test_a_record_of_few_rows_keeps_the_norm_inside() -> None:
    """A record has its parameters in the order of their names; the kernel's own name has not."""
    spec = linear(4)
    family = families_for(HOPPER)["cuda.linear"]
    part, = family.parts(spec)
    choice = next(one for one in part.space.all() if one["family"] == "gemm_rows" and one.get("ahead"))
    made = replace(record(bucket=4, target=SM_90, parameters=choice), workload=family.workload(spec))
    found = TuningRecord.from_json(json.loads(canonical(made.to_json())))
    kernels, _ = _built(found)
    assert list(found.choice["parameters"]) == sorted(choice) != list(choice)
    assert kernels.linear(spec).stages[0].name == family.make(spec, choice).stages[0].name
    folded = replace(spec, residual=True, prepares_norm=True)
    assert kernels.folds_norm(folded) and kernels.linear(folded).source.startswith("tuned:")


class One:
    def __init__(self, found: TuningRecord) -> None:
        self.found, self.used = found, list[str]()

    def find(self, workload: Workload, buckets: Sequence[int], kernel: str) -> TuningRecord | None:
        return self.found if self.found.bucket in buckets else None

    def use(self, record: TuningRecord, kernel: str) -> None:
        self.used.append(kernel)

    def reject(self, record: TuningRecord, kernel: str, reason: str) -> None:
        raise AssertionError(reason)


def _built(found: TuningRecord) -> tuple[CudaKernels, One]:
    known, records = families_for(HOPPER), One(found)
    tuned = TunedKernels(records, lambda operation, spec: family_for(known, operation, spec), {"decode": 64, "prefill": 512})
    return CudaKernels(HOPPER, tuned=tuned), records


def test_a_record_chooses_the_kernel_of_its_bucket_alone() -> None:
    found = record(bucket=16, target=SM_90, parameters={"family": "gemm_few", "columns": 16, "consumers": 2, "split": 4,
                                                        "share": 1, "blocks_per_sm": 1})
    kernels, records = _built(found)
    kernel = kernels.linear(linear(16))
    assert kernel.source == f"tuned:{found.id[:16]}" and "_sp4_" in kernel.stages[0].name
    assert kernels.linear(linear(32)).source == "rule:cuda.gemm_few" and records.used == ["linear_1024x1024"]


def test_a_record_that_makes_no_kernel_leaves_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    kernels, records = _built(record(bucket=8, target=SM_90, parameters={
        "family": "gemm_rows", "columns": 8, "warps": 8, "unroll": 0, "blocks_per_sm": 4}))
    monkeypatch.setattr(records, "reject", lambda found, kernel, reason: told.append(reason))
    assert kernels.linear(linear(8)).source.startswith("rule:") and "by zero" in told[0]


def test_a_record_of_a_library_makes_a_call_of_it() -> None:
    kernels, _ = _built(record(bucket=16, target=SM_90, choice={"kind": "library", "library": "cublaslt", "parameters": {}}))
    assert kernels.linear(linear(16)).source == "library:cublaslt"
