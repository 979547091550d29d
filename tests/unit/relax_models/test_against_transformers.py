"""Imported checkpoints of every family and RoPE form, run through the NumPy reference, against transformers.

For RoPE, sequences reach past position 2000: a wrong RoPE base or scaling looks right for the first hundred tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxpack.relax_models.checkpoint import open_checkpoint
from tests.helpers.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.helpers.transformers_reference import transformers_logits
from tests.reference.numpy_decoder import forward

LENGTH = 2100        # for RoPE forms
SHORT_LENGTH = 300   # for shapes, biases and windows
HALF = 8  # of head_dim 16
LONG = {"short_factor": [1.0 + 0.05 * i for i in range(HALF)], "long_factor": [1.0 + 0.5 * i for i in range(HALF)],
        "original_max_position_embeddings": 1024}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama_bias", {}),
    "head_dim": ("head_dim", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "mistral, window 100": ("mistral", {"sliding_window": 100}),
    "qwen2": ("qwen2", {}),
    "qwen2, window from layer 1": ("qwen2", {"use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, layer types": ("qwen3", {"use_sliding_window": True, "sliding_window": 100,
                                     "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma": ("gemma", {}),
    "rope_parameters": ("llama", {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic, short": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "dynamic, long": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 512}),
    "llama3": ("llama", {"rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024}}),
    "yarn": ("qwen2", {"rope_theta": 1e6, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}),
    "longrope, long": ("llama", {"rope_scaling": {"type": "longrope", **LONG}}),
    "longrope, short": ("llama", {"rope_scaling": {
        "type": "longrope", **LONG, "original_max_position_embeddings": 3000}}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path: Path, name: str) -> None:
    family, changes = CASES[name]
    length = LENGTH if name == "llama" or {"rope_scaling", "rope_parameters"} & set(changes) else SHORT_LENGTH
    layers = 1 if length == LENGTH else 2  # one layer shows every rotation; two show windows and types per layer
    folder = write_checkpoint(tmp_path / "m", family, seed=3, **{
        "max_position_embeddings": 4096, "num_hidden_layers": layers, **changes})
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, length).tolist()
    expected = transformers_logits(folder, ids)
    got = forward(open_checkpoint(folder), ids, length)
    assert np.isfinite(expected).all() and expected.std() > 0.5
    # Both in float32 with sums in another order; at position 2100 one float32 rounding of the angle is 1e-4 rad.
    np.testing.assert_allclose(got, expected, atol=2e-3)


def test_the_positions_matter(tmp_path: Path) -> None:
    """The comparison above would notice a wrong base: another theta moves logits far beyond its tolerance."""
    ids = np.random.default_rng(5).integers(0, VOCAB_SIZE, LENGTH).tolist()
    right, wrong = (
        forward(open_checkpoint(write_checkpoint(tmp_path / str(theta), seed=3, rope_theta=theta, num_hidden_layers=1,
                                                 max_position_embeddings=4096)), ids, LENGTH)
        for theta in (500000.0, 10000.0))
    assert np.abs(right[2000:] - wrong[2000:]).max() > 0.1
