"""fp8 checkpoints through the real path, folder to logits: what the CPU kernels compute is transformers' float32 model on
the dequantised weights. Weights are exact and arithmetic is float32, so the bound is that of float32 checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxpack import cli
from relaxpack.compile.weights import choose_formats
from relaxpack.dist.bundle import Bundle
from relaxpack.relax_models.checkpoint import open_checkpoint
from tests.helpers.built_logits import IDS, built_logits, relative_error
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.tiny_fp8 import write_fp8_checkpoint
from tests.helpers.transformers_reference import transformers_logits
from tests.reference.numpy_decoder import forward

TOLERANCE = 2e-3     # as in test_models.py

# scheme → family, what differs from the tiny model; widths that are no multiple of a block among them
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "block": ("qwen3", {"hidden_size": 160, "intermediate_size": 300, "num_attention_heads": 8}),
    "block of compressed-tensors": ("llama", {"hidden_size": 256, "intermediate_size": 384}),
    "channel": ("llama_bias", {"hidden_size": 96, "table": True}),
    "tensor": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "static": ("mistral", {"table": True, "tie_word_embeddings": True})}


@pytest.mark.parametrize("scheme", MODELS)
def test_logits_equal_transformers_on_dequantised_weights(tmp_path: Path, scheme: str,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    family, changes = MODELS[scheme]
    plain, _ = write_fp8_checkpoint(tmp_path / "m", scheme, family, seed=3, **changes)
    shape = {key: value for key, value in changes.items() if key != "table"}
    write_checkpoint(tmp_path / "plain", family, tensors=plain, **shape)
    expected = transformers_logits(tmp_path / "plain", IDS)
    got = built_logits(tmp_path / "m", tmp_path / "b", "as-is")
    assert expected.std() > 0.5
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    name = "fp8_block" if "block" in scheme else "fp8"
    assert set(Bundle.open(tmp_path / "b").manifest.weights.formats) == {name, "f32"}      # nothing was requantised
    for command, words in (("inspect", f"{name} "), ("explain", f"linear_{name}_")):
        assert cli.run([command, str(tmp_path / "b")]) == 0
        assert words in capsys.readouterr().out


def test_quantised_at_build(tmp_path: Path) -> None:
    """Three mantissa bits: a relative error of a fortieth in each weight, independent among them. Table and head have 8-bit
    integers, which take as much and err a tenth of that."""
    folder = write_checkpoint(tmp_path / "m", "llama", seed=5)
    chosen = {name: fmt.name for name, fmt in choose_formats(open_checkpoint(folder), "fp8").items()}
    assert {name for name, fmt in chosen.items() if fmt == "q8_0"} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert set(chosen.values()) == {"fp8", "q8_0"}
    expected = forward(open_checkpoint(folder), IDS, 96)
    got = built_logits(folder, tmp_path / "b", "fp8")
    assert relative_error(got, expected) < 0.06
