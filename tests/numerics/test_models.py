"""Random-weight models of every family and RoPE form, through the real path: checkpoint folder, build, load, step plans.

Every position's logits are compared with the NumPy reference and with transformers, past position 2000; the last ones
are decoded one by one. One build serves a family and a RoPE form together, since they meet nowhere in the code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.runtime.load import LoadedModel, load_model
from tests.helpers.numerics import decode_logits, prefill_logits, tapes
from tests.helpers.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.helpers.transformers_reference import transformers_logits
from tests.reference.numpy_decoder import forward

LENGTH = 2100
DECODED = 6
# float32 sums in another order; at position 2100 one float32 rounding of the angle is 1e-4 rad.
TOLERANCE = 2e-3
HALF = 8  # of head_dim 16
LONGROPE = {"type": "longrope", "short_factor": [1.0 + 0.05 * i for i in range(HALF)],
            "long_factor": [1.0 + 0.5 * i for i in range(HALF)], "original_max_position_embeddings": 1024}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases, llama3": ("llama_bias", {"rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024}}),
    # head_dim is not hidden / heads; theta stands in rope_parameters only, as transformers 5 writes it.
    "llama, head_dim 32 of hidden 96, rope_parameters, tied": ("head_dim", {
        "tie_word_embeddings": True, "rope_theta": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama, every head has keys, dynamic": ("llama", {
        "num_key_value_heads": None, "max_position_embeddings": 512, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "llama, one key head, longrope": ("llama", {"num_key_value_heads": 1, "rope_scaling": LONGROPE}),
    "mistral, window, linear": ("mistral", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "qwen2, bias, window from layer 1, yarn": ("qwen2", {"use_sliding_window": True, "rope_theta": 1e6, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}),
    "gemma, one key head, no word of the tied head": ("gemma", {"tie_word_embeddings": ..., "hidden_act": "gelu"}),
    "qwen3, head norms, window by layer type, tied": ("qwen3", {
        "use_sliding_window": True, "sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}),
}


@dataclass
class Built:
    folder: Path
    model: LoadedModel
    ids: list[int]
    logits: np.ndarray  # [LENGTH, vocab] by the built model


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    family, changes = MODELS[request.param]
    path = tmp_path_factory.mktemp("model")
    folder = write_checkpoint(path / "checkpoint", family, seed=3, **{"max_position_embeddings": 4096, **changes})
    build_bundle(folder, path / "bundle", options=BuildOptions(weights="f32", max_context=LENGTH, max_batch=2))
    model = load_model(path / "bundle")
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, LENGTH).tolist()
    (tape,) = tapes(model.runner, [ids])
    logits = np.concatenate([prefill_logits(tape, LENGTH - DECODED), decode_logits(tape, LENGTH)])
    return Built(folder, model, ids, logits)


def test_logits_equal_the_numpy_reference(built: Built) -> None:
    expected = forward(open_checkpoint(built.folder), built.ids, LENGTH)
    assert expected.std() > 0.5
    np.testing.assert_allclose(built.logits, expected, rtol=0, atol=TOLERANCE)


def test_logits_equal_transformers(built: Built) -> None:
    np.testing.assert_allclose(built.logits, transformers_logits(built.folder, built.ids), rtol=0, atol=TOLERANCE)


def test_key_value_pages_have_the_shape_of_the_heads(built: Built) -> None:
    config, info = open_checkpoint(built.folder).config, built.model.info
    (page,) = built.model.runner.read_pages([1])
    assert page.shape == (config.num_layers, 2, config.num_kv_heads, info.page_size, config.head_dim)
    assert info.max_context == LENGTH
