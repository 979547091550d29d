"""Structured output: grammars compiled with llguidance to constraints on the next token.

Needs the extra `grammar`. Compiling happens on the thread that asks; masks are computed by the executor while the model
runs. What the HTTP API calls these grammars is the server's business.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxpack.errors import EnvironmentProblem, RequestError
from relaxpack.runtime.sampler import GRAMMAR_LIMIT
from relaxpack.runtime.sampling_params import Grammar

_KEPT = 64      # compiled grammars kept for reuse


class GrammarCompiler:
    """`Grammar` to `GrammarConstraint`, for one tokenizer. Safe to share between threads; give it to an Engine as
    `make_constraint`."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        """`vocab_size`: width of the model's logits. `end_token_ids`: allowed where the grammar may end."""
        try:
            import llguidance
        except ImportError as error:
            raise EnvironmentProblem("structured output needs the package llguidance: pip install 'relaxpack[grammar]'"
                                     ) from error
        self._library: Any = llguidance
        self._vocab_size = vocab_size
        self._tokenizer_json = tokenizer_json
        self._end_token_ids = sorted(end_token_ids)
        self._tokenizer: Any = None                         # built on first use: takes about a second
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, grammar: Grammar) -> GrammarConstraint:
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._compile(grammar)
                self._compiled[grammar] = matcher
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarConstraint(matcher.deep_copy(), self._vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._library.LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size,
                                                        eos_token=self._end_token_ids or None)
        try:
            matcher = self._library.LLMatcher(self._tokenizer, self._source(grammar), log_level=0)
        except ValueError as error:
            raise RequestError(f"the {grammar.kind} grammar is not valid: {error}", grammar.param) from error
        if matcher.is_error():
            raise RequestError(f"the {grammar.kind} grammar is not valid: {_reason(matcher)}", grammar.param)
        if not GrammarConstraint(matcher.deep_copy(), self._vocab_size).mask().any():      # {"$ref": "#"}, say
            raise RequestError(f"the {grammar.kind} grammar is not valid: no text satisfies it", grammar.param)
        return matcher

    def _source(self, grammar: Grammar) -> str:
        matcher, source = self._library.LLMatcher, grammar.source
        if grammar.kind == "choice":
            options = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in source)
            return matcher.grammar_from_lark(f"start: {options}")
        assert isinstance(source, str), "checked by Grammar"
        if grammar.kind == "json":
            return matcher.grammar_from_json_schema('{"type": "object"}')
        if grammar.kind == "json_schema":
            return matcher.grammar_from_json_schema(source)
        if grammar.kind == "regex":
            return matcher.grammar_from_regex(source)
        return matcher.grammar_from_lark(source)


class GrammarConstraint:
    """One sequence's place in its grammar: a `sampler.Constraint`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), np.int32)

    def mask(self) -> np.ndarray:
        """bool [vocab_size]."""
        return np.unpackbits(self.bits(), bitorder="little")[:self._vocab_size].view(np.bool_)

    def bits(self) -> np.ndarray:
        """Good until the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():        # a dead end or a limit, which the library would have the end token hide
            self._words[:] = 0
        return self._words.view(np.uint8)

    def accept(self, token_id: int) -> bool:
        if self._matcher.consume_token(token_id):
            return True
        reason = _reason(self._matcher)
        if "doesn't satisfy the grammar" in reason:
            return False
        raise RequestError(_too_complex(reason))            # a limit of the library's; the mask had allowed the token

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def trouble(self) -> str | None:
        if not self._matcher.is_error() or (reason := _reason(self._matcher)).startswith("NoExtension"):
            return None
        return _too_complex(reason)

    def fork(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._vocab_size)


def _too_complex(reason: str) -> str:
    return f"{GRAMMAR_LIMIT}: {reason}"


def _reason(matcher: Any) -> str:
    """The first line of a matcher's error, and what the parser of regular expressions says further down."""
    first, *rest = matcher.get_error().strip().splitlines() or ["no reason given"]
    return " ".join([first, *(line.removeprefix("error: ") for line in rest if line.startswith("error: "))])
