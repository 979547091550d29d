"""Drawing from a filtered distribution: top_k, top_p, min_p, typical_p and the draw itself, over a batch of rows.

No full sort of the vocabulary: the few candidates that can survive are found by a threshold first. The draw walks the
kept tokens in the order of their ids, so that two nearly equal logits changing places does not change the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BLOCKS = 64                # a row is reduced to this-many-fold fewer maxima to find a threshold
_NUCLEUS = (128, 2048)      # candidates tried for a nucleus (top_p without top_k) before taking all tokens


@dataclass(frozen=True, slots=True)
class FilterBatch:
    """Settings per row; "off" is top_k 0, top_p 1, min_p 0, typical_p 1."""

    top_k: np.ndarray       # int64 [r]
    top_p: np.ndarray       # float64 [r]
    min_p: np.ndarray
    typical_p: np.ndarray

    def take(self, rows: np.ndarray) -> FilterBatch:
        return FilterBatch(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.typical_p[rows])


def draw_filtered(scaled: np.ndarray, settings: FilterBatch, uniform: np.ndarray) -> np.ndarray:
    """int64 [r]: one token per row of `scaled`, float32 [r, V] logits over temperature with row maximum 0.

    `uniform` float64 [r] in [0, 1) decides.
    """
    vocab = scaled.shape[1]
    result = np.empty(len(scaled), np.int64)
    k = np.where(settings.top_k > 0, np.minimum(settings.top_k, vocab), 0)
    nucleus = (k == 0) & (settings.top_p < 1.0)
    simple = (k == 0) & ~nucleus & (settings.typical_p >= 1.0)
    rows = np.flatnonzero(simple)
    if len(rows):
        result[rows] = _draw_unsorted(scaled[rows], settings.min_p[rows], uniform[rows])
    mass = np.full(len(scaled), np.nan)         # of the whole vocabulary, where a nucleus is a share of it
    if nucleus.any():
        mass[nucleus] = np.exp(scaled[nucleus]).sum(axis=1, dtype=np.float64)
    # How many candidates a row needs: top_k says it; a nucleus is guessed and checked; typical_p alone needs all.
    size = np.where(k > 0, k, np.where(nucleus, min(_NUCLEUS[0], vocab), vocab))
    pending = np.flatnonzero(~simple)
    while len(pending):
        small = size[pending] <= 4 * size[pending].min()    # do not let one wide row make all of them wide
        rows = pending[small]
        token_ids, enough = _draw_candidates(scaled[rows], settings.take(rows), k[rows], mass[rows], uniform[rows],
                                             int(size[rows].max()))
        result[rows] = token_ids
        size[rows[~enough]] = [min(_wider(int(s)), vocab) for s in size[rows[~enough]]]
        pending = np.concatenate([rows[~enough], pending[~small]])
    return result


def _wider(size: int) -> int:
    return next((n for n in _NUCLEUS if n > size), 1 << 62)


def _draw_unsorted(scaled: np.ndarray, min_p: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Temperature and min_p only: no order needed. Two levels of sums find the token without a full running sum."""
    rows, vocab = scaled.shape
    width = 256
    blocks = -(-vocab // width)
    padded = np.empty((rows, blocks * width), np.float32)
    p = padded[:, :vocab]
    np.exp(scaled, out=p)                                   # relative to the likeliest, which has 1
    padded[:, vocab:] = 0.0
    if min_p.any():
        p[p < min_p[:, None].astype(np.float32)] = 0.0
    padded = padded.reshape(rows, blocks, width)
    block_sums = np.cumsum(padded.sum(axis=2), axis=1, dtype=np.float64)
    target = uniform * block_sums[:, -1]
    block = (block_sums <= target[:, None]).sum(axis=1)
    line = np.arange(rows)
    before = np.where(block > 0, block_sums[line, block - 1], 0.0)
    inside = np.cumsum(padded[line, block], axis=1, dtype=np.float64)
    # Rounding may put the rest of the target at or past the block's own sum: stay on the last token with weight.
    rest = np.minimum(target - before, np.nextafter(inside[:, -1], 0.0))
    return block * width + (inside <= rest[:, None]).sum(axis=1)


def _draw_candidates(
    scaled: np.ndarray, settings: FilterBatch, k: np.ndarray, mass: np.ndarray, uniform: np.ndarray, size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 [r] and bool [r]: whether `size` candidates were enough for that row's answer to be right."""
    ids, values = top_candidates(scaled, size)              # [r, c], ids ascending, padding -inf
    line = np.arange(len(ids))
    ordered = np.sort(values, axis=1)[:, ::-1]              # values only: many times faster than argsort
    p_ordered = np.exp(ordered, dtype=np.float64)
    kth = ordered[line, np.minimum(k, values.shape[1]) - 1]
    p_ordered[(k > 0)[:, None] & (ordered < kth[:, None])] = 0.0    # equal logits at the border all stay
    reached = np.cumsum(p_ordered, axis=1)
    partial = (k == 0) & (settings.top_p < 1.0) & (size < scaled.shape[1])      # others count towards the mass
    limit = np.where(settings.top_p < 1.0, settings.top_p * np.where(partial, mass, reached[:, -1]), np.inf)
    enough = ~partial | (reached[:, -1] >= limit)
    kept_count = ((reached - p_ordered < limit[:, None]) & (p_ordered > 0)).sum(axis=1)
    keep = _largest(values, ordered[line, kept_count - 1], kept_count)
    p = np.where(keep, np.exp(values, dtype=np.float64), 0.0)
    p[p < settings.min_p[:, None]] = 0.0
    typical = np.flatnonzero(settings.typical_p < 1.0)
    if len(typical):
        p[typical] = _keep_typical(p[typical], settings.typical_p[typical])
    running = np.cumsum(p, axis=1)
    target = uniform * running[:, -1]
    return ids[line, (running <= target[:, None]).sum(axis=1)], enough


def _largest(values: np.ndarray, smallest: np.ndarray, count: np.ndarray) -> np.ndarray:
    """bool [r, c]: the `count` largest of each row, whose smallest is `smallest`; of equal ones the lower id first."""
    above = values > smallest[:, None]
    equal = values == smallest[:, None]
    return above | (equal & (np.cumsum(equal, axis=1) <= (count - above.sum(axis=1))[:, None]))


def _keep_typical(p: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Keep the tokens whose surprise is nearest to the entropy until they hold `mass` (Meister et al., 2022)."""
    p = p / p.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    entropy = np.where(p > 0, p * np.where(p > 0, surprise, 0.0), 0.0).sum(axis=1, keepdims=True)
    order = np.argsort(np.abs(surprise - entropy), axis=1, kind="stable")
    ordered = np.take_along_axis(p, order, axis=1)
    ordered[np.cumsum(ordered, axis=1) - ordered >= mass[:, None]] = 0.0
    kept = np.empty_like(p)
    np.put_along_axis(kept, order, ordered, axis=1)
    return kept


def top_candidates(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [r, c] ids, ascending, and float32 [r, c] values, with every token that is at least as large as the
    size-th largest of its row among them, so c >= min(size, V). Shorter rows are padded with id 0 and -inf.
    """
    rows, vocab = x.shape
    if size >= vocab:
        return np.broadcast_to(np.arange(vocab), x.shape), x
    groups = vocab // _BLOCKS
    if groups >= 2 * size:
        # The size-th largest of the group maxima: at least `size` tokens reach it, so it is no larger than the
        # size-th largest token.
        maxima = x[:, :groups * _BLOCKS].reshape(rows, _BLOCKS, groups).max(axis=1)
        threshold = -np.partition(-maxima, size - 1, axis=1)[:, size - 1]
    else:
        threshold = np.partition(x, vocab - size, axis=1)[:, vocab - size]
    row, column = np.divmod(np.flatnonzero(x >= threshold[:, None]), vocab)
    counts = np.bincount(row, minlength=rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.zeros((rows, counts.max()), np.int64)
    values = np.full(ids.shape, -np.inf, np.float32)
    ids[row, place] = column
    values[row, place] = x[row, column]
    return ids, values
