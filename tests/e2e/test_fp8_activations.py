"""`build --activations`: which targets round activations to fp8, what the checkpoint's own scheme decides, what is refused,
and where a bundle says it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relaxpack.cli import run
from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.compile.target_plan import plan_targets, target_specs
from relaxpack.dist.bundle import Bundle
from relaxpack.errors import UsageError
from relaxpack.relax_models.checkpoint import open_checkpoint
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.tiny_fp8 import write_fp8_checkpoint

HOPPER = "cuda:sm_90a"
SOURCE = "rule:cuda.quantize_rows+gemm_many_e4m3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints "channel" (declares dynamic fp8 activations), "static", "block" and "float"."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for scheme in ("channel", "static", "block"):
        write_fp8_checkpoint(folder / scheme, scheme, num_hidden_layers=1, vocab_size=64)
    write_checkpoint(folder / "float", num_hidden_layers=1, vocab_size=64)
    return folder


@pytest.mark.parametrize(("name", "weights", "rounding", "expected"), [
    ("channel", "as-is", "as-is", ["float", "fp8", "float"]),     # as its scheme says, where there are kernels
    ("channel", "as-is", "float", ["float"] * 3),
    ("channel", "q4", "as-is", ["float"] * 3),                    # no fp8 weight is left
    ("static", "as-is", "as-is", ["float"] * 3),
    ("static", "as-is", "fp8", ["float", "fp8", "float"]),
    ("block", "as-is", "as-is", ["float"] * 3),
    ("float", "fp8", "as-is", ["float"] * 3),                     # nobody has asked
    ("float", "fp8", "fp8", ["float", "fp8", "float"]),
])
def test_who_rounds_activations(folder: Path, name: str, weights: str, rounding: str, expected: list[str]) -> None:
    specs = target_specs(["cpu:x86-64-v3", HOPPER, "cuda:sm_80"])
    plans = plan_targets(specs, open_checkpoint(folder / name), weights, None, None, rounding)
    assert [plan.activations for plan in plans] == expected


@pytest.mark.parametrize(("name", "target", "words"), [
    ("channel", "cpu:x86-64-v3", "only cuda:sm_90a has kernels that multiply fp8 with fp8, and the build is for cpu:x86-64"),
    ("channel", "cuda:sm_89", "the build is for cuda:sm_89"),
    ("block", HOPPER, r"no weight has the format fp8 \(there are bf16, fp8_block\): give an fp8 checkpoint with a scale "),
    ("float", HOPPER, "--weights fp8"),
])
def test_refused(folder: Path, name: str, target: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_targets(target_specs(target), open_checkpoint(folder / name), "as-is", None, None, "fp8")


def test_unknown_choice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="activations 'int8': must be one of as-is, float, fp8"):
        build_bundle("smollm2", tmp_path / "b", "cpu", BuildOptions(activations="int8"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_bundle_says_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = BuildOptions(max_batch=1, prefill_chunk=128, max_context=256)
    built = build_bundle(folder / "channel", tmp_path / "b", HOPPER, options)
    (entry,) = Bundle.open(built.path).manifest.targets
    assert entry.activations == "fp8" and entry.to_json()["activations"] == "fp8"
    record = Bundle.open(built.path).read_json(entry.explain)
    sources = {kernel["name"]: kernel["source"] for kernel in record["kernels"]}
    assert {name.split("_")[0] for name, source in sources.items() if source == SOURCE} == {"quantize", "gemm"}
    assert "rule:cuda.gemm_rows_quant" in sources.values()      # a step of one row keeps float activations
    assert run(["inspect", str(built.path)]) == 0
    assert "bfloat16 (fp8)," in capsys.readouterr().out
    assert run(["explain", str(built.path), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["activations"] == "fp8"
    costs = {kernel["kernel"]: kernel for kernel in explained["prefill"]["kernels"] if sources[kernel["kernel"]] == SOURCE}
    assert costs and all((cost["flops"] > 0) == name.startswith("gemm") for name, cost in costs.items())
