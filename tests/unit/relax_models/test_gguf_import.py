"""GGUF files: the same model as the Hugging Face folder they were made from, and every refusal by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxpack.errors import CheckpointError, ConfigError
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.weight_format import QuantizedTensor
from tests.helpers.tiny_checkpoints import make_config, make_tensors, write_checkpoint

pytest.importorskip("gguf", reason="writes the test files: pip install relaxpack[gguf]")
from gguf.quants import dequantize, quantize

from tests.helpers.tiny_gguf import Type, interleaved_rows, write_gguf

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", "llama")


@pytest.mark.parametrize("family", ["llama", "llama_bias", "head_dim", "mistral", "qwen2", "qwen3", "gemma"])
def test_equals_the_folder_it_was_made_from(tmp_path: Path, family: str) -> None:
    """q and k of llama-architecture files come back in half order, biases included; norms of gemma's have their one; all
    else is as stored."""
    changes = {"sliding_window": None} if family == "mistral" else {}  # GGUF keeps Mistral as llama, without window
    folder = open_checkpoint(write_checkpoint(tmp_path / "hf", family, **changes))
    got = open_checkpoint(write_gguf(tmp_path / "m.gguf", tmp_path / "hf"))
    architecture = "llama" if family == "mistral" else folder.config.architecture
    assert got.config == replace(folder.config, architecture=architecture)
    assert {n: t.shape for n, t in got.tensors.items()} == {n: t.shape for n, t in folder.tensors.items()}
    for name in folder.tensors:
        np.testing.assert_array_equal(got.read(name), folder.read(name), err_msg=name)
    assert got.source.kind == "gguf" and got.source.name == "m.gguf"
    assert got.assets.chat_template == folder.assets.chat_template
    assert not got.audit.warnings


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_rows_of_quantised_q_and_k_move_losslessly(llama: Path, tmp_path: Path, kind: str) -> None:
    number = getattr(Type, kind)
    got = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama, lambda name: number))
    for name, heads in (("model.layers.1.self_attn.q_proj.weight", 4), ("model.layers.1.self_attn.k_proj.weight", 2),
                        ("model.layers.1.self_attn.v_proj.weight", 0)):
        original = make_tensors(make_config("llama"))[name]
        stored = interleaved_rows(original, heads) if heads else original
        reference = dequantize(quantize(stored, number), number)  # as stored; undo the row order on the result
        value = got.read(name)
        ours = value.dequantize() if isinstance(value, QuantizedTensor) else value.astype(np.float32)
        assert got.tensors[name].format.name == kind.lower()
        np.testing.assert_array_equal(interleaved_rows(ours, heads) if heads else ours, reference)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "hf", "qwen2", hidden_size=256, intermediate_size=256)
    got = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, lambda name: getattr(Type, kind)))
    value = got.read("model.layers.0.mlp.up_proj.weight")
    assert isinstance(value, QuantizedTensor) and value.format.name == kind.lower()
    assert np.isfinite(value.dequantize()).all() and value.shape == (256, 256)


def test_tied_files_have_no_output_tensor(tmp_path: Path) -> None:
    got = open_checkpoint(write_gguf(tmp_path / "m.gguf", write_checkpoint(tmp_path / "hf", "qwen3")))
    assert got.config.tie_embeddings and HEAD not in got.tensors and not got.audit.warnings


def test_equal_output_tensor_is_one_tensor(tmp_path: Path) -> None:
    tensors = make_tensors(make_config("llama"))
    tensors[HEAD] = tensors[EMBEDDING].copy()
    folder = write_checkpoint(tmp_path / "hf", tensors=tensors)
    # The folder already drops the copy, so put it back into the file.
    path = write_gguf(tmp_path / "m.gguf", folder, lambda name: Type.F32,
                      extra_tensors={"output.weight": tensors[EMBEDDING]})
    got = open_checkpoint(path)
    assert got.config.tie_embeddings and HEAD not in got.tensors


def test_rope_factors_of_llama3(llama: Path, tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    got = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama, extra_tensors={"rope_freqs.weight": divisors}))
    assert got.config.rope.kind == "factors"
    np.testing.assert_array_equal(got.config.rope.short_factors, divisors)
    assert "rope_freqs.weight" not in got.tensors


def scaling(**keys: Any) -> dict[str, Any]:
    return {f"llama.rope.scaling.{key}": value for key, value in keys.items()}


@pytest.mark.parametrize(("metadata", "expected"), [
    (scaling(type="none"), {"kind": "default"}),
    (scaling(type="linear", factor=4.0), {"kind": "linear", "factor": 4.0}),
    (scaling(factor=4.0), {"kind": "linear", "factor": 4.0}),
    ({"llama.rope.scale_linear": 2.0}, {"kind": "linear", "factor": 2.0}),
    (scaling(type="yarn", factor=4.0, original_context_length=64, finetuned=True),
     {"kind": "yarn", "factor": 4.0, "original_max_position": 64, "attention_factor": None}),
    (scaling(type="yarn", factor=4.0, original_context_length=64, yarn_beta_fast=16.0),
     {"kind": "yarn", "beta_fast": 16.0}),
    ({"llama.rope.freq_base": 500000.0}, {"kind": "default", "theta": 500000.0}),
])
def test_rope_metadata(llama: Path, tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama, replace_metadata=metadata)).config.rope
    assert {key: getattr(rope, key) for key in expected} == expected


def test_longrope_needs_both_tables(llama: Path, tmp_path: Path) -> None:
    short, long = np.full(8, 1.5, np.float32), np.full(8, 3.0, np.float32)
    metadata = scaling(original_context_length=64, attn_factor=1.19)
    both = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    rope = open_checkpoint(write_gguf(tmp_path / "m.gguf", llama, replace_metadata=metadata, extra_tensors=both)
                           ).config.rope
    assert (rope.kind, rope.original_max_position, rope.long_factors) == ("longrope", 64, (3.0,) * 8)
    assert rope.attention_factor == pytest.approx(1.19, rel=1e-6)
    with pytest.raises(ConfigError, match="longrope needs"):
        open_checkpoint(write_gguf(tmp_path / "n.gguf", llama, replace_metadata=scaling(type="longrope", factor=2.0)))


@pytest.mark.parametrize(("metadata", "words"), [
    ({"general.architecture": "mamba"}, ["'mamba'", "llama, qwen2, qwen3, gemma"]),
    (scaling(type="ntk", factor=2.0), ["'ntk'", "yarn"]),
    (scaling(type="yarn", factor=2.0), ["original_context_length"]),
    (scaling(type="linear"), ["rope.scaling.factor"]),
    ({"llama.rope.dimension_count": 8}, ["dimension_count = 8", "16"]),
    ({"llama.expert_count": 8}, ["expert_count", "8"]),
    ({"llama.attention.value_length": 32}, ["value_length", "32"]),
    ({"llama.attention.head_count_kv": [2, 1]}, ["head_count_kv", "differs"]),
    ({"llama.logit_scale": 0.5}, ["logit_scale", "0.5"]),
    ({"llama.mystery": 3}, ["llama.mystery = 3"]),
    ({"split.count": 2}, ["parts of a split GGUF"]),
    ({"general.type": "adapter"}, ["general.type", "'adapter'"]),
])
def test_refused(llama: Path, tmp_path: Path, metadata: dict[str, Any], words: list[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama, replace_metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in words:
        assert word in str(caught.value)


def test_missing_key_and_unknown_tensor(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_count"):
        open_checkpoint(write_gguf(tmp_path / "a.gguf", llama, drop=("llama.block_count",)))
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(CheckpointError, match=r"unused 1 \(blk\.0\.attn_sinks\.weight\)"):
        open_checkpoint(write_gguf(tmp_path / "b.gguf", llama, extra_tensors=extra))


@pytest.mark.parametrize("keep", [0, 3, 30, 2000, 0.5, -40])
def test_cut_file(llama: Path, tmp_path: Path, keep: float) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama)
    data = path.read_bytes()
    path.write_bytes(data[:int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"m\.gguf.*incomplete download"):
        open_checkpoint(path)


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF magic"):
        open_checkpoint(path)
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="version 9"):
        open_checkpoint(path)


def test_damaged_counts_do_not_allocate(llama: Path, tmp_path: Path) -> None:
    """Random bytes over the header: an error of ours, or a file that still reads; never anything else."""
    path = write_gguf(tmp_path / "m.gguf", llama)
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        broken = data.copy()
        for at in rng.integers(8, 1200, 3):
            broken[at] = rng.integers(0, 256)
        path.write_bytes(broken)
        try:
            open_checkpoint(path)
        except CheckpointError:
            refused += 1
    assert refused > 10


def test_unsupported_type_is_named(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama)
    data = path.read_bytes()
    at = data.index(b"output_norm.weight") + len("output_norm.weight")
    # u32 dimensions, u64 size, then the type number
    path.write_bytes(data[:at + 12] + (10).to_bytes(4, "little") + data[at + 16:])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight has the GGUF type Q2_K; supported: F32"):
        open_checkpoint(path)


@pytest.mark.parametrize(("family", "missing"), [("qwen2", ".bias"), ("qwen3", "q_norm.weight")])
def test_what_the_architecture_fixes_cannot_be_absent(tmp_path: Path, family: str, missing: str) -> None:
    """Without its biases or head norms a file would still run, and answer nonsense."""
    path = write_gguf(tmp_path / "m.gguf", write_checkpoint(tmp_path / "hf", family), leave_out=missing)
    with pytest.raises(CheckpointError, match=rf"missing \d \(.*{missing}"):
        open_checkpoint(path)
