"""`RequestMaker`: prompts and settings to requests, or a RequestError for what a model with these limits can never answer.

Changes nothing in an engine, so any thread may use one. When a request runs is the scheduler's business.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from relaxpack.errors import RequestError
from relaxpack.runtime.pooling import EmbeddingParams, Pooler
from relaxpack.runtime.request import Request, Sequence
from relaxpack.runtime.sampler import Constraint, SamplingState, sequence_key
from relaxpack.runtime.sampling_params import Grammar, SamplingParams
from relaxpack.runtime.step_plan import ModelRunner

_NO_SAMPLING = SamplingParams(temperature=0.0)      # of requests that sample nothing


class RequestMaker:
    def __init__(self, runner: ModelRunner, capacity: int, end_token_ids: frozenset[int],
                 make_constraint: Callable[[Grammar], Constraint] | None) -> None:
        """`capacity`: tokens that fit into the pages. `make_constraint` compiles grammars."""
        self.max_tokens = min(runner.max_context, capacity)         # of a sequence, prompt included
        self.generates = bool(getattr(runner, "generates", True))
        self.embedding_size = int(getattr(runner, "embedding_size", 0))
        self._vocab_size, self._end_token_ids = runner.vocab_size, end_token_ids
        self._make_constraint = make_constraint
        self._what_limits = "the context" if self.max_tokens == runner.max_context else "the KV cache"
        self._numbers = itertools.count()

    def generation(self, prompt: Seq[int], params: SamplingParams | None, request_id: str | None, salt: str) -> Request:
        """A request for text with its n sequences. Raises RequestError, with the field, for what can never be answered."""
        params = params or SamplingParams()
        if not self.generates:
            raise RequestError("this bundle computes embeddings only: build it with --embeddings instead of "
                               "--embeddings-only to generate text too", "model")
        prompt_ids = self._prompt(prompt)
        limit = self._token_limit(len(prompt_ids), params)
        constraint = self._constraint(params)
        request = Request(self._id(request_id), prompt_ids, params, salt)
        request.token_limit = limit
        request.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_token_ids)
        for index in range(params.n):
            own = constraint if index == 0 or constraint is None else constraint.fork()
            _add_sequence(request, index, sequence_key(params.seed, index), request.end_ids, own)
        return request

    def embedding(self, prompt: Seq[int], params: EmbeddingParams | None, request_id: str | None, salt: str) -> Request:
        """A request for the embedding of a prompt. Raises RequestError like `generation`."""
        params = params or EmbeddingParams()
        if not self.embedding_size:
            raise RequestError("this bundle has no function for embeddings: build it with `relaxpack build --embeddings`",
                               "model")
        params.check_size(self.embedding_size)
        prompt_ids = self._prompt(prompt)
        length, limit = len(prompt_ids), self.max_tokens
        if length > limit:
            raise RequestError(f"the prompt has {length} tokens, but {self._what_limits} holds {limit}: shorten it by "
                               f"{length - limit}", "prompt")
        request = Request(self._id(request_id), prompt_ids, _NO_SAMPLING, salt, Pooler(params, length))
        request.token_limit = length
        _add_sequence(request, 0, 0)
        return request

    def _id(self, given: str | None) -> str:
        return given if given is not None else f"request-{next(self._numbers)}"

    def _prompt(self, prompt: Seq[int]) -> list[int]:
        try:
            prompt_ids = list(map(operator.index, prompt))      # NumPy integers as well
        except TypeError as error:
            raise RequestError(f"the prompt must be token ids, whole numbers: {error}", "prompt") from error
        if not prompt_ids:
            raise RequestError("the prompt is empty: it needs at least one token", "prompt")
        last = self._vocab_size - 1
        for token_id in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token_id <= last:
                raise RequestError(f"the prompt holds token id {token_id}, but ids go from 0 to {last}", "prompt")
        return prompt_ids

    def _token_limit(self, length: int, params: SamplingParams) -> int:
        """Most tokens a sequence of a request may have; RequestError when that leaves nothing to generate."""
        limit, what = self.max_tokens, self._what_limits
        params.check_vocabulary(self._vocab_size)
        if length >= limit:
            raise RequestError(
                f"the prompt has {length} tokens, but {what} holds {limit} with at least one output token: shorten "
                f"the prompt by {length - limit + 1}", "prompt")
        if params.max_tokens is None:
            return limit
        if length + params.max_tokens > limit:
            raise RequestError(
                f"the prompt has {length} tokens and max_tokens is {params.max_tokens}, together "
                f"{length + params.max_tokens}, but {what} holds {limit}: at most {limit - length} can be generated",
                "max_tokens")
        return length + params.max_tokens

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.grammar is None:
            return None
        if self._make_constraint is None:
            raise RequestError("structured output is not available: pip install 'relaxpack[grammar]'", params.grammar.param)
        return self._make_constraint(params.grammar)


def _add_sequence(request: Request, index: int, key: int, end_ids: Iterable[int] = (),
                  constraint: Constraint | None = None) -> None:
    token_ids = list(request.prompt_ids)
    state = SamplingState(request.params, key, token_ids, len(token_ids), end_ids, constraint)
    request.sequences.append(Sequence(request, index, token_ids, state))
