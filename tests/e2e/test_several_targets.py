"""One bundle for a CPU and two GPU architectures, built on a machine without a GPU: the CPU half runs, the GPU halves are
machine code over one set of weights, and every command knows which target it speaks of.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import tvm
from relaxpack.cli import run
from relaxpack.compile import BuildOptions, BuildReport, build_bundle
from relaxpack.compile.target_plan import plan_targets, target_specs
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.host import Gpu, Host
from relaxpack.errors import UsageError
from relaxpack.llm import LLM
from relaxpack.runtime import library_facts
from relaxpack.schedules.cuda_compile import check_library, prepare_cuda_compiler
from tests.helpers.tiny_checkpoints import write_checkpoint

OPTIONS = BuildOptions(max_context=32, max_batch=1, prefill_chunk=8)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    folder = tmp_path_factory.mktemp("several")
    write_checkpoint(folder / "model", dtype="bfloat16", num_hidden_layers=1)
    return build_bundle(folder / "model", folder / "x.bundle", ["cpu", "cuda:sm_80", "cuda:sm_90a"], OPTIONS)


def test_each_target_has_its_own_dtypes_and_code(built: BuildReport) -> None:
    bundle = Bundle.open(built.path, verify="full")
    cpu, old, new = bundle.manifest.targets
    assert (cpu.activation_dtype, cpu.kv_dtype) == ("float32", "float16")
    assert (old.activation_dtype, old.kv_dtype) == (new.activation_dtype, new.kv_dtype) == ("bfloat16", "bfloat16")
    assert not cpu.buckets and new.buckets["decode"] == (1,)
    assert len({cpu.library, old.library, new.library}) == 3
    for entry in (old, new):
        check_library(bundle.path(entry.library))     # raises where the code is CUDA source
    assert all(b"sm_90a" not in bundle.read(entry.library) for entry in (cpu, old))
    assert b"sm_90a" in bundle.read(new.library)


def test_what_the_gpu_libraries_take_is_what_the_manifest_says(built: BuildReport) -> None:
    bundle = Bundle.open(built.path)
    prepare_cuda_compiler()     # or TVM loads no module with machine code of a GPU
    for entry in bundle.manifest.targets[1:]:
        info = bundle.manifest.info_for(entry)
        facts = str(tvm.runtime.load_module(str(bundle.path(entry.library)))["stats"]())
        assert {"decode", "prefill", "sample", "top_logprobs"} <= set(library_facts.declared(facts))
        library_facts.check_library(facts, entry, info, "this one")
        with pytest.raises(library_facts.LibraryDiffers, match="kv_dtype float16, and .* compiled for bfloat16"):
            library_facts.check_library(facts, entry, replace(info, kv_dtype="float16"), "this one")


def test_the_gpu_targets_share_all_weights_and_the_cpu_shares_the_norms(built: BuildReport) -> None:
    bundle = Bundle.open(built.path)
    cpu, old, new = bundle.manifest.targets
    assert not bundle.param_members(new.params), "nothing is stored for the second GPU"
    taken = {name for names in new.shared_params.values() for name in names}
    assert taken == set(new.param_order)
    assert any("layernorm" in name for name in old.shared_params[cpu.params])
    reports = {target.name: target for target in built.targets}
    assert reports["cuda:sm_90a"].own_params_bytes == 0 < reports["cuda:sm_80"].own_params_bytes
    assert built.manifest.weights.bytes == built.params_bytes < sum(t.params_bytes for t in built.targets)


def test_the_cpu_half_runs(built: BuildReport, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(built.path, device="cpu")
    assert llm.info is not None and llm.info.kv_dtype == "float16"
    assert len(llm.generate([5, 6, 7], max_tokens=4, temperature=0.0, ignore_eos=True).token_ids) == 4
    assert run(["verify", str(built.path), "--device", "cpu"]) == 0
    assert "greedy tokens equal" in capsys.readouterr().out


def test_a_machine_with_a_gpu_takes_the_gpu_target(built: BuildReport) -> None:
    bundle = Bundle.open(built.path)
    features = bundle.manifest.targets[0].target.features
    for capability, name in (((9, 0), "cuda:sm_90a"), ((8, 6), "cuda:sm_80"), ((12, 0), bundle.target("cpu").target.name)):
        host = Host("x86_64", features, (Gpu("some GPU", capability, 1 << 36),))
        assert bundle.select_target(host).target.name == name


def test_commands_know_the_target(built: BuildReport, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(built.path)
    steps = {}
    for target in ("cpu", "cuda:sm_80", "cuda:sm_90a"):
        assert run(["explain", path, "--target", target, "--json", "--bandwidth", "20", "--peak", "1"]) == 0
        steps[target] = json.loads(capsys.readouterr().out)
        assert steps[target]["target"].startswith(target)
    assert steps["cpu"]["step"]["function"] == "decode" and steps["cuda:sm_90a"]["step"]["function"] == "decode_1"
    assert run(["explain", path, "--target", "cuda"]) == 2
    assert "it holds cpu:" in capsys.readouterr().err
    assert run(["inspect", path, "--json"]) == 0
    assert [t["activation_dtype"] for t in json.loads(capsys.readouterr().out)["targets"]] == ["float32", *["bfloat16"] * 2]
    assert run(["diff", path, path]) == 0


def test_dtypes_hold_for_the_targets_that_can_have_them(built: BuildReport) -> None:
    from relaxpack.relax_models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(built.path.parent / "model")
    specs = target_specs(["cpu:x86-64-v3", "cuda:sm_90a"])

    def dtypes(activation: str | None, kv: str | None, weights: str = "as-is") -> list[tuple[str, str]]:
        return [(plan.activation_dtype, plan.kv_dtype) for plan in plan_targets(specs, checkpoint, weights, activation, kv)]

    assert dtypes(None, None) == [("float32", "float16"), ("bfloat16", "bfloat16")]
    assert dtypes("float16", None, "f32") == [("float32", "float32"), ("float16", "float16")]
    assert dtypes(None, "float32") == [("float32", "float32"), ("bfloat16", "bfloat16")]
    assert dtypes(None, "fp8") == [("float32", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")]
    specs = target_specs("cuda:sm_90a")
    with pytest.raises(UsageError, match="GPU kernels compute in bfloat16 or float16"):
        dtypes("float32", None)
    with pytest.raises(UsageError, match="KV cache of a GPU has the activations' dtype"):
        dtypes(None, "float16")


@pytest.mark.parametrize("targets, words", [((), "no target"), (("cpu:x86-64-v3", "cpu:x86-64-v3"), "given twice")])
def test_lists_of_targets_that_make_no_sense(targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        target_specs(targets)
