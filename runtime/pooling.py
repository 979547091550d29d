"""Embeddings: what a request wants of the last hidden states of its prompt, and their pooling as they come.

A long prompt is computed in chunks, and again from its start after a preemption, so a `Pooler` says which rows it still
lacks and takes each of them once. NumPy only: who computes hidden states is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from relaxpack.errors import RequestError

Pooling = Literal["last", "mean"]
POOLINGS: tuple[str, ...] = get_args(Pooling)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingParams:
    """`pooling`: the hidden state of the last token, or the mean over all tokens. `dimensions`: keep so many leading
    ones; what is left is normalised again."""

    pooling: Pooling = "last"
    dimensions: int | None = None       # None: all
    normalize: bool = True              # to length 1

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}", "pooling")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise RequestError(f"dimensions must be a whole number from 1 on, got {self.dimensions!r}", "dimensions")

    def check_size(self, size: int) -> None:
        """Raise RequestError where the model's hidden states, of `size` numbers, are too short."""
        if self.dimensions is not None and self.dimensions > size:
            raise RequestError(f"dimensions is {self.dimensions}, but embeddings of this model have {size}: ask for at most "
                               "that many, or leave it out", "dimensions")


class Pooler:
    """Gathers the hidden states of one prompt of `num_tokens` tokens."""

    __slots__ = ("_num_tokens", "_pooled", "_seen", "params")

    def __init__(self, params: EmbeddingParams, num_tokens: int) -> None:
        self.params = params
        self._num_tokens = num_tokens
        self._seen = 0                                  # leading tokens that need not be seen again
        self._pooled: np.ndarray | None = None

    @property
    def reads_all(self) -> bool:
        """Every token must be computed, also those whose keys and values are known."""
        return self.params.pooling == "mean"

    def offsets(self, start: int, count: int) -> tuple[int, ...]:
        """Which of the `count` tokens from `start` on need hidden states."""
        first = self._seen if self.reads_all else self._num_tokens - 1
        return tuple(range(max(0, first - start), count))

    def add(self, start: int, count: int, rows: np.ndarray) -> None:
        """float32 [n, H]: the hidden states at `offsets(start, count)`."""
        if len(rows):
            total = rows.sum(axis=0, dtype=np.float64)
            self._pooled = total if self._pooled is None else self._pooled + total
        self._seen = max(self._seen, start + count)

    def embedding(self) -> np.ndarray | None:
        """float32 [H] or [dimensions]; None where the model answered with numbers that are not finite."""
        assert self._pooled is not None and self._seen == self._num_tokens, "the prompt is not computed yet"
        pooled = self._pooled / (self._num_tokens if self.reads_all else 1)
        pooled = pooled[:self.params.dimensions]
        if self.params.normalize:
            pooled = pooled / max(float(np.linalg.norm(pooled)), 1e-12)
        return pooled.astype(np.float32) if np.isfinite(pooled).all() else None
