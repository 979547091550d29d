"""`SamplingParams`: how one request wants its tokens chosen and when it ends, checked on construction.

Limits that need a model (vocabulary size, context) are checked by the engine when the request is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from relaxpack.errors import RequestError

GREEDY_BELOW = 1e-5     # a temperature under this is greedy: dividing by it would overflow float32


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match; `source` is a schema (JSON text), a regex, or a Lark grammar; "json" ignores it."""

    kind: Literal["json", "json_schema", "regex", "lark", "choice"]
    source: str | tuple[str, ...] = ""
    param: str = field(default="response_format", compare=False)    # the request's field, for errors

    def __post_init__(self) -> None:
        kinds = ("json", "json_schema", "regex", "lark", "choice")
        if self.kind not in kinds:
            raise RequestError(f"grammar kind must be one of {', '.join(kinds)}, got {self.kind!r}", self.param)
        if self.kind == "choice":
            ok = isinstance(self.source, tuple) and self.source and all(isinstance(c, str) and c for c in self.source)
            if not ok:
                raise RequestError("a choice grammar needs a tuple of non-empty strings", self.param)
        elif not isinstance(self.source, str):
            raise RequestError(f"a {self.kind} grammar needs its source as text", self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Filters apply in this order: penalties, bias, bans, temperature, top_k, top_p, min_p, typical_p; each one sees
    what the one before left. Logprobs are the model's own: before penalties, bias, bans and temperature."""

    temperature: float = 1.0
    top_k: int = 0                              # 0: off
    top_p: float = 1.0
    min_p: float = 0.0                          # keep tokens with p >= min_p * (largest p)
    typical_p: float = 1.0
    repetition_penalty: float = 1.0             # over prompt and output: logit / r if positive, else logit * r
    presence_penalty: float = 0.0               # over the output
    frequency_penalty: float = 0.0              # over the output, times the number of occurrences
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = () # token id sequences that must not be completed
    seed: int | None = None                     # same seed, same choices, alone or in a crowd
    n: int = 1
    max_tokens: int | None = None               # None: the rest of the context window
    min_tokens: int = 0                         # end and stop tokens are banned before this many
    stop: tuple[str, ...] = ()                  # stop strings; matched by the text layer, not by the engine
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False                    # the model's end tokens do not end the output
    logprobs: int | None = None                 # None: off; k: the chosen token's logprob and the k likeliest
    prompt_logprobs: int | None = None          # the same for every prompt token but the first
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _integer("top_k", self.top_k, low=0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("typical_p", self.typical_p, low=0.0, high=1.0, open_low=True)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _integer("n", self.n, low=1, high=128)
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0)
        self._freeze_collections()

    def _freeze_collections(self) -> None:
        bias = self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {type(bias).__name__}", "logit_bias")
        for token_id, value in bias.items():
            _integer("logit_bias", token_id, low=0, what="token id ")
            _number("logit_bias", value, low=-100.0, high=100.0)
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        for s in stop:
            if not isinstance(s, str) or not s:
                raise RequestError(f"stop strings must be non-empty text, got {s!r}", "stop")
        stop_ids = _tuple("stop_token_ids", self.stop_token_ids)
        for token_id in stop_ids:
            _integer("stop_token_ids", token_id, low=0)
        bad = tuple(tuple(w) for w in self.bad_words)
        for word in bad:
            if not word:
                raise RequestError("bad_words must not hold an empty sequence", "bad_words")
            for token_id in word:
                _integer("bad_words", token_id, low=0, what="token id ")
        frozen: dict[str, object] = {"logit_bias": dict(bias), "stop": stop, "stop_token_ids": stop_ids, "bad_words": bad}
        for field_name, frozen_value in frozen.items():
            object.__setattr__(self, field_name, frozen_value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError when a token id is outside the vocabulary of `vocab_size` entries."""
        named = {
            "logit_bias": self.logit_bias.keys(),
            "stop_token_ids": self.stop_token_ids,
            "bad_words": [t for word in self.bad_words for t in word],
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} holds token id {token_id}, but the vocabulary ends at {vocab_size - 1}", name)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise RequestError(f"{name} is {count}, but the vocabulary has {vocab_size} tokens", name)


def _number(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", name)
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}", name)


def _integer(name: str, value: int, low: int, high: int | None = None, what: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {what}{value!r}", name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {limit}, got {what}{value}", name)


def _tuple(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {values!r}", name)
    return tuple(values)
