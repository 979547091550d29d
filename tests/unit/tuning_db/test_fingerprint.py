"""What this machine is, and how two fingerprints differ in words."""

from __future__ import annotations

import hashlib

import pytest

from relaxpack.dist import host
from relaxpack.errors import DamagedRecordError, EnvironmentProblem
from relaxpack.fingerprint import described, difference, other_compiler, target_fingerprint
from relaxpack.kernel_generations import GENERATIONS, for_workload
from relaxpack.kernel_spec import LinearSpec
from relaxpack.target import TargetSpec, parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import TARGET_FACTS, Workload, digest
from relaxpack.weight_format import FORMATS
from tests.helpers.tuning_records import COMPILER, CPU, SM_80, SM_90, record


def test_a_cpu_is_its_name_features_and_threads() -> None:
    found = target_fingerprint(TargetSpec("cpu", "znver5", ("fma", "avx2"), 2))
    assert found == CPU and digest(found) == digest(CPU)
    assert digest(target_fingerprint(TargetSpec("cpu", "znver5", ("avx2", "fma"), 3))) != digest(CPU)


def test_a_gpu_that_is_not_here_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = host.CudaDriver(None, problem="libcuda.so.1 is not installed")
    monkeypatch.setattr("relaxpack.fingerprint.cuda_driver", lambda: driver)
    target = TargetSpec("cuda", "sm_90a")
    with pytest.raises(EnvironmentProblem, match="no GPU 0: libcuda.so.1 is not installed"):
        target_fingerprint(target)
    unknown = target_fingerprint(target, must_be_here=False)
    assert set(TARGET_FACTS["cuda"]) < unknown.keys() and digest(unknown) != digest(SM_90)
    assert "sm_count unknown here, 132 there" in difference(unknown, SM_90)
    a100 = host.CudaDriver((12, 4), (host.Gpu("A100", (8, 0), 80 << 30),))
    monkeypatch.setattr("relaxpack.fingerprint.cuda_driver", lambda: a100)
    with pytest.raises(EnvironmentProblem, match=r"the GPU here is A100 \(sm_80\), not sm_90a"):
        target_fingerprint(target)


def test_differences_in_words() -> None:
    assert difference(CPU, CPU) == ""
    assert difference(CPU, {**CPU, "threads": 4}) == "threads 2 here, 4 there"
    assert difference({**CPU, "features": ()}, CPU) == "features none here, avx2 fma there"
    newer = {**CPU, "features": ("avx2", "avx512f", "fma")}
    assert difference(newer, CPU) == "features avx512f only here" and difference(CPU, newer) == "features avx512f only there"
    assert difference({**CPU, "features": ("avx2", "f16c")}, CPU) == "features f16c only here, fma only there"
    older = {name: COMPILER[name] for name in ("apache-tvm", "kernels")}
    assert difference(COMPILER, older) == "llvm 22 here, nothing there"
    assert "arch sm_80 here, sm_90a there" in difference(SM_80, SM_90)


def test_names_for_people() -> None:
    assert described(CPU) == "cpu:znver5, 2 threads" and described(SM_90) == "cuda:sm_90a, H200, 132 SMs"
    assert other_compiler(record()) == ""
    assert other_compiler(record(compiler={**COMPILER, "kernels": 7})) == "kernels 1 here, 7 there"


def test_every_family_of_kernels_has_a_generation_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of one family change: its records count no more, those of others do."""
    cpu = TargetSpec("cpu", "znver5", ("avx2", "f16c", "fma"), 2)
    known = {*families_for(parse_target("cuda:sm_90a")), *families_for(cpu)}
    assert known | {"cuda.linear_quantized", "cuda.linear_quantized_few"} == set(GENERATIONS)
    norm, linear = (Workload.kernel(family, {"n": 1}) for family in ("cpu.norm", "cpu.linear_float"))
    made = [record(workload=work, compiler=for_workload(COMPILER, work)) for work in (norm, linear)]
    monkeypatch.setitem(GENERATIONS, "cpu.norm", 5)
    assert [other_compiler(one) for one in made] == ["kernels 5 here, 1 there", ""]
    assert for_workload(COMPILER, norm) == {**COMPILER, "kernels": 5} and for_workload(COMPILER, linear) == COMPILER
    assert for_workload(COMPILER, Workload.kernel("something", {})) == COMPILER


def test_matmuls_of_quantised_weights_on_a_gpu_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    family = families_for(parse_target("cuda:sm_90a"))["cuda.linear"]

    def work_of(weight: str, rows: int | None) -> Workload:
        return family.workload(LinearSpec(64, 64, FORMATS[weight], "decode", "bfloat16", "bfloat16", max_rows=rows))

    monkeypatch.setitem(GENERATIONS, "cuda.linear_quantized", 7)
    monkeypatch.setitem(GENERATIONS, "cuda.linear_quantized_few", 8)
    for rows, number in ((1, 7), (8, 7), (9, 8), (192, 8), (193, 7), (None, 7)):
        assert for_workload(COMPILER, work_of("q4_1", rows)) == {**COMPILER, "kernels": number}
    strange = Workload.kernel("cuda.linear", {"weight": "q4_1"})        # no matmul of ours
    for work in (work_of("bf16", 1), work_of("bf16", 16), strange):
        assert for_workload(COMPILER, work) == {**COMPILER, "kernels": GENERATIONS["cuda.linear"]}


@pytest.mark.parametrize("spec", ["[]", '{"weight": 4}', '{"weight": {"bits": 1e999}}',
                                  '{"weight": {"bits": 4}, "max_rows": [9]}', '{"weight": {"bits": 4}, "max_rows": 1e999}'])
def test_a_matmul_that_nobody_can_have_measured_is_one_of_all(spec: str) -> None:
    text = f'{{"family": "cuda.linear", "spec": {spec}}}'
    workload = Workload("kernel", "x", hashlib.sha256(text.encode()).hexdigest(), text)
    assert for_workload(COMPILER, workload) == {**COMPILER, "kernels": GENERATIONS["cuda.linear"]}


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "no JSON", '{"family": ["cpu.norm"]}'])
def test_a_strange_workload_is_of_no_family_that_has_a_generation(text: str) -> None:
    """Whoever may push records would else make every listing fail."""
    workload = Workload("kernel", "x", hashlib.sha256(text.encode()).hexdigest(), text)
    assert for_workload({"kernels": 7}, workload) == {"kernels": 7}
    with pytest.raises(DamagedRecordError, match="does not describe a kernel"):
        family_and_spec(workload)
