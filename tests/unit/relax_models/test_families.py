"""config.json of every family: what each key means, what is refused, and that the audit answers for every key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxpack.errors import CheckpointError, ConfigError
from relaxpack.relax_models.audit import ConfigAudit, KeyReader
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.relax_models.config import ModelConfig, expected_tensors
from relaxpack.relax_models.families import find_family, read_config
from tests.helpers.tiny_checkpoints import FAMILIES, make_config, make_tensors, write_checkpoint, write_json


def read(family: str, **changes: Any) -> tuple[ModelConfig, ConfigAudit]:
    audit = ConfigAudit()
    reader = KeyReader("config.json", make_config(family, **changes), audit)
    config, _ = read_config(reader, find_family(reader))
    for key in ("eos_token_id", "bos_token_id"):
        reader.ignore(key, "read elsewhere")
    reader.finish()
    return config, audit


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_tensors_are_those_of_the_checkpoint(family: str) -> None:
    config, _ = read(family)
    tensors = make_tensors(make_config(family))
    assert {name: value.shape for name, value in tensors.items()} == expected_tensors(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_classes(family: str) -> None:
    """The same keys with only the sizes given: every default must be that of the transformers class."""
    transformers = pytest.importorskip("transformers", reason="reference: pip install --group reference")
    torch = pytest.importorskip("torch", reason="reference: pip install --group reference")
    config = {k: v for k, v in make_config(family).items() if k not in ("rms_norm_eps", "tie_word_embeddings",
                                                                        "max_position_embeddings", "rope_theta")}
    ours, _ = read(family, **dict.fromkeys(set(make_config(family)) - set(config), ...))
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
            "gemma": "Gemma"}[config["model_type"]]
    theirs = getattr(transformers, f"{kind}Config")(**config)
    assert (ours.max_position, ours.norm_epsilon, ours.tie_embeddings, ours.num_kv_heads) == (
        theirs.max_position_embeddings, theirs.rms_norm_eps, theirs.tie_word_embeddings, theirs.num_key_value_heads)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(theirs)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == expected_tensors(ours)


@pytest.mark.parametrize("changes", [{}, {"hidden_act": "gelu"}, {"hidden_activation": None}, {"hidden_act": ...},
                                     {"hidden_activation": "gelu_pytorch_tanh"}], ids=str)
def test_gemma_computes_one_gelu(changes: dict[str, Any]) -> None:
    config, _ = read("gemma", **changes)
    assert (config.activation, config.embedding_scale, config.tie_embeddings) == ("gelu_tanh", 8.0, True)


def test_norms_that_are_stored_less_one(tmp_path: Path) -> None:
    """In float32 whatever the file's dtype is: 1 + w does not fit bfloat16."""
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", "gemma", dtype="bfloat16"))
    stored = make_tensors(make_config("gemma"))
    for name in ("model.norm.weight", "model.layers.1.post_attention_layernorm.weight"):
        value = checkpoint.read(name)
        assert isinstance(value, np.ndarray) and value.dtype == np.float32
        assert checkpoint.tensors[name].format.name == "f32"
        np.testing.assert_array_equal(value, stored[name].astype(ml_dtypes.bfloat16).astype(np.float32) + 1)
    assert checkpoint.tensors["model.embed_tokens.weight"].format.name == "bf16"


def test_head_dim_is_not_hidden_over_heads() -> None:
    config, _ = read("head_dim")  # hidden 96, 4 heads of 32
    shapes = expected_tensors(config)
    assert config.head_dim == 32 and shapes["model.layers.0.self_attn.q_proj.weight"] == (128, 96)
    assert config.rope.rotary_dim == 32


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rope_scaling", "sliding_window", "rms_norm_eps",
                                 "attention_bias", "mlp_bias", "pretraining_tp", "something_unknown"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_null_keys_mean_the_default(family: str, key: str) -> None:
    changes: dict[str, Any] = {key: None}
    if key == "num_key_value_heads":
        config, _ = read(family, **changes)
        assert config.num_kv_heads == config.num_heads
    elif key == "head_dim":
        assert read(family, **changes)[0].head_dim == 16
    elif key == "sliding_window":
        assert read(family, **changes)[0].layer_windows == (None, None)
    else:
        config, audit = read(family, **changes)
        assert config.head_dim and audit.status("config.json", key) in ("used", "ignored")


@pytest.mark.parametrize(("family", "changes", "windows"), [
    ("mistral", {}, (24, 24)),
    ("mistral", {"sliding_window": ...}, (4096, 4096)),
    ("mistral", {"sliding_window": None}, (None, None)),
    ("qwen2", {}, (None, None)),
    ("qwen2", {"use_sliding_window": True}, (None, 32)),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (32, 32)),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": ...}, (None, None)),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8,
               "layer_types": ["sliding_attention", "full_attention"]}, (8, None)),
    ("qwen3", {"layer_types": ["full_attention", "full_attention"]}, (None, None)),
    ("llama", {"sliding_window": 8}, (None, None)),
])
def test_windows(family: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(family, **changes)[0].layer_windows == windows


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("llama", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, ["GPT2LMHeadModel", "qwen3"]),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "known"]),
    ("llama", {"model_type": "mixtral"}, ["'mixtral'", "contradicts"]),
    ("llama", {"architectures": ..., "model_type": "mamba"}, ["'mamba'", "llama"]),
    ("llama", {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
    ("gemma", {"hidden_act": "silu"}, ["hidden_act", "'silu'", "'gelu_pytorch_tanh'"]),
    ("gemma", {"hidden_activation": "relu"}, ["hidden_activation", "'relu'", "'gelu_pytorch_tanh'"]),
    ("gemma", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
    ("gemma", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0", "--ignore-config-key"]),
    ("gemma", {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}, ["Gemma2ForCausalLM", "gemma"]),
    ("llama", {"hidden_size": ...}, ["'hidden_size'", "missing"]),
    ("llama", {"hidden_size": "64"}, ["'hidden_size'", "'64'", "int"]),
    ("llama", {"num_hidden_layers": 0}, ["number of layers", "got 0"]),
    ("llama", {"num_attention_heads": 5}, ["num_attention_heads = 5", "head_dim"]),
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 3}, ["8", "3", "multiple"]),
    ("llama", {"rms_norm_eps": 2.0}, ["epsilon", "2.0"]),
    ("llama", {"rope_interleaved": True}, ["rope_interleaved", "True"]),
    ("llama", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = 50.0", "--ignore-config-key"]),
    ("mistral", {"attention_bias": True}, ["attention_bias", "True"]),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "mistral"]),
    ("qwen2", {"attention_bias": False}, ["attention_bias", "False"]),
    ("qwen3", {"layer_types": ["full_attention"]}, ["1 entries", "2 layers"]),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["no window"]),
    ("llama", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
])
def test_refused(family: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(family, **changes)
    for word in words:
        assert word in str(caught.value)


def test_audit_answers_for_every_key(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "qwen2", tokenizer_config={"padding_side": "left"})
    audit = open_checkpoint(folder).audit
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        keys = json.loads((folder / file).read_text())
        assert {k for k in keys if audit.status(file, k) is None} == set()
    assert audit.status("config.json", "hidden_size") == "used"
    assert audit.status("config.json", "initializer_range") == "ignored"
    ignored = [e for e in audit.to_json()["entries"] if e["status"] == "ignored"]
    assert ignored and all(e["why"] for e in ignored)
    json.dumps(audit.to_json())


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_unknown_key_is_refused_unless_accepted(tmp_path: Path, file: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    data = json.loads((folder / file).read_text())
    write_json(folder / file, {**data, "mystery_scale": 3.5})
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(folder)
    assert file in str(caught.value) and "mystery_scale = 3.5" in str(caught.value)
    accepted = open_checkpoint(folder, ignore_keys=("mystery_scale",))
    assert accepted.audit.status(file, "mystery_scale") == "ignored"
    assert any("mystery_scale" in w for w in accepted.audit.warnings)


def test_bad_json_names_file_and_line(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text('{\n  "hidden_size": 64,\n  "oops"\n}\n')
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON.* line 4"):
        open_checkpoint(folder)


def test_generation_defaults(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", generation_config={
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "min_p": None,
        "eos_token_id": 1, "num_beams": 4, "no_repeat_ngram_size": 0})
    checkpoint = open_checkpoint(folder)
    g = checkpoint.generation
    assert (g.do_sample, g.temperature, g.top_k, g.top_p, g.repetition_penalty, g.min_p) == (
        True, 0.6, 20, 0.95, 1.05, None)
    assert 1 in checkpoint.assets.end_token_ids
    assert [w for w in checkpoint.audit.warnings if "num_beams = 4" in w]
    assert not [w for w in checkpoint.audit.warnings if "no_repeat_ngram_size" in w]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "1" * 10_000 + "}"])
def test_json_that_no_parser_stands_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is not a sane JSON file"):
        open_checkpoint(tmp_path)
