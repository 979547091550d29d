"""Small real tokenizers for tests of the text side, trained in milliseconds on a fixed corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from relaxpack.runtime.step_plan import StepPlan
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
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return backend.to_str()


@lru_cache
def sentencepiece_json(metaspace: bool = False) -> str:
    """Llama-2 style: bytes as <0xXX>, a space in front of every text. `metaspace`: the newer form of the same."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=_special("<unk>", "<s>", "</s>"),
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


class ScriptedRunner:
    """A `ModelRunner` whose next token is `script(all token ids so far)`. It reads the ids back from its pages, so
    it notices pages that were mixed up, and counts the tokens it computed."""

    page_size, num_pages, max_batch, prefill_chunk = 16, 200, 4, 64

    def __init__(self, tokenizer: Tokenizer, script: Callable[[list[int]], int], max_context: int = 512) -> None:
        self.vocab_size, self.max_context = tokenizer.vocab_size, max_context
        self.computed: list[int] = []          # tokens of each step
        self._script = script
        self._stored = np.full((self.num_pages, self.page_size), -1)

    def forward(self, plan: StepPlan) -> np.ndarray:
        rows = []
        for source, destination in plan.copies:
            self._stored[destination] = self._stored[source]
        for step in plan.sequences:
            places = np.arange(step.start, step.start + len(step.token_ids))
            pages = np.asarray(step.page_ids)
            self._stored[pages[places // self.page_size], places % self.page_size] = step.token_ids
            ids = self._stored[pages].ravel()[:step.start + len(step.token_ids)].tolist()
            assert -1 not in ids
            rows += [self._logits(ids[:step.start + offset + 1]) for offset in step.logit_offsets]
        self.computed.append(sum(len(step.token_ids) for step in plan.sequences))
        return np.stack(rows) if rows else np.empty((0, self.vocab_size), np.float32)

    def _logits(self, ids: list[int]) -> np.ndarray:
        logits = np.linspace(0, 1, self.vocab_size, dtype=np.float32)
        logits[self._script(ids)] = 20
        return logits


def answering(tokenizer: Tokenizer, answer: Callable[[str], str], end: int) -> Callable[[list[int]], int]:
    """A script that answers the text of the prompt, as far as the last "assistant" or the ids at the first call."""
    spoken: dict[tuple[int, ...], list[int]] = {}

    def script(ids: list[int]) -> int:
        for length in range(len(ids), 0, -1):
            planned = spoken.get(tuple(ids[:length]))
            if planned is not None and planned[:len(ids) - length] == ids[length:]:
                return planned[len(ids) - length] if len(ids) - length < len(planned) else end
        text = tokenizer.decode(ids, skip_special=False)
        spoken[tuple(ids)] = [*tokenizer.encode(answer(text), add_bos=False), end]
        return spoken[tuple(ids)][0]
    return script
