"""A KV cache of e4m3 numbers through everything: build, manifest, budget, engine, prefix cache, restarts, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.errors import CompileError
from relaxpack.llm import LLM
from relaxpack.model_info import FP8
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.kv_cache.storage import choose_num_pages, page_bytes
from relaxpack.runtime.load import LoadedModel, load_model
from relaxpack.runtime.prefix_store import load_prefixes, save_prefixes
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.tiny_checkpoints import write_checkpoint

OPTIONS = BuildOptions(max_context=256, max_batch=4, prefill_chunk=64, kv_dtype="fp8")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with its own weights."""
    from relaxpack.errors import CheckpointError
    from relaxpack.relax_models.checkpoint import packaged_file

    try:
        packaged_file("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("fp8") / "smollm2.bundle"
    build_bundle("smollm2", path, options=OPTIONS)
    return path


@pytest.fixture(scope="module")
def model(bundle: Path) -> LoadedModel:
    return load_model(bundle)


TEXTS = ("The capital of France is", "The chemical symbol of water is", "def fibonacci(n):\n    ",
         "The Eiffel Tower is in the city of")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def prompts(bundle: Path) -> list[list[int]]:
    llm = LLM(bundle)
    return [list(llm.encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def alone(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, one prompt at a time, nothing cached."""
    return [list(Engine(model.runner, prefix_caching=False).generate([prompt], GREEDY)[0].choices[0].token_ids)
            for prompt in prompts]


def test_the_text_makes_sense(bundle: Path) -> None:
    answers = [output.text for output in LLM(bundle).generate(list(TEXTS), GREEDY)]
    assert "Paris" in answers[0] and "H2O" in answers[1] and "return 1" in answers[2] and "Paris" in answers[3]


def test_a_batch_says_what_each_says_alone(model: LoadedModel, prompts: list[list[int]], alone: list[list[int]]) -> None:
    outputs = Engine(model.runner).generate(prompts, GREEDY)
    assert [list(output.choices[0].token_ids) for output in outputs] == alone


@pytest.mark.parametrize("token_budget", [2, 16])
def test_a_cached_prefix_and_chunks_change_nothing(model: LoadedModel, prompts: list[list[int]],
                                                   token_budget: int) -> None:
    """Also keys of the very step are read as the pages hold them, so it does not matter which step stored them."""
    long = [[*itertools.chain(*prompts), *prompt] for prompt in prompts[:2]]
    engine = Engine(model.runner, prefix_caching=False)
    cold = [engine.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in long]
    engine = Engine(model.runner, token_budget=token_budget)
    for _ in range(2):
        outputs = [engine.generate([prompt], GREEDY)[0] for prompt in long]
        assert [output.choices[0].token_ids for output in outputs] == cold
    assert all(output.cached_tokens >= len(prompt) - 2 for output, prompt in zip(outputs, long, strict=True))


def test_pages_survive_a_restart(bundle: Path, model: LoadedModel, prompts: list[list[int]], alone: list[list[int]],
                                 tmp_path: Path) -> None:
    engine = Engine(model.runner)
    engine.generate(prompts, GREEDY)
    assert save_prefixes(engine, tmp_path, "smollm2").pages >= len(prompts)
    fresh = Engine(load_model(bundle).runner)
    assert load_prefixes(fresh, tmp_path, "smollm2").pages >= len(prompts)
    outputs = fresh.generate(prompts, GREEDY)
    assert [list(output.choices[0].token_ids) for output in outputs] == alone
    assert all(output.cached_tokens > 0 for output in outputs)


def test_the_manifest_and_the_budget_know_it(model: LoadedModel) -> None:
    info = model.info
    (entry,) = model.bundle.manifest.targets
    assert model.bundle.manifest.format_version == 3         # what is older would take the pages for something else
    assert info.kv_dtype == model.bundle.manifest.info_for(entry).kv_dtype == FP8
    half, full = page_bytes(info), page_bytes(replace(info, kv_dtype="float16"))
    assert 2 * half == full == 2 * 2 * info.num_layers * info.num_kv_heads * info.page_size * info.head_dim
    free = 2 * 60 * full        # half of the memory is for pages
    assert choose_num_pages(info, free) == min(2 * choose_num_pages(replace(info, kv_dtype="float16"), free),
                                               info.max_batch * info.max_pages_per_sequence + 1)
    pages = model.runner.read_pages([1, 2])
    assert pages.dtype == np.uint8 and pages.nbytes == 2 * half


def test_keys_that_e4m3_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**weights, name: weights[name] * 3e4}, folder / "model.safetensors")
    options = replace(OPTIONS, max_context=64, max_batch=1, prefill_chunk=32)
    with pytest.raises(CompileError, match="keys of layer 1 do not fit into fp8"):
        build_bundle(folder, tmp_path / "x.bundle", options=options)
    assert not (tmp_path / "x.bundle").exists()
