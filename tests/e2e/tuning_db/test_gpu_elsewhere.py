"""Building for a GPU that is not here, with records measured on it: `--gpu` names it, and its kernels are those of the
records; another name, or none, uses none of them and says why. (The passes run as for a build; no code is generated.)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaxpack.cli import run
from relaxpack.compile import BuildOptions
from relaxpack.compile.kernels import kernel_provider, records_for
from relaxpack.dist.tuning.store import open_store
from relaxpack.fingerprint import compiler_fingerprint
from relaxpack.kernel_generations import for_workload
from relaxpack.relax_models.export import BuildLimits
from relaxpack.target import parse_target
from relaxpack.tuning.named_gpu import facts_of_gpu
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning.tasks import Step, extract_tasks
from relaxpack.tuning_record import Facts, TuningRecord
from tests.helpers.cuda_harness import can_generate
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.tuning_records import SM_90, record

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_generate(), reason="no CUDA code generator")]
TARGET = parse_target("cuda:sm_90a")
H200: Facts = {**SM_90, "name": "NVIDIA H200"}
LIMITS = BuildLimits(64, max_batch=1, prefill_chunk=16, page_size=8)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[TuningRecord]]:
    """A database of the H200 and its records: for every task of a model, the last choice of its space that calls no
    library."""
    folder = tmp_path_factory.mktemp("elsewhere")
    write_checkpoint(folder / "model", dtype="bfloat16", num_hidden_layers=1)
    options = BuildOptions(max_context=64, max_batch=1, prefill_chunk=16, page_size=8)
    tasks = extract_tasks(folder / "model", TARGET, options, [Step("decode", 1), Step("prefill", 16)])
    compiler, made, seen = compiler_fingerprint("cuda"), [], set()
    for task in sorted(tasks, key=lambda task: task.bucket or 0):
        assert task.part is not None, task.name
        choices = [choice for choice in task.part.space.all() if "library" not in choice]
        key = task.workload.hash
        assert task.bucket in (1, 16), task.name
        if choices and key not in seen:       # a norm of decode is that of prefill, and decode's record serves it
            seen.add(key)
            facts = for_workload(compiler, task.workload)
            made.append(replace(record(target=H200, compiler=facts, bucket=task.bucket, parameters=choices[-1]),
                                workload=task.workload))
    assert {"cuda.linear", "cuda.norm", "cuda.decode_attention"} <= {family_and_spec(one.workload)[0] for one in made}
    with open_store(str(folder / "h200.sqlite")) as store:
        store.add_all(made)
    return str(folder / "h200.sqlite"), made


def _answers(database: str, made: list[TuningRecord], machine: Facts | None) -> tuple[list[Any], dict[str, Any]]:
    """The kernels that a build gets for the work of the records, and what it says of them."""
    with records_for([database], TARGET, machine) as lookup:
        assert lookup is not None
        provider = kernel_provider(TARGET, lookup, LIMITS)
        found = []
        for one in made:
            family, spec = family_and_spec(one.workload)
            found.append(getattr(provider, family.partition(".")[2])(spec))
        return found, lookup.report()


def test_the_records_of_the_named_gpu_are_used(tuned: tuple[str, list[TuningRecord]]) -> None:
    import tvm

    database, made = tuned
    machine = facts_of_gpu("H200", [TARGET], [database])["cuda:sm_90a"]
    assert machine == H200
    kernels, told = _answers(database, made, machine)
    assert [kernel.source for kernel in kernels] == [f"tuned:{one.id[:16]}" for one in made]
    assert set(told["used"]) == {one.id for one in made} and told["rejected"] == []
    again, told_again = _answers(database, made, machine)
    assert told_again == told
    for one, other in zip(kernels, again, strict=True):
        assert [stage.name for stage in one.stages] == [stage.name for stage in other.stages]
        for first, second in zip(one.stages, other.stages, strict=True):
            tvm.ir.assert_structural_equal(first.func, second.func)


def test_without_a_name_none_are_used_and_each_says_how(tuned: tuple[str, list[TuningRecord]]) -> None:
    database, made = tuned
    kernels, told = _answers(database, made, None)
    assert {kernel.source.partition(":")[0] for kernel in kernels} == {"rule"} and told["used"] == {}
    assert {one["record"] for one in told["rejected"]} == {one.id for one in made}
    # Where there is a GPU, its own facts are compared.
    assert all('--gpu "NVIDIA H200" says it is meant' in one["reason"] or "another target" in one["reason"]
               for one in told["rejected"])


def test_a_name_nobody_measured_ends_the_build_at_once(tuned: tuple[str, list[TuningRecord]], tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    database, _ = tuned
    code = run(["build", str(tmp_path), "-o", str(tmp_path / "x.bundle"), "--target", "cuda:sm_90a", "--db", database,
                "--gpu", "B200"])
    said = capsys.readouterr().err
    assert code == 2 and not (tmp_path / "x.bundle").exists()
    assert "no records of such a GPU for sm_90a" in said and "NVIDIA H200, 132 SMs, 140 GiB" in said
