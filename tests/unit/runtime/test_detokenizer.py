"""Streaming text: valid UTF-8 in every piece, the join equal to the whole, the library's text for valid ids."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from relaxpack.errors import TokenizerError
from relaxpack.runtime.detokenizer import Detokenizer, TokenBytes, byte_level_alphabet
from tests.helpers.text import byte_level_json, chatml, llama2, sentencepiece_json

TEXTS = ["ďábelské ódy", "👨‍👩‍👧", "今天天气如何", "plain words", "  two  spaces ", "\n\tx", "é" * 5,
         "¿Qué?", "\U0001f1e8\U0001f1ff"]


def test_byte_level_alphabet_is_the_one_of_the_library():
    assert set(byte_level_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [chatml, llama2])
def test_text_streams_token_by_token(make, text):
    tokenizer = make()
    ids = tokenizer.encode(text, add_bos=False)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add([i]) for i in ids] + [detokenizer.finish()]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("source", [byte_level_json(), sentencepiece_json()])
@pytest.mark.parametrize("text", TEXTS)
def test_equals_the_library_on_valid_ids(source, text):
    tokenizer = chatml() if source == byte_level_json() else llama2()
    library = tokenizers.Tokenizer.from_str(source)
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == library.decode(ids)


def test_byte_fallback_holds_the_first_byte():
    tokenizer = llama2()
    first, second = tokenizer.token_id("<0xC4>"), tokenizer.token_id("<0x8F>")
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add([first]), detokenizer.add([second])] == ["", "ď"]


def test_unfinished_character_at_the_end_is_dropped_in_both_modes():
    tokenizer = llama2()
    ids = [*tokenizer.encode("kind", add_bos=False), tokenizer.token_id("<0xC4>")]
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.add([i]) for i in ids) + detokenizer.finish() == tokenizer.decode(ids) == "kind"


def test_special_token_between_two_halves_of_a_character():
    tokenizer = llama2()
    halves = tokenizer.token_id("<0xC4>"), tokenizer.token_id("<0x8F>")
    assert tokenizer.decode([halves[0], 2, halves[1]]) == "ď"


def test_special_tokens_are_shown_on_demand():
    tokenizer = chatml()
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode([1, 2], skip_special=False) == "<|im_start|><|im_end|>"


def test_ids_without_a_token_have_no_text():
    assert chatml().decode([10**6]) == ""


def test_leading_space_is_stripped_in_an_answer_and_kept_in_a_continuation():
    tokenizer = llama2()
    ids = tokenizer.encode("fine", add_bos=False)
    assert tokenizer.decode(ids) == "fine"
    assert tokenizer.decode(ids, continuation=True) == " fine"
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.add([]) + detokenizer.add(ids) == "fine"


def test_metaspace_decoder_strips_as_the_library_does():
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"▁": 0, "▁▁a": 1, "a▁b": 2, "▁c": 3}, []))
    library.decoder = tokenizers.decoders.Metaspace()
    table = TokenBytes({0: "▁", 1: "▁▁a", 2: "a▁b", 3: "▁c"}, json.loads(library.to_str())["decoder"])
    for ids in ([1, 2, 3], [0, 1], [3, 3], [2]):
        detokenizer = Detokenizer(table)
        assert detokenizer.add(ids) + detokenizer.finish() == library.decode(ids)


def test_unknown_decoder_is_refused_by_name():
    with pytest.raises(TokenizerError, match="WordPiece"):
        TokenBytes({}, {"type": "WordPiece", "prefix": "##"})


@pytest.mark.parametrize("make", [chatml, llama2])
def test_any_split_of_any_ids_gives_the_whole_text(make):
    tokenizer = make()
    size = tokenizer.vocab_size

    @given(st.lists(st.lists(st.integers(0, size + 3), max_size=5), max_size=8))
    def check(chunks):
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.add(chunk) for chunk in chunks] + [detokenizer.finish()]
        ids = [i for chunk in chunks for i in chunk]
        assert "".join(pieces) == tokenizer.decode(ids)
        raw = b"".join(tokenizer.token_bytes[i] for i in ids if i not in tokenizer.special_ids)
        assert "".join(pieces).count("�") <= raw.count(b"\xef\xbf\xbd")   # only one that the model wrote itself
        for piece in pieces:
            piece.encode("utf-8")

    check()
