"""Checkpoints in every stored format, built as they are and converted: the weights that the kernels multiply with are
the checkpoint's. Float formats are exact up to float32; quantised ones round activations to int8 and are held to a
relative error that a wrong scale, order of rows or group would exceed tenfold.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relaxpack.relax_models.checkpoint import open_checkpoint
from tests.helpers.built_logits import IDS, built_logits, relative_error
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.reference.numpy_decoder import forward


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float_checkpoints_as_they_are(tmp_path: Path, dtype: str) -> None:
    folder = write_checkpoint(tmp_path / "m", "qwen2", dtype=dtype, seed=5)
    got = built_logits(folder, tmp_path / "b", "as-is")
    np.testing.assert_allclose(got, forward(open_checkpoint(folder), IDS, 96), rtol=0, atol=5e-4)


@pytest.mark.parametrize("weights, error", [("q8", 0.02), ("q4", 0.15)])
def test_quantised_at_build(tmp_path: Path, weights: str, error: float) -> None:
    """Random weights are the hardest to quantise: four bits leave a step of a fifth of their standard deviation."""
    folder = write_checkpoint(tmp_path / "m", "qwen3", seed=5)
    expected = forward(open_checkpoint(folder), IDS, 96)
    assert relative_error(built_logits(folder, tmp_path / "b", weights), expected) < error


KINDS = {"q_proj": "Q4_0", "k_proj": "Q4_0", "v_proj": "Q6_K", "o_proj": "Q4_K", "gate_proj": "Q4_1", "up_proj": "Q4_1",
         "down_proj": "Q6_K", "embed_tokens": "Q8_0", "lm_head": "Q5_K"}


def test_a_gguf_of_mixed_formats(tmp_path: Path) -> None:
    """Query and key share a format, the value has another, as in "Q4_K_M" files; the head is not the table's."""
    gguf = pytest.importorskip("gguf", reason="pip install 'relaxpack[gguf]'")
    from tests.helpers.tiny_gguf import write_gguf

    folder = write_checkpoint(tmp_path / "m", "llama", hidden_size=256, intermediate_size=256, seed=5)
    path = write_gguf(tmp_path / "m.gguf", folder, lambda name: gguf.GGMLQuantizationType[KINDS[name.split(".")[-2]]])
    checkpoint = open_checkpoint(path)
    assert {info.format.name for info in checkpoint.tensors.values() if len(info.shape) == 2} == {
        "q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "q8_0"}
    expected = forward(checkpoint, IDS, 96)
    assert relative_error(built_logits(path, tmp_path / "b", "as-is"), expected) < 0.03
    np.testing.assert_allclose(built_logits(path, tmp_path / "f32", "f32"), expected, rtol=0,
                               atol=1e-4 * float(np.abs(expected).max()))
