"""AWQ and GPTQ checkpoints give exactly their numbers, whatever their groups; what is not understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxpack.compile.weights import choose_formats
from relaxpack.errors import CheckpointError, ConfigError
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.weight_format import QuantizedTensor
from tests.helpers.tiny_checkpoints import write_json, write_weights
from tests.helpers.tiny_int4 import CONFIGS, joined, write_int4_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
LAYER = "model.layers.0.self_attn.q_proj"


def change(folder: Path, stored: dict[str, np.ndarray], tensors: dict[str, Any]) -> None:
    """Write the folder's tensors again, with some of them changed; None removes one."""
    write_weights(folder, {name: value for name, value in {**stored, **tensors}.items() if value is not None})


def configure(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(keys)
    write_json(folder / "config.json", config)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("group", [128, 64, 32, -1])
def test_numbers_are_the_checkpoints(tmp_path: Path, kind: str, group: int) -> None:
    plain, _ = write_int4_checkpoint(tmp_path / "m", kind, group=group, **SIZES)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert set(checkpoint.tensors) == set(plain)
    for name, expected in plain.items():
        info, value = checkpoint.tensors[name], checkpoint.read(name)
        assert info.shape == expected.shape
        if ".layers." in name and expected.ndim == 2:
            assert isinstance(value, QuantizedTensor)
            assert value.format.name == info.format.name == ("q4_k" if group in (32, 64) else "q4_128")
            assert value.scales.dtype == value.format.scale_dtype
            value = value.dequantize()
        else:
            assert info.format.name == "f32"
        np.testing.assert_array_equal(value, expected)


def test_one_word_by_hand(tmp_path: Path) -> None:
    """Output n of eight has code n: what the published formats write for it."""
    codes = np.arange(8)[None, :]
    assert joined(codes, (0, 2, 4, 6, 1, 3, 5, 7), 1).view(np.uint32).tolist() == [[0x75316420]]
    assert joined(codes.T, tuple(range(8)), 0).view(np.uint32).tolist() == [[0x76543210]]
    for kind, word in (("awq", 0x75316420), ("gptq", 0x76543210)):
        _, stored = write_int4_checkpoint(tmp_path / kind, kind, **SIZES)
        words = np.full_like(stored[f"{LAYER}.qweight"], word)
        change(tmp_path / kind, stored, {f"{LAYER}.qweight": words})
        read = open_checkpoint(tmp_path / kind).read(f"{LAYER}.weight").codes
        expected = np.arange(256) % 8
        np.testing.assert_array_equal(read, np.broadcast_to(expected[:, None] if kind == "awq" else expected, (256, 256)))


def test_symmetric_gptq_has_zeros_of_eight(tmp_path: Path) -> None:
    """The first form of the format writes 7 in every nibble for them."""
    _, stored = write_int4_checkpoint(tmp_path / "m", "gptq", **SIZES)
    change(tmp_path / "m", stored, {f"{LAYER}.qzeros": np.full_like(stored[f"{LAYER}.qzeros"], 0x77777777)})
    assert (open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight").zeros == 8).all()


def test_symmetric_compressed_tensors_have_no_zeros(tmp_path: Path) -> None:
    _, stored = write_int4_checkpoint(tmp_path / "m", "compressed", **SIZES)
    change(tmp_path / "m", stored, {name: None for name in stored if name.endswith("zero_point")})
    _set_weights(tmp_path / "m", {**_weights(tmp_path / "m"), "symmetric": True})
    weight = open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight")
    assert (weight.zeros == 8).all()
    np.testing.assert_array_equal(weight.dequantize(), (weight.codes.astype(np.float32) - 8) * np.repeat(
        stored[f"{LAYER}.weight_scale"].astype(np.float32), 128, axis=1))


@pytest.mark.parametrize(("path", "value", "words"), [
    (("weights", "num_bits"), 8, ["weights.num_bits = 8", "4"]), (("weights", "type"), "float", ["weights.type", "'float'"]),
    (("weights", "strategy"), "tensor", ["weights.strategy", "'tensor'"]),
    (("weights", "group_size"), 16, ["group_size = 16"]),
    (("weights", "dynamic"), True, ["weights.dynamic"]), (("weights", "surprise"), 1, ["weights.surprise"]),
    (("format",), "float-quantized", ["group_0.format", "'pack-quantized'"]),
])
def test_parts_of_compressed_tensors_are_refused(tmp_path: Path, path: tuple[str, ...], value: Any,
                                                 words: list[str]) -> None:
    write_int4_checkpoint(tmp_path / "m", "compressed", **SIZES)
    config = json.loads((tmp_path / "m/config.json").read_text())
    inner = config["quantization_config"]["config_groups"]["group_0"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    write_json(tmp_path / "m/config.json", config)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(tmp_path / "m")
    for word in words:
        assert word in str(caught.value)


def test_groups_of_different_sizes_are_refused(tmp_path: Path) -> None:
    write_int4_checkpoint(tmp_path / "m", "compressed", **SIZES)
    groups = json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]["config_groups"]
    other = {**groups["group_0"], "weights": {**groups["group_0"]["weights"], "group_size": 64}}
    configure(tmp_path / "m", config_groups={**groups, "group_1": other})
    with pytest.raises(ConfigError, match=r"config_groups have \[64, 128\] group sizes"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("group", [128, 256])
def test_longer_groups_are_repeated(tmp_path: Path, group: int) -> None:
    plain, _ = write_int4_checkpoint(tmp_path / "m", "awq", group=group, **{**SIZES, "intermediate_size": 512})
    weight = open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight")
    assert weight.scales.shape == weight.zeros.shape == (256, 2)
    np.testing.assert_array_equal(weight.dequantize(), plain[f"{LAYER}.weight"])


def test_a_whole_column_of_any_length(tmp_path: Path) -> None:
    plain, _ = write_int4_checkpoint(tmp_path / "m", "gptq", group=-1, hidden_size=96, num_attention_heads=4)
    weight = open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight")
    assert weight.format.name == "q4_128" and weight.scales.shape == (96, 1)
    np.testing.assert_array_equal(weight.dequantize(), plain[f"{LAYER}.weight"])


def test_bfloat16_scales(tmp_path: Path) -> None:
    """Where float16 holds them they are float16, layer by layer; else the format with float32 scales takes them."""
    plain, stored = write_int4_checkpoint(tmp_path / "m", "awq", scale_dtype=ml_dtypes.bfloat16, **SIZES)
    tiny = stored[f"{LAYER}.scales"].copy()
    tiny[1] = 2.0**-30
    change(tmp_path / "m", stored, {f"{LAYER}.scales": tiny})
    checkpoint = open_checkpoint(tmp_path / "m")
    other = f"{LAYER.replace('q_proj', 'k_proj')}.weight"
    for name, format in ((f"{LAYER}.weight", "q4_k"), (other, "q4_128")):
        read = checkpoint.read(name)
        assert read.format.name == checkpoint.tensors[name].format.name == format
        np.testing.assert_array_equal(read.dequantize()[:, :128], plain[name][:, :128])
    assert 0 < np.abs(checkpoint.read(f"{LAYER}.weight").dequantize()[:, 128:]).max() <= 15 * 2.0**-30


def test_odd_columns_need_float16_scales(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1}
    _, stored = write_int4_checkpoint(tmp_path / "m", "gptq", group=-1, scale_dtype=np.float32, **sizes)
    change(tmp_path / "m", stored, {name: value.astype(np.float16).astype(np.float32) if name.endswith("scales") else value
                                    for name, value in stored.items()})
    assert open_checkpoint(tmp_path / "m").tensors[f"{LAYER}.weight"].format.name == "q4_128"
    change(tmp_path / "m", stored, {f"{LAYER}.scales": np.full_like(stored[f"{LAYER}.scales"], 1e-30)})
    with pytest.raises(CheckpointError, match="what float16 does not, and 72 inputs"):
        open_checkpoint(tmp_path / "m")


def test_biases_of_zero_that_no_model_has(tmp_path: Path) -> None:
    _, stored = write_int4_checkpoint(tmp_path / "m", "gptq", **SIZES)
    change(tmp_path / "m", stored, {f"{LAYER}.bias": np.zeros(256, np.float16)})
    assert f"{LAYER}.bias" not in open_checkpoint(tmp_path / "m").tensors
    change(tmp_path / "m", stored, {f"{LAYER}.bias": np.ones(256, np.float16)})
    with pytest.raises(CheckpointError, match=r"unused 1 \(model.layers.0.self_attn.q_proj.bias"):
        open_checkpoint(tmp_path / "m")
    plain, stored = write_int4_checkpoint(tmp_path / "q", "gptq", "qwen2", **SIZES)
    change(tmp_path / "q", stored, {f"{LAYER}.bias": np.zeros(256, np.float32)})
    assert f"{LAYER}.bias" in open_checkpoint(tmp_path / "q").tensors and f"{LAYER}.bias" in plain


def test_what_the_build_makes_of_it(tmp_path: Path) -> None:
    """What has 4 bits stays unless floats are asked for."""
    write_int4_checkpoint(tmp_path / "m", "awq", **SIZES)
    checkpoint = open_checkpoint(tmp_path / "m")
    for weights, expected in {"as-is": "q4_128", "q4": "q4_128", "q4-128": "q4_128", "q8": "q4_128", "f16": "f16"}.items():
        assert choose_formats(checkpoint, weights)[f"{LAYER}.weight"].name == expected
    assert choose_formats(checkpoint, "as-is", "bfloat16")["lm_head.weight"].name == "bf16"
    assert checkpoint.audit.status("config.json", "quantization_config.group_size") == "used"
    assert checkpoint.audit.status("config.json", "quantization_config.modules_to_not_convert") == "ignored"


@pytest.mark.parametrize(("kind", "keys", "words"), [
    ("awq", {"bits": 8}, ["quantization_config.bits = 8", "4"]),
    ("awq", {"bits": None}, ["quantization_config.bits", "missing"]),
    ("gptq", {"bits": 3}, ["quantization_config.bits = 3"]),
    ("awq", {"group_size": 16}, ["group_size = 16", "multiples of 128"]),
    ("gptq", {"group_size": 0}, ["group_size = 0"]),
    ("awq", {"group_size": None}, ["group_size", "missing"]),
    ("awq", {"version": "gemv"}, ["version", "'gemv'", "'gemm'"]),
    ("awq", {"zero_point": False}, ["zero_point"]),
    ("awq", {"backend": "llm-awq"}, ["backend", "llm-awq"]),
    ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "'gptq_v2'"]),
    ("gptq", {"is_marlin_format": True}, ["is_marlin_format"]),
    ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic", "+:.*down.*"]),
    ("gptq", {"surprise": 1}, ["quantization_config.surprise", "unknown key"]),
    ("awq", {"checkpoint_format": "gemv"}, ["checkpoint_format", "'gemv'", "'gemm'"]),
    ("awq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic", "+:.*down.*"]),
    ("gptq", {"data_type": "mx_fp"}, ["data_type = 'mx_fp'"]),
    ("gptq", {"act_bits": 8}, ["act_bits = 8"]),
])
def test_schemes_that_are_refused(tmp_path: Path, kind: str, keys: dict[str, Any], words: list[str]) -> None:
    write_int4_checkpoint(tmp_path / "m", kind, **SIZES)
    configure(tmp_path / "m", **keys)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(tmp_path / "m")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("kind", "keys"), [
    ("awq", {"checkpoint_format": "gemm", "format": "gemm", "desc_act": True, "sym": False, "lm_head": False,
             "dynamic": None, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.6.12"]}}),
    ("gptq", {"act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True,
              "amp": True, "autoround_version": "0.5.1", "batch_size": 8, "data_type": "int", "enable_minmax_tuning": True,
              "enable_norm_bias_tuning": False, "enable_quanted_input": True, "gradient_accumulate_steps": 1, "iters": 1000,
              "low_gpu_mem_usage": True, "lr": 0.001, "minmax_lr": 0.001, "nsamples": 512, "scale_dtype": "torch.float16",
              "seqlen": 2048, "super_bits": None, "super_group_size": None, "to_quant_block_names": None,
              "provider": "auto-round"}),
])
def test_keys_of_gptqmodel_and_autoround(tmp_path: Path, kind: str, keys: dict[str, Any]) -> None:
    plain, _ = write_int4_checkpoint(tmp_path / "m", kind, **SIZES)
    configure(tmp_path / "m", **keys)
    value = open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight")
    assert isinstance(value, QuantizedTensor)
    np.testing.assert_array_equal(value.dequantize(), plain[f"{LAYER}.weight"])


@pytest.mark.parametrize("group", [128, -1])
def test_without_a_strategy_the_group_size_says_it(tmp_path: Path, group: int) -> None:
    write_int4_checkpoint(tmp_path / "m", "compressed", group=group, **SIZES)
    expected = open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight").scales
    _set_weights(tmp_path / "m", {**_weights(tmp_path / "m"), "strategy": None})
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight").scales, expected)


@pytest.mark.parametrize("keys", [{"checkpoint_format": "gptq", "format": "gptq_v2"},
                                  {"checkpoint_format": "gptq_v2", "format": "gptq"}])
def test_two_keys_for_the_form_must_agree(tmp_path: Path, keys: dict[str, str]) -> None:
    write_int4_checkpoint(tmp_path / "m", "gptq", **SIZES)
    configure(tmp_path / "m", **keys)
    with pytest.raises(ConfigError, match="checkpoint_format = .* and quantization_config.format = .* contradict each "
                                          "other: gptq stores zeros less one"):
        open_checkpoint(tmp_path / "m")
    for agreed in ({"checkpoint_format": None, "format": None}, {"checkpoint_format": None, "format": "gptq"},
                   {"checkpoint_format": "gptq", "format": "gptq"}):
        configure(tmp_path / "m", **agreed)
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(("kind", "file", "content", "words"), [
    ("gptq", "quantize_config.json", {"checkpoint_format": "gptq_v2"}, ["'gptq'", "'gptq_v2'", "zeros less one"]),
    ("gptq_v2", "quantize_config.json", {"format": "gptq"}, ["'gptq_v2'", "format = 'gptq'"]),
    ("gptq", "quantize_config.json", {"bits": 8}, ["bits = 4", "bits = 8"]),
    ("gptq", "quantize_config.json", {"group_size": 32}, ["group_size = 128", "group_size = 32"]),
    ("gptq", "quantize_config.json", {"sym": True}, ["sym = False", "sym = True"]),
    ("awq", "quant_config.json", {"q_group_size": 64, "w_bit": 4}, ["group_size = 128", "q_group_size = 64"]),
    ("awq", "quant_config.json", {"version": "GEMV"}, ["version = 'gemm'", "version = 'GEMV'"]),
    ("awq", "quant_config.json", {"zero_point": False}, ["zero_point = True", "zero_point = False"]),
])
def test_a_file_beside_that_says_otherwise_is_refused(tmp_path: Path, kind: str, file: str, content: dict[str, Any],
                                                      words: list[str]) -> None:
    write_int4_checkpoint(tmp_path / "m", kind, **SIZES)
    agreed = {"quant_method": kind.removesuffix("_v2"), "bits": 4, "w_bit": 4, "group_size": 128, "q_group_size": 128,
              "version": "GEMM", "meta": 1}
    write_json(tmp_path / "m" / file, agreed)
    open_checkpoint(tmp_path / "m")
    write_json(tmp_path / "m" / file, content)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(tmp_path / "m")
    for word in ("config.json and " + file, *words):
        assert word in str(caught.value)


def test_no_form_at_all_is_the_first(tmp_path: Path) -> None:
    write_int4_checkpoint(tmp_path / "m", "gptq", **SIZES)
    configure(tmp_path / "m", checkpoint_format=None)
    write_json(tmp_path / "m/quantize_config.json", {"checkpoint_format": "gptq_v2"})
    with pytest.raises(ConfigError, match="checkpoint_format = 'gptq' and checkpoint_format = 'gptq_v2'"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(("form", "stored", "words"), [
    ("gptq", 0x77777777, None), ("gptq_v2", 0x88888888, None),
    ("gptq", 0x88888888, "holds zeros of 9, .* sym true, .* checkpoint_format 'gptq_v2' would make 8"),
    ("gptq_v2", 0x77777777, "holds zeros of 7, .* sym true, .* checkpoint_format 'gptq' would make 8"),
    ("gptq", 0x77777776, "holds zeros of 7 to 8, .* sym true"),
    ("gptq", 0x33333333, "holds zeros of 4, .*so that all are 8. Ask"),
])
def test_sym_true_means_zeros_of_eight(tmp_path: Path, form: str, stored: int, words: str | None) -> None:
    """Of the two forms the wrong one gives 7 or 9: the one place where a wrong key can be found."""
    _, tensors = write_int4_checkpoint(tmp_path / "m", "gptq", **SIZES)
    configure(tmp_path / "m", sym=True, checkpoint_format=form)
    change(tmp_path / "m", tensors, {name: np.full_like(value, np.uint32(stored).view(np.int32))
                                     for name, value in tensors.items() if name.endswith("qzeros")})
    if words is None:
        assert (open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight").zeros == 8).all()
    else:
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(tmp_path / "m")


def test_compressed_tensors_that_say_symmetric_or_not(tmp_path: Path) -> None:
    _, stored = write_int4_checkpoint(tmp_path / "m", "compressed", **SIZES)
    change(tmp_path / "m", stored, {f"{LAYER}.weight_zero_point": None})
    with pytest.raises(CheckpointError, match="q_proj.weight_zero_point is not there, but .* symmetric false"):
        open_checkpoint(tmp_path / "m")
    change(tmp_path / "m", stored, {})
    weights = {**_weights(tmp_path / "m"), "symmetric": True}
    _set_weights(tmp_path / "m", weights)
    with pytest.raises(CheckpointError, match="zero_point holds zeros of 0 to 15, but .* symmetric true"):
        open_checkpoint(tmp_path / "m")
    change(tmp_path / "m", stored, {name: None for name in stored if name.endswith("zero_point")})
    assert (open_checkpoint(tmp_path / "m").read(f"{LAYER}.weight").zeros == 8).all()


@pytest.mark.parametrize("kind", ["gptq", "compressed"])
def test_an_order_that_is_promised_must_be_there(tmp_path: Path, kind: str) -> None:
    """Without a g_idx nobody knows which group an input belongs to."""
    _, stored = write_int4_checkpoint(tmp_path / "m", kind, **SIZES)
    if kind == "gptq":
        configure(tmp_path / "m", desc_act=True)
        open_checkpoint(tmp_path / "m")             # in order, by the tensors
    else:
        _set_weights(tmp_path / "m", {**_weights(tmp_path / "m"), "actorder": "group"})
    change(tmp_path / "m", stored, {name: None for name in stored if name.endswith("g_idx")})
    with pytest.raises(CheckpointError, match="g_idx is not there, but .* the inputs were reordered"):
        open_checkpoint(tmp_path / "m")


def test_groups_that_differ_in_zeros_are_refused(tmp_path: Path) -> None:
    write_int4_checkpoint(tmp_path / "m", "compressed", **SIZES)
    groups = json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]["config_groups"]
    other = {**groups["group_0"], "weights": {**groups["group_0"]["weights"], "symmetric": True}}
    configure(tmp_path / "m", config_groups={**groups, "group_1": other})
    with pytest.raises(ConfigError, match="config_groups differ in symmetric or actorder"):
        open_checkpoint(tmp_path / "m")


def _weights(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    return weights


def _set_weights(folder: Path, weights: dict[str, Any]) -> None:
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    configure(folder, config_groups={**groups, "group_0": {**groups["group_0"], "weights": weights}})


Q, P = LAYER + ".", LAYER + ".weight_"
ORDER = np.random.default_rng(0).permutation(np.arange(256) // 128).astype(np.int32)


@pytest.mark.parametrize(("kind", "tensors", "words"), [
    ("awq", {Q + "qzeros": None}, [Q + "qweight", "qzeros", "incomplete"]),
    ("awq", {Q + "scales": None}, [Q + "scales", "incomplete"]),
    ("gptq", {Q + "qweight": None}, [Q, "I32"]),
    ("awq", {Q + "scales": np.ones((4, 256), np.float16)}, [Q + "scales is F16[4, 256]", "[2, 256]"]),
    ("awq", {Q + "scales": np.ones((2, 256), np.int32)}, [Q + "scales is stored as I32", "F16, BF16, F32"]),
    ("gptq", {Q + "qzeros": np.ones((2, 256), np.int32)}, [Q + "qzeros", "[2, 32]"]),
    ("awq", {Q + "qweight": np.ones((256, 32), np.float16)}, [Q + "qweight is F16", "I32"]),
    ("awq", {Q + "qweight": np.ones((200, 32), np.int32)}, [Q + "qweight", "200 inputs", "multiples of 128"]),
    ("gptq", {Q + "g_idx": ORDER}, [Q + "g_idx", "desc_act"]),
    ("gptq", {Q + "g_idx": ORDER[:9]}, [Q + "g_idx is I32[9]", "I32[256]"]),
    ("compressed", {P + "scale": None}, [P + "packed", P + "scale", "incomplete"]),
    ("compressed", {P + "scale": np.ones((2, 256), np.float16)}, [P + "scale is F16[2, 256]", "[256, 2]"]),
    ("compressed", {P + "zero_point": np.ones((2, 32), np.int32)}, [P + "zero_point", "[32, 2]"]),
    ("compressed", {P + "g_idx": ORDER}, [P + "g_idx", "desc_act"]),
    ("awq", {Q + "weight": np.ones((256, 256), np.float16)}, ["stored twice"]),
    ("awq", {Q + "qweight": np.ones((256, 16), np.int32), Q + "qzeros": np.ones((2, 16), np.int32),
             Q + "scales": np.ones((2, 128), np.float16)}, [Q + "weight is [128, 256]", "expected [256, 256]"]),
])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, kind: str, tensors: dict[str, Any], words: list[str]) -> None:
    _, stored = write_int4_checkpoint(tmp_path / "m", kind, **SIZES)
    change(tmp_path / "m", stored, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "m")
    for word in words:
        assert word in str(caught.value)


def test_scales_must_be_finite(tmp_path: Path) -> None:
    _, stored = write_int4_checkpoint(tmp_path / "m", "awq", **SIZES)
    scales = stored[Q + "scales"].copy()
    scales[1, 7] = np.nan
    change(tmp_path / "m", stored, {Q + "scales": scales})
    with pytest.raises(CheckpointError, match="q_proj.scales holds nan"):
        open_checkpoint(tmp_path / "m").read(Q + "weight")


def test_a_quantised_head_beside_a_float_table(tmp_path: Path) -> None:
    _, stored = write_int4_checkpoint(tmp_path / "m", "awq", **SIZES)
    head = {f"lm_head.{part}": np.resize(stored[Q + part], (len(stored[Q + part]), columns))
            for part, columns in (("qweight", 64), ("qzeros", 64), ("scales", 512))}
    change(tmp_path / "m", stored, {"lm_head.weight": None, **head})
    checkpoint = open_checkpoint(tmp_path / "m")
    assert not checkpoint.config.tie_embeddings and checkpoint.tensors["lm_head.weight"].format.name == "q4_128"
    assert checkpoint.read("lm_head.weight").shape == (512, 256)
