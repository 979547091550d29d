"""Weights of a Hugging Face folder: reading, tying, and every way a download can be incomplete or ambiguous."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relaxpack.errors import CheckpointError
from relaxpack.relax_models.checkpoint import open_checkpoint
from tests.helpers.tiny_checkpoints import make_config, make_tensors, write_checkpoint, write_json, write_weights

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reads_what_was_written(tmp_path: Path, shards: int, dtype: str) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", shards=shards, dtype=dtype))
    written = make_tensors(make_config("llama"))
    assert set(checkpoint.tensors) == set(written)
    for name, value in written.items():
        got = checkpoint.read(name)
        assert isinstance(got, np.ndarray) and got.dtype.name == dtype == checkpoint.tensors[name].format.dtype
        assert got.shape == checkpoint.tensors[name].shape
        np.testing.assert_array_equal(got, value.astype(got.dtype))
    assert checkpoint.source.kind == "huggingface" and len(checkpoint.source.files) == shards
    assert str(tmp_path) not in str(checkpoint.source)


def test_reading_maps_instead_of_copying(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m"))
    got = checkpoint.read(EMBEDDING)
    assert isinstance(got, np.ndarray) and not got.flags.owndata and not got.flags.writeable


@pytest.mark.parametrize(("tie", "head", "tied", "warning"), [
    (True, "absent", True, None),
    (True, "equal", True, None),
    (True, "different", False, "differs"),
    (..., "absent", True, "not given"),
    (False, "absent", True, "is false"),
    (False, "equal", True, None),
    (False, "different", False, None),
])
def test_tied_embeddings(tmp_path: Path, tie: Any, head: str, tied: bool, warning: str | None) -> None:
    tensors = make_tensors(make_config("llama"))
    if head == "absent":
        del tensors[HEAD]
    elif head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors=tensors, tie_word_embeddings=tie))
    assert checkpoint.config.tie_embeddings is tied and (HEAD in checkpoint.tensors) is not tied
    if not tied:
        np.testing.assert_array_equal(checkpoint.read(HEAD), tensors[HEAD])
    if warning is None:
        assert not checkpoint.audit.warnings
    else:
        assert [w for w in checkpoint.audit.warnings if warning in w and HEAD in w]


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors.*incomplete download") as caught:
        open_checkpoint(folder)
    assert str(tmp_path) not in str(caught.value)


def test_missing_shard_without_index_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    (folder / INDEX).unlink()
    assert set(open_checkpoint(folder).tensors) == set(make_tensors(make_config("llama")))
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors.*incomplete download"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_cut_shard_is_named(tmp_path: Path, keep: float) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"damaged: model-00002-of-00003\.safetensors .*incomplete download"):
        open_checkpoint(folder)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b'{"a": 5}',
                                    b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
                                    b'{"a": {"dtype": "F32", "shape": [2]}}',
                                    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
                                    b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 4]}}',
                                    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}'])
def test_bad_header(tmp_path: Path, header: bytes) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(its header claims 1152921504606846976 bytes"):
        open_checkpoint(folder)


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with open(folder / "model.safetensors", "ab") as handle:
        handle.write(b"\0" * 16)
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(folder)


@pytest.mark.parametrize("other", ["model.safetensors", "consolidated.safetensors"])
def test_only_what_the_index_names_is_read(tmp_path: Path, other: str) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    save_file({"layers.0.attention.wq.weight": np.zeros((2, 2), np.uint8), EMBEDDING: np.zeros((2, 2), np.uint8)},
              folder / other)
    checkpoint = open_checkpoint(folder)
    assert other not in checkpoint.source.files
    np.testing.assert_array_equal(checkpoint.read(EMBEDDING), make_tensors(make_config("llama"))[EMBEDDING])


def test_two_candidates_without_index_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "model.safetensors" in str(caught.value) and "consolidated.safetensors" in str(caught.value)


def test_index_that_contradicts_the_shards(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    write_json(folder / INDEX, index)
    with pytest.raises(CheckpointError, match=r"model\.ghost\.weight.*do not match"):
        open_checkpoint(folder)


def test_index_pointing_outside_the_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    write_json(folder / INDEX, {"weight_map": {EMBEDDING: "../other.safetensors"}})
    with pytest.raises(CheckpointError, match="not a file name"):
        open_checkpoint(folder)


def test_missing_and_unused_tensors_are_listed(tmp_path: Path) -> None:
    tensors = make_tensors(make_config("llama"))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write_checkpoint(tmp_path / "m", tensors=tensors))
    assert "missing 1 (model.layers.1.mlp.up_proj.weight)" in str(caught.value)
    assert "unused 1 (model.layers.0.self_attn.q_proj.bias)" in str(caught.value)


def test_declared_buffers_are_skipped(tmp_path: Path) -> None:
    tensors = make_tensors(make_config("llama"))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", tensors=tensors))
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in checkpoint.tensors


def test_shape_that_contradicts_the_config(tmp_path: Path) -> None:
    """head_dim 24 claimed for weights made with 16."""
    folder = write_checkpoint(tmp_path / "m", tensors=make_tensors(make_config("llama")), head_dim=24)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is \[64, 64\], expected \[96, 64\]"):
        open_checkpoint(folder)


def test_quantised_safetensors_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    tensors: dict[str, np.ndarray] = dict(make_tensors(make_config("llama")))
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(np.int8)
    write_weights(folder, tensors)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is stored as I8"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("files", "words"), [
    ({}, "no safetensors file; incomplete download"),
    ({"pytorch_model.bin": "x"}, "pytorch_model.bin is in PyTorch's pickle format"),
    ({"adapter_config.json": "{}"}, "adapter"),
])
def test_no_weights(tmp_path: Path, files: dict[str, str], words: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at.*smollm2"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="`hf download some-one/Model-1.5B --local-dir Model-1.5B`"):
        open_checkpoint("some-one/Model-1.5B")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"notes\.txt is not a checkpoint"):
        open_checkpoint(tmp_path / "notes.txt")


@pytest.mark.parametrize("member", ["x.bundle/manifest.json", "x.rpk"])
def test_a_bundle_is_no_checkpoint(tmp_path: Path, member: str) -> None:
    (tmp_path / member).parent.mkdir(exist_ok=True)
    (tmp_path / member).write_text("{}")
    with pytest.raises(CheckpointError, match="is a bundle, which is built already; give the checkpoint"):
        open_checkpoint(tmp_path / member.split("/")[0])
