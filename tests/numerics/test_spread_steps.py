"""Decode steps that read leading pages of several sequences once, through the GPU's runner and engine over stand-ins: the
same logits and tokens as without, chosen by the runner from the page tables."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime import spread
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.spread import Spread
from relaxpack.runtime.step_plan import SequenceStep
from relaxpack.spread_costs import SpreadCosts
from tests.helpers.captured_model import CapturedModel, build, host_memory, runner

LIMITS = BuildLimits(64, max_batch=6, prefill_chunk=48, page_size=4)
BUCKETS = {"decode": (1, 2, 4, 6), "decode_spread": (4,), "prefill": (8,)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CapturedModel:
    return build(tmp_path_factory.mktemp("spread"), LIMITS, BUCKETS)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny contexts count: keys are shared in steps of 8."""
    host_memory(monkeypatch)
    monkeypatch.setattr(spread, "SHARED_KEYS", 8)


def filled(model: CapturedModel) -> CudaModelRunner:
    made, _ = runner(model)
    made._pages.copyfrom(np.random.default_rng(2).standard_normal(made._pages.numpy().shape).astype(np.float32))
    return made


def test_rows_read_the_shared_keys_of_one_of_them(model: CapturedModel) -> None:
    """Three rows in a bucket of four, two of which share 8 keys; the page table of the first does not even have them."""
    tables = [[3, 4, 5, 6], [3, 4, 7, 8], [9, 10, 11]]
    starts = (13, 9, 10)

    def logits(tables: list[list[int]], shared: Spread | None) -> np.ndarray:
        made = filled(model)
        steps = [SequenceStep([7 + i], start, table, [0])
                 for i, (start, table) in enumerate(zip(starts, tables, strict=True))]
        result = made.decode(steps, spread=shared)[0].numpy()[:3].copy()
        assert dict(made.graph_steps) == {"decode_spread" if shared else "decode": 1}
        return result

    plain = logits(tables, None)
    np.testing.assert_allclose(logits(tables, Spread(8, [0, 1])), plain, rtol=1e-6, atol=1e-6)
    # the window of layer 1 reads the row's own table, so its keys there are left alone
    without = [[0, 0, 5, 6], *tables[1:]]
    np.testing.assert_allclose(logits(without, Spread(8, [0, 1])), plain, rtol=1e-6, atol=1e-6)
    assert np.abs(logits(without, Spread()) - plain)[0].max() > 1e-3
    np.testing.assert_allclose(logits(tables, Spread()), plain, rtol=1e-6, atol=1e-6)


def engine(model: CapturedModel, costs: SpreadCosts) -> Engine:
    made, _ = runner(model, spread={"4": asdict(costs)})
    return Engine(made, executor=CudaExecutor(made), end_token_ids=())


GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SHARING = SpreadCosts(longest_us=0, key_us=1, again_us=1, shared_us=0, more_us=0)
NEVER = replace(SHARING, more_us=1e9)
RAGGED = SpreadCosts(longest_us=3, key_us=1, again_us=1, shared_us=1, more_us=0)


def test_the_engine_shares_a_prefix_and_says_the_same(model: CapturedModel) -> None:
    """Four requests with 24 tokens in common, the first one ahead so that its pages are cached."""
    rng = np.random.default_rng(3)
    common = rng.integers(1, 60, 24).tolist()
    prompts = [[*common, *rng.integers(1, 60, 2 + i).tolist()] for i in range(4)]

    def tokens(served: Engine) -> list[list[int]]:
        served.generate(prompts[:1], GREEDY)
        return [list(o.choices[0].token_ids) for o in served.generate(prompts, GREEDY)]

    sharing = engine(model, SHARING)
    found = tokens(sharing)
    assert sharing.metrics.cached_tokens >= 3 * 24 and sharing.metrics.spread_steps > 0
    assert sharing.metrics.spread_steps == sharing.runner.graph_steps["decode_spread"]  # type: ignore[attr-defined]
    apart = engine(model, NEVER)
    assert tokens(apart) == found and apart.metrics.spread_steps == 0


def test_batches_above_the_largest_spread_bucket_and_different_prompts_go_the_usual_way(model: CapturedModel) -> None:
    rng = np.random.default_rng(5)
    common = rng.integers(1, 60, 16).tolist()
    many = engine(model, SHARING)
    many.generate([[*common, 5]], GREEDY)
    many.generate([[*common, i] for i in range(6, 12)], GREEDY)
    assert many.metrics.spread_steps == 0 and many.runner.graph_steps["decode"] > 0  # type: ignore[attr-defined]
    different = engine(model, SHARING)
    different.generate([rng.integers(1, 60, 20).tolist() for _ in range(4)], GREEDY)
    assert different.metrics.spread_steps == 0


def test_lengths_far_apart_take_the_second_graph_too(model: CapturedModel) -> None:
    """One prompt of 40 tokens and two of 3: the long one is more than a third of all keys."""
    prompts = [[1 + i % 7 for i in range(40)], [9, 10, 11], [12, 13, 14]]
    ragged, plain = engine(model, RAGGED), engine(model, NEVER)
    found, expected = ([o.choices[0].token_ids for o in served.generate(prompts, GREEDY)] for served in (ragged, plain))
    assert found == expected and ragged.metrics.spread_steps > 0 == plain.metrics.spread_steps
    even = engine(model, RAGGED)
    even.generate([[i, i + 1, i + 2] for i in range(1, 5)], GREEDY)
    assert even.metrics.spread_steps == 0


def test_both_graphs_of_a_bucket_are_captured_at_the_start(model: CapturedModel) -> None:
    made, log = runner(model)
    took = made.warm_up()
    assert took.graphs == 6 and log.count("capture") == 6 and not made.graph_steps
    log.events.clear()
    made.decode([SequenceStep([1], 9, [1, 2, 3], [0])] * 4, spread=Spread(8, [0, 1]))
    assert [kind for kind, _ in log.events] == ["replay"]
