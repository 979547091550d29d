"""Logits to token ids, for a whole batch at once in NumPy.

The mathematics is a function of (logits, settings, random numbers): rows do not influence each other, and the random
number of a choice depends on the sequence's seed and the token's place in its output only, so a request gets the same
choices alone or in a crowd. Requests and pages are not known here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import PromptScore, StepResult
from relaxpack.runtime.token_filters import FilterBatch, draw_filtered, top_candidates

NOT_FINITE = ("the model returned logits that are not finite; its activations overflowed or its weights are damaged "
              "(run `relaxpack verify` on the bundle)")
NOTHING_ALLOWED = "no token is allowed here: the grammar, bans and biases exclude all of them"
GRAMMAR_LIMIT = "the grammar is too complex to be followed any further"
OF_THE_REQUEST = (NOTHING_ALLOWED, GRAMMAR_LIMIT)      # how errors begin that the same request always meets
_CACHED_LOGITS = 1 << 19    # logits edited at once: 2 MiB, so that the passes over them stay in cache
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log-probability of a token under the model, and the likeliest tokens there, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Constraint(Protocol):
    """Says which tokens may come next (structured output)."""

    def mask(self) -> np.ndarray | None:
        """bool [vocabulary or fewer], True where allowed; None: no restriction now."""
        ...

    def bits(self) -> np.ndarray | None:
        """The same as uint8 of 8 tokens each, the first in the lowest bit; what is beyond the vocabulary does not matter."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by a token; False when it is not allowed. Raises RequestError where the grammar outgrew its library."""
        ...

    @property
    def complete(self) -> bool:
        """Nothing can follow: the output ends here."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the last mask allows nothing, where that is a limit and not the grammar's own end."""
        ...

    def fork(self) -> Constraint: ...


def nothing_allowed(state: SamplingState) -> str:
    """The error of a row that no token is left for."""
    return (state.constraint.trouble if state.constraint is not None else None) or NOTHING_ALLOWED


def mix64(x: int) -> int:
    """splitmix64's finalizer: every input bit changes every output bit with probability one half."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def sequence_key(seed: int | None, index: int) -> int:
    """Start of a sequence's random numbers; without a seed it is drawn from the system."""
    if seed is None:
        return secrets.randbits(64)
    return mix64((mix64(seed & _MASK64) + index * _GOLDEN) & _MASK64)


def uniforms(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """uint64 [r], uint64 [r] → float64 [r] in [0, 1), 53 random bits each."""
    x = keys + (counters + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SamplingState:
    """One sequence's settings and what they depend on. `token_ids` is the sequence's own, growing list."""

    __slots__ = ("_counted", "_counts", "_ids", "_places", "constraint", "edits_logits", "end_ids", "has_penalties", "key",
                 "num_prompt", "params", "plain_greedy", "token_ids")

    def __init__(
        self, params: SamplingParams, key: int, token_ids: list[int], num_prompt: int,
        end_ids: Iterable[int] = (), constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.key = key
        self.token_ids = token_ids
        self.num_prompt = num_prompt
        self.end_ids = sorted(end_ids)          # banned before min_tokens
        self.constraint = constraint
        self.has_penalties = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        self.edits_logits = bool(self.has_penalties or params.logit_bias or params.bad_words or params.min_tokens
                                 or constraint is not None)
        self.plain_greedy = params.greedy and not self.edits_logits and params.logprobs is None
        self._places: dict[int, int] = {}       # token id -> index in the arrays below
        self._ids = np.empty(64, np.int64)      # every token of the sequence, once
        self._counts = np.zeros(64, np.float32)  # times it is in the output
        self._counted = 0

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def token_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [u], float32 [u]: each token of prompt and output, and how often the output has it."""
        for place, token_id in enumerate(self.token_ids[self._counted:], self._counted):
            index = self._places.setdefault(token_id, len(self._places))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._counts[index] += place >= self.num_prompt
        self._counted = len(self.token_ids)
        used = len(self._places)
        return self._ids[:used], self._counts[:used]

    def banned(self, ahead: int = 0) -> list[int]:
        """Token ids that may not come next: ends before min_tokens, last tokens of bad words. `ahead`: output tokens that
        are drawn but not known yet; a bad word of several tokens needs all of them."""
        banned = list(self.end_ids) if self.num_output + ahead < self.params.min_tokens else []
        for word in self.params.bad_words:
            before = len(word) - 1
            if before == 0 or (before <= self.num_output and tuple(self.token_ids[-before:]) == word[:-1]):
                banned.append(word[-1])
        return banned


def sample(
    logits: np.ndarray, rows: Sequence[int], states: Sequence[SamplingState],
    prompt_scores: Sequence[PromptScore] = (), masks: dict[int, np.ndarray | None] | None = None,
) -> StepResult:
    """Choose one token per state from float32 `logits` [r, V], state i from row rows[i].

    `masks`: allowed tokens of the states with a constraint, by index, when the caller computed them ahead. Not-a-number
    logits fail their row and no other; `logits` is not changed.
    """
    result = StepResult(token_ids=[])
    if prompt_scores:
        result.prompt_logprobs = score(logits, [s.row for s in prompt_scores], [s.token_id for s in prompt_scores],
                                       [s.top for s in prompt_scores])
    if not states:
        return result
    whole = len(rows) == len(logits) and list(rows) == list(range(len(logits)))
    picked = logits if whole else logits[list(rows)]        # [n, V]
    peak_ids = picked.argmax(axis=1)                        # the first not-a-number, where there is one
    failed = ~np.isfinite(picked[np.arange(len(states)), peak_ids])
    token_ids = peak_ids
    careful = [i for i, s in enumerate(states) if not s.plain_greedy and not failed[i]]
    at_once = max(1, _CACHED_LOGITS // logits.shape[1])
    for part in (careful[i:i + at_once] for i in range(0, len(careful), at_once)):
        chosen, empty = _choose(picked[part], [states[i] for i in part], [(masks or {}).get(i) for i in part])
        token_ids[part] = chosen
        for i in np.flatnonzero(empty).tolist():
            result.errors[part[i]] = nothing_allowed(states[part[i]])
    for i in np.flatnonzero(failed).tolist():
        result.errors[i] = NOT_FINITE
    result.token_ids = token_ids.tolist()
    for i in result.errors:
        result.token_ids[i] = -1
    scored = [i for i, s in enumerate(states) if s.params.logprobs is not None and i not in result.errors]
    if scored:
        found = score(picked, scored, [result.token_ids[i] for i in scored],
                      [states[i].params.logprobs or 0 for i in scored])
        result.logprobs = [None] * len(states)
        for i, own in zip(scored, found, strict=True):
            result.logprobs[i] = own
    return result


def _choose(
    logits: np.ndarray, states: list[SamplingState], masks: list[np.ndarray | None],
) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n] tokens and bool [n] "nothing was allowed", for logits of ours [n, V] that may be changed."""
    edit_logits(logits, states, masks)
    token_ids = logits.argmax(axis=1)
    empty = np.isneginf(logits[np.arange(len(states)), token_ids])
    drawn = np.flatnonzero(~np.array([s.params.greedy for s in states]) & ~empty)
    if len(drawn):
        settings = [states[i].params for i in drawn]
        keys = np.array([states[i].key for i in drawn], np.uint64)
        counters = np.array([states[i].num_output for i in drawn], np.uint64)
        scaled = logits[drawn] if len(drawn) < len(states) else logits
        with np.errstate(over="ignore"):                # to -inf: probability 0, which is right
            scaled -= scaled.max(axis=1, keepdims=True)
            scaled /= np.array([p.temperature for p in settings], np.float32)[:, None]
        batch = FilterBatch(
            top_k=np.array([p.top_k for p in settings], np.int64),
            top_p=np.array([p.top_p for p in settings]),
            min_p=np.array([p.min_p for p in settings]),
            typical_p=np.array([p.typical_p for p in settings]),
        )
        token_ids[drawn] = draw_filtered(scaled, batch, uniforms(keys, counters))
    return token_ids, empty


def edit_logits(logits: np.ndarray, states: Sequence[SamplingState], masks: Sequence[np.ndarray | None]) -> None:
    """Penalties, bias, bans and masks, in place on float32 [n, V]."""
    _apply_penalties(logits, states)
    for row, state, mask in zip(logits, states, masks, strict=True):
        if not state.edits_logits:
            continue
        bias = state.params.logit_bias
        if bias:
            row[list(bias.keys())] += np.array(list(bias.values()), np.float32)
        banned = state.banned()
        if banned:
            row[banned] = -np.inf
        if state.constraint is not None:
            if mask is None:
                mask = state.constraint.mask()
            if mask is not None:
                row[:len(mask)][~mask] = -np.inf
                row[len(mask):] = -np.inf


def _apply_penalties(logits: np.ndarray, states: Sequence[SamplingState]) -> None:
    """All rows in one go: the touched entries are gathered into one flat array."""
    rows = [i for i, s in enumerate(states) if s.has_penalties]
    if not rows:
        return
    ids, counts = zip(*(states[i].token_counts() for i in rows), strict=True)
    lengths = [len(x) for x in ids]
    column, count = np.concatenate(ids), np.concatenate(counts)
    row = np.repeat(rows, lengths)

    def spread(name: str) -> np.ndarray:
        return np.repeat(np.array([getattr(states[i].params, name) for i in rows], np.float32), lengths)

    value, repetition = logits[row, column], spread("repetition_penalty")
    value = np.where(value > 0, value / repetition, value * repetition)
    value -= spread("frequency_penalty") * count + spread("presence_penalty") * (count > 0)
    logits[row, column] = value


def score(
    logits: np.ndarray, rows: Sequence[int], token_ids: Sequence[int], tops: Sequence[int],
) -> list[TokenLogprobs]:
    """Log-probabilities of token_ids[i] and of the tops[i] likeliest tokens at logits[rows[i]]."""
    at_once = max(1, _CACHED_LOGITS // logits.shape[1])
    found: list[TokenLogprobs] = []
    for i in range(0, len(rows), at_once):
        part = slice(i, i + at_once)
        found += _score(logits[list(rows[part])], token_ids[part], tops[part])
    return found


def _score(picked: np.ndarray, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """`score` for float32 [n, V], row by row."""
    peak = picked.max(axis=1)
    total = np.exp(picked - peak[:, None]).sum(axis=1, dtype=np.float64)
    log_total = peak.astype(np.float64) + np.log(total)
    own = picked[np.arange(len(picked)), list(token_ids)] - log_total
    most = max(tops)
    best_ids = np.zeros((len(picked), 0), np.int64)
    best = np.zeros((len(picked), 0))
    if most:
        best_ids, values = top_candidates(picked, most)
        order = np.argsort(-values, axis=1, kind="stable")[:, :most]      # ties: the lower id first
        best_ids = np.take_along_axis(best_ids, order, axis=1)
        best = np.take_along_axis(values, order, axis=1) - log_total[:, None]
    return [
        TokenLogprobs(int(t), float(lp), tuple(zip(ids[:top], lps[:top], strict=True)))
        for t, lp, top, ids, lps in zip(token_ids, own, tops, best_ids.tolist(), best.tolist(), strict=True)
    ]
