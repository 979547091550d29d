"""A whole bundle on the GPU through the public path: canaries of the build, captured against eager bit for bit, the plan
against the driver, one answer alone and in a crowd. RELAXPACK_GPU_BUNDLE names a bundle that was built elsewhere; without
it a small one is built here.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from relaxpack.cli import run
from relaxpack.dist.bundle import Bundle
from relaxpack.llm import LLM
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.load import load_runner
from relaxpack.runtime.step_plan import SequenceStep, StepPlan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if path := os.environ.get("RELAXPACK_GPU_BUNDLE"):
        return Path(path)
    import relaxpack.tvm_setup as setup

    if setup.runtime_only():
        pytest.skip("no compiler here and RELAXPACK_GPU_BUNDLE is not set")
    from relaxpack.compile import BuildOptions, build_bundle
    from relaxpack.target import local_gpu_arch
    from tests.helpers.tiny_checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("bundle")
    write_checkpoint(folder / "model", dtype="bfloat16", hidden_size=128, intermediate_size=256, head_dim=64)
    build_bundle(folder / "model", folder / "x.bundle", f"cuda:{local_gpu_arch()}",
                 BuildOptions(max_context=256, max_batch=8, prefill_chunk=64))
    return folder / "x.bundle"


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return LLM(bundle, device="cuda", num_pages=512)


def test_it_answers_as_its_build_said(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "canary.json" not in Bundle.open(bundle):
        pytest.skip("the bundle has no canaries")
    assert run(["verify", str(bundle), "--device", "cuda"]) == 0, capsys.readouterr().out


def test_every_graph_is_captured_and_the_plan_is_what_the_driver_says(llm: LLM) -> None:
    assert llm.loaded is not None
    took = llm.loaded.warm_up()
    assert took is not None and isinstance(llm.loaded.runner, CudaModelRunner)
    assert took.graphs == sum(map(len, llm.loaded.runner.buckets.values()))
    compared = llm.loaded.compare_plan()
    # The granules of a small model weigh more than 2 %; a large one is compared in benchmarks/gpu/visit.py.
    assert compared is not None and abs(compared.taken - compared.planned) < max(0.02 * compared.planned, 512 << 20)


def test_captured_equals_eager_bit_for_bit(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    captured, eager = (load_runner(opened, "cuda", 128, graphs=on) for on in (True, False))
    assert isinstance(captured, CudaModelRunner)
    for position, step in enumerate([SequenceStep([3, 1, 4], 0, [1, 2], [2]), *(
            SequenceStep([5 + i], 3 + i, [1, 2], [0]) for i in range(8))]):
        one, other = (runner.forward(StepPlan((step,))) for runner in (captured, eager))
        assert np.isfinite(one).all() and np.array_equal(one, other), position
    assert captured.graph_steps["decode"] == 8 and not captured.eager_steps["decode"]


def test_alone_and_in_a_crowd_of_one_size(llm: LLM) -> None:
    prompts = [[5 + i, 6, 7, 8] for i in range(4)]
    first, second = (llm.generate(prompts, max_tokens=12, temperature=0.0, ignore_eos=True) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert all(len(c.token_ids) == 12 for c in first)
