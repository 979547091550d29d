"""`Request` and `Sequence`: what a client asked, and each growing list of token ids that answers it.

A request has `params.n` sequences. They hold state only: the scheduler moves it, the engine reports it.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from relaxpack.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from relaxpack.runtime.pooling import Pooler
    from relaxpack.runtime.sampler import SamplingState, TokenLogprobs

_arrivals = itertools.count()


class SequenceStatus(enum.Enum):
    WAITING = "waiting"        # holds no pages
    RUNNING = "running"        # holds pages for all its known tokens
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"              # an end token, a stop token, a stop string, a complete grammar; or the embedding is there
    LENGTH = "length"          # max_tokens, or the context is full
    ABORT = "abort"            # the client went away
    ERROR = "error"            # see `Sequence.error`


class Request:
    """What a client asked. `salt` separates prefix caches: only requests with equal salt share pages. With a `pooler`
    it asks for an embedding of its prompt: its one sequence ends with the prompt, and `embedding` is the result."""

    __slots__ = ("arrival", "arrival_time", "cached_tokens", "embedding", "end_ids", "finish_time", "first_token_time",
                 "id", "params", "pooler", "prompt_ids", "prompt_logprobs", "salt", "sequences", "token_limit")

    def __init__(self, request_id: str, prompt_ids: Seq[int], params: SamplingParams, salt: str = "",
                 pooler: Pooler | None = None) -> None:
        self.id = request_id
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.salt = salt
        self.arrival = next(_arrivals)
        self.arrival_time = time.monotonic()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.cached_tokens: int | None = None     # prompt tokens found in the prefix cache; None until admitted
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.token_limit = 0                      # most tokens a sequence may have, prompt included; set by the engine
        self.end_ids: frozenset[int] = frozenset()      # token ids that end a sequence; set by the engine
        self.sequences: list[Sequence] = []
        self.pooler = pooler
        self.embedding: np.ndarray | None = None

    @property
    def finished(self) -> bool:
        return len(self.sequences) == self.params.n and all(
            s.status is SequenceStatus.FINISHED for s in self.sequences)


class Sequence:
    """One growing list of token ids with its own pages (bookkeeping: see `kv_cache.page_table`)."""

    __slots__ = ("computed", "digests", "error", "finish_reason", "index", "logprobs", "num_prompt", "page_ids",
                 "preemptions", "registered", "request", "sampling", "status", "stop_token_id", "token_ids")

    def __init__(self, request: Request, index: int, token_ids: list[int], sampling: SamplingState) -> None:
        self.request = request
        self.index = index
        self.token_ids = token_ids
        self.num_prompt = len(request.prompt_ids)
        self.sampling = sampling
        self.status = SequenceStatus.WAITING
        self.computed = 0                         # tokens whose keys and values are in pages
        self.page_ids: list[int] = []
        self.digests: list[bytes] = []            # chained digest of each full page of token_ids, as far as known
        self.registered = 0                       # leading full pages already offered to the prefix cache
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None     # the last output token, when it is what ended the sequence
        self.error: str | None = None
        self.logprobs: list[TokenLogprobs] = []   # one per output token, when asked for
        self.preemptions = 0

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt:]
