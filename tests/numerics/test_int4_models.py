"""AWQ and GPTQ checkpoints through the real path, folder to logits, against transformers' float32 model on the dequantised
weights; and what a GPU gets of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401  isort: skip
from relaxpack import cli
from relaxpack.compile.weights import ParameterMaker
from relaxpack.dist.bundle import Bundle
from relaxpack.recipe import Concat, FromCheckpoint, Pack
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS, QuantizedTensor
from tests.helpers.built_logits import IDS, built_logits, relative_error
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.tiny_int4 import write_int4_checkpoint
from tests.helpers.transformers_reference import transformers_logits
from tests.reference.numpy_decoder import forward

# kind → family, group, what differs from the tiny model
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "awq": ("qwen2", 128, {"hidden_size": 128, "intermediate_size": 256}),
    "gptq": ("llama", -1, {"hidden_size": 160, "intermediate_size": 352}),
    "gptq_v2": ("qwen3", 64, {"num_attention_heads": 4})}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers_on_dequantised_weights(tmp_path: Path, kind: str,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    """In float32 up to float32; as they are CPU kernels round activations to int8, in groups of 32."""
    family, group, changes = MODELS[kind]
    plain, _ = write_int4_checkpoint(tmp_path / "m", kind, family, group=group, seed=3, **changes)
    write_checkpoint(tmp_path / "plain", family, tensors=plain, **changes)
    expected = transformers_logits(tmp_path / "plain", IDS)
    assert expected.std() > 0.5
    if kind == "awq":
        np.testing.assert_allclose(built_logits(tmp_path / "m", tmp_path / "f32", "f32"), expected, rtol=0, atol=2e-3)
    assert relative_error(built_logits(tmp_path / "m", tmp_path / "b", "as-is"), expected) < 0.02
    name = "q4_k" if group == 64 else "q4_128"
    assert set(Bundle.open(tmp_path / "b").manifest.weights.formats) == {name, "f32"}      # nothing was requantised
    assert cli.run(["inspect", str(tmp_path / "b")]) == 0
    assert f"{name} " in capsys.readouterr().out


def test_quantised_at_build(tmp_path: Path) -> None:
    """Rows of 96 are one short group. Random weights are the hardest to quantise, and long groups have no better range."""
    folder = write_checkpoint(tmp_path / "m", "llama", hidden_size=96, intermediate_size=288, seed=5)
    expected = forward(open_checkpoint(folder), IDS, 96)
    assert relative_error(built_logits(folder, tmp_path / "b", "q4-128"), expected) < 0.2
    assert set(Bundle.open(tmp_path / "b").manifest.weights.formats) == {"q4_128", "q8_0", "f32"}


def test_a_gpu_gets_stacked_layers(tmp_path: Path) -> None:
    """Query, key and value as one packed weight: codes, and words of scale and zero."""
    write_int4_checkpoint(tmp_path / "m", "awq", hidden_size=256, num_attention_heads=4)
    checkpoint = open_checkpoint(tmp_path / "m")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    provider, parts = CudaKernels(parse_target("cuda:sm_90a")), [checkpoint.read(name) for name in names]
    rows = sum(part.shape[0] for part in parts)
    maker, of = ParameterMaker(checkpoint, provider), Concat(tuple(FromCheckpoint(name) for name in names))
    stacked = QuantizedTensor(FORMATS["q4_128"], *(
        None if field == "minimums" else np.concatenate([getattr(part, field) for part in parts])
        for field in ("codes", "scales", "minimums", "zeros")))
    np.testing.assert_array_equal(stacked.dequantize(), np.concatenate([part.dequantize() for part in parts]))
    wanted = provider.pack(provider.weight_layout(stacked.format, rows, 256, False), stacked)
    for suffix in ("codes", "scales"):
        got = maker.make(Pack("q4_128", rows, 256, False, suffix, of), "uint32")
        np.testing.assert_array_equal(got, wanted[suffix])
