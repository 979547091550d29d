"""The GPU's runner, executor and engine over stand-ins: host memory for the device's, plain loops for its kernels. What is
tested is everything but the kernels: buckets, padding, counting, capture at the start, the plan, and numbers that are not
finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import counts_width
from relaxpack.model_info import FP8
from relaxpack.passes.specialize_buckets import decode_buckets
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime import cuda_memory
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.kv_cache.storage import page_bytes
from relaxpack.runtime.sampler import NOT_FINITE
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import Library
from tests.helpers import graph_stand_ins
from tests.helpers.captured_model import CapturedModel, build, host_memory, runner

LIMITS = BuildLimits(64, max_batch=6, prefill_chunk=48, page_size=4)
BUCKETS = {"decode": (1, 2, 4), "prefill": (4, 8)}      # batches of 5 and 6 are above the top


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CapturedModel:
    return build(tmp_path_factory.mktemp("runner"), LIMITS, BUCKETS)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory(monkeypatch)


@pytest.fixture
def made(model: CapturedModel) -> tuple[CudaModelRunner, graph_stand_ins.GraphLog]:
    return runner(model)


def engine(model: CapturedModel, **options: object) -> Engine:
    made, _ = runner(model, **options)  # type: ignore[arg-type]
    return Engine(made, executor=CudaExecutor(made), end_token_ids=())


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(1, 60, 3 + i % 4).tolist() for i in range(count)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


# -- C35: batches that no bucket serves --------------------------------------------------------------------------------


def test_c35_nine_requests_where_buckets_end_at_four(model: CapturedModel) -> None:
    """Six at once run eagerly and are counted, nothing crashes, and every request gets what it gets alone."""
    crowd = engine(model)
    together = [o.choices[0].token_ids for o in crowd.generate(prompts(9), GREEDY)]
    alone_engine = engine(model)
    alone = [alone_engine.generate([p], GREEDY)[0].choices[0].token_ids for p in prompts(9)]
    assert together == alone
    counted: CudaModelRunner = crowd.runner  # type: ignore[assignment]
    assert counted.eager_steps["decode"] > 0 and counted.graph_steps["decode"] > 0
    assert alone_engine.runner.eager_steps["decode"] == 0  # type: ignore[attr-defined]
    assert crowd.metrics.eager_steps == sum(counted.eager_steps.values()) > 0
    assert crowd.metrics.graph_steps == sum(counted.graph_steps.values()) > 0


def test_c35_four_drafts_for_each_of_eight_make_forty_rows(model: CapturedModel) -> None:
    """Rows above the top: five tokens of each sequence with logits for all of them, in one step, as verifying drafts
    needs it. Equal to one token after the other, and counted."""
    limits = model.limits.max_batch
    tables = [[1 + 3 * i, 2 + 3 * i, 3 + 3 * i] for i in range(limits)]
    many, _ = runner(model)
    single, _ = runner(model)
    tokens = np.random.default_rng(5).integers(1, 60, (limits, 5)).tolist()
    plan = StepPlan(tuple(SequenceStep(t, 0, pages, range(5)) for t, pages in zip(tokens, tables, strict=True)))
    rows = many.forward(plan)
    assert rows.shape == (5 * limits, model.info.vocab_size)
    assert many.eager_steps["prefill"] == 1 and not many.graph_steps
    for i, (t, pages) in enumerate(zip(tokens, tables, strict=True)):
        for k in range(5):
            one = single.forward(StepPlan((SequenceStep([t[k]], k, pages, [0]),)))
            np.testing.assert_allclose(rows[5 * i + k], one[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [1, 3, 8, 9, 33, 65, 96, 100, 104, 129])
def test_c35_the_configured_maximum_is_always_a_bucket(most: int) -> None:
    assert decode_buckets(most)[-1] == most and len(set(decode_buckets(most))) == len(decode_buckets(most))


def test_c35_padding_changes_neither_live_pages_nor_sampling(model: CapturedModel) -> None:
    """Three sequences in a bucket of four, drawn with a temperature and a seed: the same tokens as without a bucket, and
    only their own slots and the scratch page are written."""
    rng = np.random.default_rng(2)
    steps = [SequenceStep([7 + i], 2, [3 + i], [0]) for i in range(3)]

    def fill(arrays: dict[str, np.ndarray]) -> None:
        for i in range(3):
            arrays["settings"][i, :3] = (0.9, 0.95, 0.0)
            arrays["counters"][i, :4] = (0, 11 + i, 5, 2)

    results = []
    for captured in (runner(model)[0], CudaModelRunner(runner(model)[0]._library, model.info, tvm.cpu(), {}, 40)):
        before = np.random.default_rng(2).standard_normal(captured._pages.numpy().shape).astype(np.float32)
        captured._pages.copyfrom(before)
        results.append(captured.forward_and_sample(StepPlan(tuple(steps)), fill).result())
        changed = np.unique(np.argwhere(captured._pages.numpy() != before)[:, [1, 4]], axis=0).tolist()
        assert {page for page, _ in changed} <= {0, 3, 4, 5}
        assert all(slot == 2 for page, slot in changed if page), "only the slot of the new token"
        assert sum(captured.graph_steps.values()) + sum(captured.eager_steps.values()) == 1
    assert results[0] == results[1]


# -- C39: numbers that are not finite ----------------------------------------------------------------------------------


def poisoned(model: CapturedModel, value: float) -> list[object]:
    """The embedding of token 9, and so every hidden state after it, overflows."""
    parameters = list(model.parameters)
    at = next(i for i, name in enumerate(model.names) if "embed_tokens" in name)
    table = parameters[at].numpy().copy()
    table[9] = value
    parameters[at] = tvm.runtime.tensor(table)
    return parameters


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_c39_a_request_whose_logits_are_not_finite_ends_with_an_error(model: CapturedModel, value: float,
                                                                      temperature: float) -> None:
    """Not with token 0. (The head is tied to the poisoned table, so every row of logits is bad.)"""
    parameters = poisoned(model, value)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=5)
    bad = engine(model, parameters=parameters).generate([[9, 3]], params)[0].choices[0]
    assert bad.error == NOT_FINITE and bad.token_ids == [] and bad.finish_reason is not None


def test_c39_in_the_middle_of_an_answer(model: CapturedModel) -> None:
    """KV pages of one sequence go bad between two steps; the other one is answered as before."""
    crowd = engine(model)
    clean = [o.choices[0].token_ids for o in engine(model).generate(prompts(2), GREEDY)]
    requests = [crowd.add(p, GREEDY) for p in prompts(2)]
    while not all(len(r.sequences[0].output_ids) >= 2 for r in requests):
        crowd.step()
    counted: CudaModelRunner = crowd.runner  # type: ignore[assignment]
    pages = counted._pages.numpy().copy()
    pages[:, requests[0].sequences[0].page_ids] = np.nan
    counted._pages.copyfrom(pages)
    while crowd.has_work:
        crowd.step()
    first, second = (r.sequences[0] for r in requests)
    assert first.error == NOT_FINITE and len(first.output_ids) < GREEDY.max_tokens  # type: ignore[operator]
    assert second.error is None and list(second.output_ids) == clean[1]
    assert 0 not in first.output_ids[2:]


# -- capture at the start ----------------------------------------------------------------------------------------------


def test_warming_up_captures_every_bucket_and_says_what_it_took(model: CapturedModel,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    made, log = runner(model)
    free = iter([1000, 400])
    monkeypatch.setattr(cuda_memory, "free_and_total", lambda: (next(free), 5000))
    seen: list[tuple[int, int]] = []
    took = made.warm_up(lambda done, total: seen.append((done, total)))
    assert log.count("capture") == took.graphs == 5 and took.bytes == 600 and took.seconds > 0
    assert seen == [(i, 5) for i in range(1, 6)]
    assert str(took).startswith("captured 5 graphs in ") and not made.graph_steps
    log.events.clear()
    made.forward(StepPlan((SequenceStep([3, 4, 5], 0, [1], [2]),)))
    made.forward(StepPlan((SequenceStep([6], 3, [1], [0]),)))
    assert [kind for kind, _ in log.events] == ["replay", "replay"]
    assert dict(made.graph_steps) == {"prefill": 1, "decode": 1}


def test_warming_up_changes_no_answer(model: CapturedModel) -> None:
    warm = engine(model)
    warm.runner.warm_up()  # type: ignore[attr-defined]
    cold = engine(model)
    for one, other in zip(warm.generate(prompts(4), GREEDY), cold.generate(prompts(4), GREEDY), strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_numbers() -> Iterator[dict[str, object]]:
    yield {"memory": {"arena_bytes": 5 << 20, "arena_storages": [3 << 20, 2 << 20], "eager_bytes": 7 << 20},
           "weight_sizes": [10 << 20, 3 << 20, 100], "free_before": (1 << 30) + (20 << 20)}


def test_the_plan_counts_what_the_driver_grants(model: CapturedModel, plan_numbers: dict[str, object]) -> None:
    made, _ = runner(model, **plan_numbers)
    plan = made.plan
    assert plan.weights == (10 + 4 + 2) << 20       # granules of 2 MiB; the small one has one with others
    assert plan.arena == (4 + 2) << 20 and plan.eager == 7 << 20
    assert plan.kv == 2 << 20 and 40 * page_bytes(model.info) < 1 << 20 and (plan.pages, plan.tokens) == (40, 39 * 4)
    assert plan.workspace == 2 << 20 and plan.device_total == 1 << 31
    assert plan.total == plan.at_start + plan.eager == plan.weights + plan.kv + plan.arena + plan.workspace + plan.eager
    text = str(plan)
    assert "weights 0.02, KV cache of 156 tokens 0.00, arena 0.01, workspace 0.00" in text and "of 2.15 GB" in text


@pytest.mark.parametrize("off, ok", [(0.0, True), (0.019, True), (0.021, False), (-0.021, False)])
def test_the_plan_against_the_driver(model: CapturedModel, plan_numbers: dict[str, object], monkeypatch: pytest.MonkeyPatch,
                                     off: float, ok: bool) -> None:
    made, _ = runner(model, **plan_numbers)
    before, planned = int(plan_numbers["free_before"]), made.plan.at_start  # type: ignore[call-overload]
    monkeypatch.setattr(cuda_memory, "free_and_total", lambda: (before - round(planned * (1 + off)), 1 << 31))
    found = made.compare_plan()
    assert found.ok is ok and abs(found.difference - off) < 1e-3
    assert ("please report" in str(found)) is not ok
    assert found.to_json()["planned"] == planned


def test_pages_get_what_weights_and_arena_leave(model: CapturedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 4 * LIMITS.max_batch * counts_width(model.info.vocab_size)
    host_memory(monkeypatch, free=20 * 2048 + 2 * 4096 + counts)
    made, _ = runner(model, num_pages=None, memory={"arena_bytes": 4096})  # type: ignore[arg-type]
    assert page_bytes(model.info) == 1024 and made.num_pages == int(20 * 2048 * 0.95) // 1024 == 38


def test_e4m3_pages_are_bytes_and_four_times_as_many_as_float32_ones(model: CapturedModel,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 4 * LIMITS.max_batch * counts_width(model.info.vocab_size)
    host_memory(monkeypatch, free=20 * 2048 + 2 * 4096 + counts)
    info = replace(model.info, kv_dtype=FP8)
    graph_stand_ins.install()
    made = CudaModelRunner(Library(model.path, tvm.cpu(), model.parameters, True), info, tvm.cpu(), model.buckets, None,
                           functions=model.functions, memory={"arena_bytes": 4096})
    wanted = LIMITS.max_batch * model.info.max_pages_per_sequence + 1
    assert page_bytes(info) == 256 and made.num_pages == min(int(20 * 2048 * 0.95) // 256, wanted)
    assert made.plan.pages == made.num_pages and made.read_pages([0, 1]).nbytes == 2 * 256
    pages = np.random.default_rng(0).integers(0, 256, made.read_pages([0, 1]).shape).astype(np.uint8)
    made.write_pages([3, 5], pages)
    np.testing.assert_array_equal(made.read_pages([5, 3]), pages[::-1])
