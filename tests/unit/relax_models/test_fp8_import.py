"""fp8 checkpoints: every published scheme gives exactly its numbers, and what is not understood is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from relaxpack.compile.weights import choose_formats
from relaxpack.errors import CheckpointError, ConfigError
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.weight_format import QuantizedTensor
from tests.helpers.tiny_checkpoints import write_checkpoint, write_json, write_weights
from tests.helpers.tiny_fp8 import SCHEMES, write_fp8_checkpoint

# Rows and columns that are, and are not, multiples of a block.
SIZES = {"hidden_size": 160, "intermediate_size": 300, "num_attention_heads": 5, "num_key_value_heads": 1}
Q = "model.layers.0.self_attn.q_proj.weight"


def change(folder: Path, stored: dict[str, np.ndarray], tensors: dict[str, Any]) -> None:
    """Write the folder's tensors again, with some of them changed; None removes one."""
    write_weights(folder, {name: value for name, value in {**stored, **tensors}.items() if value is not None})


def configure(folder: Path, *path: str, value: Any) -> None:
    """Set a key of quantization_config, given by its path."""
    config = json.loads((folder / "config.json").read_text())
    inner = config["quantization_config"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    write_json(folder / "config.json", config)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_are_the_checkpoints(tmp_path: Path, scheme: str) -> None:
    plain, _ = write_fp8_checkpoint(tmp_path / "m", scheme, **SIZES)
    checkpoint = open_checkpoint(tmp_path / "m")
    wanted = "fp8_block" if "block" in scheme else "fp8"
    assert set(checkpoint.tensors) == set(plain)
    for name, expected in plain.items():
        info, value = checkpoint.tensors[name], checkpoint.read(name)
        assert info.shape == expected.shape
        if ".layers." in name and expected.ndim == 2:
            assert isinstance(value, QuantizedTensor) and value.format.name == info.format.name == wanted
            value = value.dequantize()
        else:
            assert info.format.name == "f32"
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(("scheme", "key", "dynamic"), [
    ("static", "activation_scheme", False), ("block", "activation_scheme", True),
    ("channel", "config_groups.group_0.input_activations", True)])
def test_of_activations_only_dynamic_rounding_is_taken(tmp_path: Path, scheme: str, key: str, dynamic: bool) -> None:
    write_fp8_checkpoint(tmp_path / "m", scheme)
    checkpoint = open_checkpoint(tmp_path / "m")
    (entry,) = [e for e in checkpoint.audit.entries if e.key == f"quantization_config.{key}"]
    assert checkpoint.fp8_activations == dynamic and entry.status == ("used" if dynamic else "ignored")
    assert dynamic or "activations are not quantised with stored scales" in entry.why


@pytest.mark.parametrize("change", [{"dynamic": False}, {"num_bits": 4}, {"type": "int"}, None])
def test_other_schemes_of_activations_are_ignored(tmp_path: Path, change: dict[str, Any] | None) -> None:
    folder = tmp_path / "m"
    write_fp8_checkpoint(folder, "channel")
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = None if change is None else {**group["input_activations"], **change}
    (folder / "config.json").write_text(json.dumps(config))
    assert not open_checkpoint(folder).fp8_activations


def test_scales_of_the_cache_are_left_alone(tmp_path: Path) -> None:
    """Keys and values have a dtype of their own here; a dense sparsity_config says nothing."""
    _, stored = write_fp8_checkpoint(tmp_path / "m", "channel")
    scales = {f"model.layers.0.self_attn.{name}_scale": np.ones(1, np.float32) for name in "kv"}
    change(tmp_path / "m", stored, scales)
    configure(tmp_path / "m", "kv_cache_scheme", value={"num_bits": 8, "type": "float"})
    configure(tmp_path / "m", "sparsity_config", value={"format": "dense"})
    checkpoint = open_checkpoint(tmp_path / "m")
    assert not set(scales) & set(checkpoint.tensors)
    assert checkpoint.audit.status("config.json", "quantization_config.kv_cache_scheme") == "ignored"


def test_equal_fp8_head_and_table_are_one(tmp_path: Path) -> None:
    _, stored = write_fp8_checkpoint(tmp_path / "m", "channel", table=True)
    table = {"lm_head.weight" + end: stored["model.embed_tokens.weight" + end] for end in ("", "_scale")}
    assert not open_checkpoint(tmp_path / "m").config.tie_embeddings
    change(tmp_path / "m", stored, table)
    assert open_checkpoint(tmp_path / "m").config.tie_embeddings
    table["lm_head.weight_scale"] = table["lm_head.weight_scale"] * np.asarray(2, ml_dtypes.bfloat16)
    change(tmp_path / "m", stored, table)
    assert not open_checkpoint(tmp_path / "m").config.tie_embeddings


def test_what_the_build_makes_of_it(tmp_path: Path) -> None:
    """fp8 stays where 8 bits are asked for, and is converted where something else is."""
    write_fp8_checkpoint(tmp_path / "m", "block")
    checkpoint = open_checkpoint(tmp_path / "m")
    for weights, expected in {"as-is": "fp8_block", "fp8": "fp8_block", "q8": "fp8_block", "q4": "q4_1", "f16": "f16",
                              "f32": "f32"}.items():
        assert choose_formats(checkpoint, weights)[Q].name == expected
    assert choose_formats(checkpoint, "as-is", "bfloat16")[Q].name == "fp8_block"
    floats = open_checkpoint(write_checkpoint(tmp_path / "f"))
    assert choose_formats(floats, "fp8")[Q].name == "fp8"


def test_a_config_without_fp8_tensors_changes_nothing(tmp_path: Path) -> None:
    """Someone converted the weights back and left the key."""
    folder = write_checkpoint(tmp_path / "m", quantization_config=SCHEMES["block"][0])
    assert {info.format.name for info in open_checkpoint(folder).tensors.values()} == {"f32"}


@pytest.mark.parametrize(("changes", "words"), [
    ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, ["quantization_config", "bitsandbytes", "GGUF"]),
    ({"quantization_config": "awq"}, ["quantization_config", "'awq'", "supported: fp8"]),
    ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, ["quantization_config.fmt", "e5m2", "'e4m3'"]),
    ({"quantization_config": {"quant_method": "fp8", "mystery": 1}}, ["quantization_config.mystery", "unknown key"]),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}},
     ["weight_block_size", "[1, 32]", "multiple of 128"]),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}},
     ["quantization_config.format", "int-quantized", "float-quantized"]),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
     ["quantization_config.config_groups", "missing"]),
])
def test_unknown_schemes_are_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    folder = write_checkpoint(tmp_path / "m", **changes)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("path", "value", "words"), [
    (("config_groups", "group_0", "weights", "num_bits"), 4, ["weights.num_bits = 4", "fp8"]),
    (("config_groups", "group_0", "weights", "type"), "int", ["weights.type", "'int'"]),
    (("config_groups", "group_0", "weights", "strategy"), "group", ["weights.strategy", "'group'"]),
    (("config_groups", "group_0", "weights", "symmetric"), False, ["weights.symmetric", "zero points"]),
    (("config_groups", "group_0", "weights", "surprise"), 1, ["config_groups.group_0.weights.surprise"]),
    (("config_groups", "group_0", "weights"), None, ["config_groups.group_0", "no weights"]),
    (("sparsity_config",), {"format": "sparse-24-bitmask"}, ["sparsity_config", "sparse-24"]),
    (("transform_config",), {"config_groups": {"R1": {}}}, ["transform_config"]),
    (("quantization_status",), "frozen", ["quantization_status", "frozen"]),
])
def test_parts_of_compressed_tensors_are_refused(tmp_path: Path, path: tuple[str, ...], value: Any,
                                                 words: list[str]) -> None:
    write_fp8_checkpoint(tmp_path / "m", "channel")
    configure(tmp_path / "m", *path, value=value)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(tmp_path / "m")
    for word in words:
        assert word in str(caught.value)


def test_groups_with_different_blocks_are_refused(tmp_path: Path) -> None:
    write_fp8_checkpoint(tmp_path / "m", "block of compressed-tensors")
    group = copy.deepcopy(SCHEMES["block of compressed-tensors"][0]["config_groups"]["group_0"])
    group["weights"]["block_structure"] = [64, 128]
    configure(tmp_path / "m", "config_groups", "group_1", value=group)
    with pytest.raises(ConfigError, match="different blocks"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(("tensors", "words"), [
    ({Q + "_scale": None}, [Q, "needs one tensor of scales", "none"]),
    ({Q + "_scale_inv": np.ones(1, np.float32)}, [Q, "are both"]),
    ({Q + "_scale": np.ones((64, 2), np.float32)}, [Q + "_scale", "[64, 2]", "[64, 64]", "[64, 1]"]),
    ({Q + "_scale": np.ones((64, 1), np.int32)}, [Q + "_scale", "I32"]),
    ({"model.norm.weight": np.ones(64, ml_dtypes.float8_e4m3fn)}, ["model.norm.weight", "1 dimensions"]),
    ({"model.layers.0.mlp.odd_scale": np.ones(1, np.float32)}, ["unused", "odd_scale"]),
    ({Q: np.ones((64, 64), ml_dtypes.float8_e5m2), Q + "_scale": None}, [Q, "F8_E5M2"]),
])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Any], words: list[str]) -> None:
    _, stored = write_fp8_checkpoint(tmp_path / "m", "channel")
    change(tmp_path / "m", stored, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "m")
    for word in words:
        assert word in str(caught.value)


def test_fp8_without_a_config_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, Q: stored[Q].astype(ml_dtypes.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"F8_E4M3.*no quantization_config"):
        open_checkpoint(folder)


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    _, stored = write_fp8_checkpoint(tmp_path / "m", "channel")
    codes = stored[Q].view(np.uint8).copy()
    codes[63, 63] = 0xFF
    change(tmp_path / "m", stored, {Q: codes.view(ml_dtypes.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="q_proj.weight holds NaN"):
        open_checkpoint(tmp_path / "m").read(Q)
    codes[63, 63] = 0
    scales = np.ones((64, 1), np.float32)
    scales[5] = np.inf
    change(tmp_path / "m", stored, {Q: codes.view(ml_dtypes.float8_e4m3fn), Q + "_scale": scales})
    with pytest.raises(CheckpointError, match="weight_scale holds inf"):
        open_checkpoint(tmp_path / "m").read(Q)
