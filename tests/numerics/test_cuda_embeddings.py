"""Embeddings and pages on disk through the GPU's runner, over stand-ins for device memory, graphs and kernels: the same
numbers as the CPU's runner on the same library, and pages that survive the trip to the host and back.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.model_runner import CpuModelRunner
from relaxpack.runtime.pooling import EmbeddingParams
from relaxpack.runtime.prefix_store import load_prefixes, save_prefixes
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.vm import Library
from tests.helpers.captured_model import CapturedModel, build, host_memory, runner

LIMITS = BuildLimits(64, max_batch=4, prefill_chunk=24, page_size=4)
BUCKETS = {"decode": (1, 2, 4), "prefill": (4, 8)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CapturedModel:
    return build(tmp_path_factory.mktemp("embeddings"), LIMITS, BUCKETS, embed=True)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory(monkeypatch)


def gpu_engine(model: CapturedModel) -> Engine:
    made, _ = runner(model, num_pages=60)
    return Engine(made, executor=CudaExecutor(made), end_token_ids=())


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(1, 60, n).tolist() for n in lengths]


def embed(engine: Engine, given: list[list[int]], **params: object) -> np.ndarray:
    requests = [engine.admit(engine.prepare_embedding(p, EmbeddingParams(**params))) for p in given]  # type: ignore[arg-type]
    while engine.has_work:
        engine.step()
    return np.array([r.embedding for r in requests])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_equal_to_the_cpu_runner(model: CapturedModel, pooling: str) -> None:
    """One prompt longer than a chunk, several in a step, one token alone."""
    engine = gpu_engine(model)
    assert isinstance(engine.runner, CudaModelRunner) and engine.runner.eager_steps["embed"] == 0
    library = Library(model.path, tvm.cpu(), model.parameters)
    cpu = Engine(CpuModelRunner(library, model.info, 60, model.functions))
    given = prompts(1, 2, 5, 24, 25, 60)
    got, expected = embed(engine, given, pooling=pooling), embed(cpu, given, pooling=pooling)
    assert expected.shape == (6, model.info.hidden_size) and expected.std() > 0.05
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert engine.runner.eager_steps["embed"] > 0


def test_chats_beside_them_are_those_of_each_alone(model: CapturedModel) -> None:
    """Decodes run ahead and are sampled on the device; in a step with an embedding the host samples."""
    given = prompts(7, 9, 12)
    alone = [o.choices[0].token_ids for o in gpu_engine(model).generate(given, GREEDY)]
    engine = gpu_engine(model)
    chats = [engine.add(p, GREEDY) for p in given]
    for _ in range(3):
        engine.step()
    texts = [engine.admit(engine.prepare_embedding(p)) for p in prompts(40, 3)]
    while engine.has_work:
        engine.step()
    assert [r.sequences[0].output_ids for r in chats] == alone
    np.testing.assert_allclose([r.embedding for r in texts], embed(gpu_engine(model), prompts(40, 3)), atol=1e-5)


def test_pages_go_to_the_host_and_come_back(model: CapturedModel) -> None:
    made, _ = runner(model, num_pages=40)
    ids = [3, 1, 39, 17, *range(18, 36)]        # more than travel at once
    rng = np.random.default_rng(0)
    values = rng.standard_normal(made.read_pages(ids).shape).astype(np.float32)
    before = made._pages.numpy().copy()
    made.write_pages(ids, values)
    after = made._pages.numpy()
    np.testing.assert_array_equal(made.read_pages(ids), values)
    np.testing.assert_array_equal(after[:, ids].swapaxes(0, 1), values)
    others = [page for page in range(40) if page not in ids]
    np.testing.assert_array_equal(after[:, others], before[:, others])


def test_a_restarted_gpu_engine_starts_with_its_prefixes(model: CapturedModel, tmp_path: Path) -> None:
    engine = gpu_engine(model)
    given = prompts(30)
    [first] = engine.generate(given, GREEDY)
    assert save_prefixes(engine, tmp_path, "key").pages > 6
    again = gpu_engine(model)
    assert load_prefixes(again, tmp_path, "key").pages > 6
    [second] = again.generate(given, GREEDY)
    assert second.cached_tokens >= 28 and second.choices[0].token_ids == first.choices[0].token_ids
