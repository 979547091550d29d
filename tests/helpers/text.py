"""Small real tokenizers for tests of the text side, trained in milliseconds on a fixed corpus."""

from __future__ import annotations

import json
from functools import lru_cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from relaxpack.runtime.tokenizer import TextInfo, Tokenizer

CORPUS = ["The quick brown fox jumps over the lazy dog.", "user\nHello, how are you today?", "system\nYou are kind.",
          "assistant\nI am fine, thank you!\n\nAnd you?", "def f(x):\n    return x + 1\n", "1 2 3 4 5 67 890",
          "Příliš žluťoučký kůň úpěl ďábelské ódy", "今天天气如何", "👨‍👩‍👧 🙂", "<s> </s> im_end im_start <|"] * 3
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
          "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
          "{% endif %}")
LLAMA2 = ("{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
          "message['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + message['content'].strip() + ' ' "
          "+ eos_token }}{% endif %}{% endfor %}")


def _special(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False) for content in contents]


@lru_cache
def byte_level_json() -> str:
    """GPT-2 style, as SmolLM2, Llama 3 and Qwen have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return backend.to_str()


@lru_cache
def sentencepiece_json(metaspace: bool = False) -> str:
    """Llama-2 style: bytes as <0xXX>, a space in front of every text. `metaspace`: the newer form of the same."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=_special("<unk>", "<s>", "</s>"),
                                  initial_alphabet=["▁"], limit_alphabet=90)
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.train_from_iterator(CORPUS, trainer)
    source = json.loads(backend.to_str())
    vocabulary = source["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    return json.dumps(source)


def chatml(**changes: object) -> Tokenizer:
    """Byte-level tokenizer with the ChatML template."""
    values = {"chat_template": CHATML, "eos_token": "<|im_end|>", "end_token_ids": (2,)} | changes
    return Tokenizer(byte_level_json(), TextInfo.from_json(values))


def llama2(metaspace: bool = False) -> Tokenizer:
    """SentencePiece tokenizer with the Llama-2 template."""
    return Tokenizer(sentencepiece_json(metaspace), TextInfo.from_json(
        {"chat_template": LLAMA2, "bos_token": "<s>", "eos_token": "</s>", "bos_token_id": 1, "end_token_ids": [2],
         "add_bos": True}))
