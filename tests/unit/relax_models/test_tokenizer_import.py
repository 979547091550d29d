"""Tokenizer files of a Hugging Face folder: templates, special tokens, end tokens, BOS, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from relaxpack.errors import CheckpointError, TokenizerError
from relaxpack.relax_models.checkpoint import open_checkpoint
from tests.helpers.tiny_checkpoints import CHAT_TEMPLATE, END, TURN_END, tokenizer_json, write_checkpoint, write_json

PLAIN = "{{ messages[0]['content'] }}"
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools }}"}]


def with_bos() -> str:
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[
        ("<|endoftext|>", END)])
    return tokenizer.to_str()


def test_assets(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assets = open_checkpoint(folder).assets
    assert assets.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert "tokenizer_config.json" in assets.files
    assert assets.chat_template == CHAT_TEMPLATE and assets.named_templates == {"default": CHAT_TEMPLATE}
    assert assets.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    assert (assets.bos_token_id, assets.add_bos, assets.end_token_ids) == (END, False, (END, TURN_END))


def test_template_file(tmp_path: Path) -> None:
    """Qwen3-2507 style: only chat_template.jinja."""
    folder = write_checkpoint(tmp_path / "m", chat_template=None)
    (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.assets.chat_template == PLAIN and not checkpoint.audit.warnings
    assert checkpoint.assets.files["chat_template.jinja"] == PLAIN.encode()


@pytest.mark.parametrize(("key", "warned"), [(CHAT_TEMPLATE, True), (PLAIN, False), (NAMED[1:], True)])
def test_template_file_wins_over_the_key(tmp_path: Path, key: Any, warned: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", tokenizer_config={"chat_template": key})
    (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.assets.chat_template == PLAIN
    assert any("the file wins" in w for w in checkpoint.audit.warnings) is warned


def test_named_templates(tmp_path: Path) -> None:
    assets = open_checkpoint(write_checkpoint(tmp_path / "m", tokenizer_config={"chat_template": NAMED})).assets
    assert assets.chat_template == PLAIN
    assert assets.named_templates == {"default": PLAIN, "tool_use": "{{ tools }}"}


def test_additional_template_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    assert open_checkpoint(folder).assets.named_templates == {"default": CHAT_TEMPLATE, "tool_use": "T"}


def test_no_template(tmp_path: Path) -> None:
    assert open_checkpoint(write_checkpoint(tmp_path / "m", chat_template=None)).assets.chat_template is None


def test_malformed_named_template(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tokenizer_config={"chat_template": [{"name": "default"}]})
    with pytest.raises(TokenizerError, match="must have name and template"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("config_eos", "generation_eos", "expected"), [
    (TURN_END, None, {END, TURN_END}),
    (END, [END], {END, TURN_END}),           # the template ends turns with <|im_end|>
    ([END, 70], 71, {END, TURN_END, 70, 71}),
])
def test_end_tokens_are_joined(tmp_path: Path, config_eos: Any, generation_eos: Any, expected: set[int]) -> None:
    folder = write_checkpoint(tmp_path / "m", eos_token_id=config_eos,
                              generation_config={"eos_token_id": generation_eos},
                              tokenizer_config={"eos_token": "<|endoftext|>"})
    assert set(open_checkpoint(folder).assets.end_token_ids) == expected


def test_special_tokens_as_objects_and_in_the_older_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tokenizer_config={
        "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False}, "eos_token": None})
    data = json.loads((folder / "tokenizer_config.json").read_text())
    del data["pad_token"]
    write_json(folder / "tokenizer_config.json", data)
    write_json(folder / "special_tokens_map.json", {
        "pad_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"})
    assets = open_checkpoint(folder).assets
    assert assets.special_tokens == {"bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"}  # null wins
    assert assets.bos_token_id == 1


def test_other_named_tokens_reach_the_templates(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", tokenizer_config={"tool_token": "<|im_start|>"})
    assert open_checkpoint(folder).assets.special_tokens["tool_token"] == "<|im_start|>"


def test_tokens_without_embedding_rows_are_reported(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", vocab_size=500))
    assert any("12 tokens beyond the 500 embedding rows" in w for w in checkpoint.audit.warnings)


def test_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    """An id in config.json beyond the vocabulary is refused, not passed on."""
    with pytest.raises(CheckpointError, match="600.*512"):
        open_checkpoint(write_checkpoint(tmp_path / "m", eos_token_id=600))


@pytest.mark.parametrize(("post_processor", "config", "add_bos", "warned"), [
    (False, {}, False, False),
    (True, {}, True, False),
    (True, {"add_bos_token": True}, True, False),
    (True, {"add_bos_token": False}, True, True),
    (True, {"add_bos_token": False, "tokenizer_class": "LlamaTokenizerFast"}, False, True),
    (False, {"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}, True, True),
    (False, {"add_bos_token": True}, False, True),
    (True, {"add_eos_token": True}, True, True),
])
def test_add_bos(tmp_path: Path, post_processor: bool, config: dict[str, Any], add_bos: bool, warned: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", tokenizer_config=config)
    if post_processor:
        (folder / "tokenizer.json").write_text(with_bos(), encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.assets.add_bos is add_bos and bool(checkpoint.audit.warnings) is warned


@pytest.mark.parametrize(("others", "words"), [
    ((), "the tokenizer is missing; incomplete download"),
    (("tokenizer.model",), r"only tokenizer\.model; write one with transformers"),
    (("vocab.json", "merges.txt"), r"only vocab\.json, merges\.txt"),
])
def test_no_tokenizer(tmp_path: Path, others: tuple[str, ...], words: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    for name in others:
        (folder / name).write_text("x")
    with pytest.raises(TokenizerError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}', tokenizer_json()[:5000]])
def test_broken_tokenizer(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("config", "words"), [
    ({"eos_token": "<|nowhere|>"}, r"eos_token = '<\|nowhere\|>' is not in tokenizer\.json"),
    ({"eos_token": {"text": "x"}}, "has no content"),
    ({"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}, "files of different models are mixed"),
    ({"bos_token": None, "add_bos_token": True}, "add_bos_token is true but no bos_token"),
])
def test_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder = write_checkpoint(tmp_path / "m", tokenizer_config=config, bos_token_id=None)
    with pytest.raises(TokenizerError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_opens_the_same_folder(tmp_path: Path, family: str) -> None:
    """The tiny checkpoints are real ones: transformers reads the same ids from them. (Its AutoTokenizer would replace
    the splitting rule of tokenizer.json by Qwen2's own for that model_type.)"""
    transformers = pytest.importorskip("transformers", reason="reference: pip install --group reference")
    folder = write_checkpoint(tmp_path / "m", family)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = Tokenizer.from_str(open_checkpoint(folder).assets.files["tokenizer.json"].decode())
    for text in ("Hello world 123", "<|im_start|>user\nhi<|im_end|>", "ďábelské 今天"):
        assert ours.encode(text).ids == reference(text)["input_ids"]
