"""The sampling contract (`SamplingSpec`) in float64 NumPy, Philox included, for tests of the device sampler."""

from __future__ import annotations

import numpy as np

from relaxpack.kernel_spec import COUNT_BITS, EDIT_BITS, FIRST_EDIT, IN_PROMPT, counts_width

DISTANCE_LIMIT = 31.999


def philox(counter: np.ndarray, position: int, seed_low: int, seed_high: int) -> np.ndarray:
    """Philox4x32-10: uint32 [n, 4] for counters (counter, position, 0, 0)."""
    mask = np.uint64(0xFFFFFFFF)
    x = [counter.astype(np.uint64), np.full(len(counter), position & 0xFFFFFFFF, np.uint64),
         np.zeros(len(counter), np.uint64), np.zeros(len(counter), np.uint64)]
    k0, k1 = seed_low & 0xFFFFFFFF, seed_high & 0xFFFFFFFF
    for _ in range(10):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(second >> np.uint64(32)) ^ x[1] ^ np.uint64(k0), second & mask,
             (first >> np.uint64(32)) ^ x[3] ^ np.uint64(k1), first & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(x, 1).astype(np.uint32)


def gumbel_noise(vocab: int, position: int, seed_low: int, seed_high: int) -> np.ndarray:
    word = philox(np.arange(-(-vocab // 4)), position, seed_low, seed_high).reshape(-1)[:vocab]
    v = ((word >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    return -np.log(-np.log1p(-v))


def random_counts(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """int32 [rows, counts_width]: outputs, prompts, and edits of 300 tokens, bans among them; nothing is stale."""
    counts = np.zeros((rows, counts_width(vocab)), np.int32)
    counts[:, :vocab] = np.where(rng.random((rows, vocab)) < 0.1, rng.integers(1, 4, (rows, vocab)), 0)
    counts[:, :vocab] |= np.where(rng.random((rows, vocab)) < 0.1, IN_PROMPT, 0).astype(np.int32)
    counts[:, vocab:vocab + FIRST_EDIT] = -1
    for row in counts:
        edited = rng.choice(vocab, 300, replace=False)
        row[edited] |= (FIRST_EDIT + np.arange(300, dtype=np.int32)) << COUNT_BITS
        values = np.where(rng.random(300) < 0.3, -np.inf, rng.normal(0, 5, 300)).astype(np.float32)
        row[vocab + FIRST_EDIT:][:300] = values.view(np.int32)
    return counts


def count(words: np.ndarray, token: int, position: int) -> None:
    """What drawing a token does to its row of counts."""
    vocab = len(words) - counts_width(0)
    if token >= 0:
        if words[vocab + 1] == position:
            words[words[vocab]] -= 1
        words[token] += 1
        words[vocab:vocab + FIRST_EDIT] = token, position


def adjusted(logits: np.ndarray, settings: np.ndarray, position: int, counts: np.ndarray | None,
             allowed: np.ndarray | None = None) -> np.ndarray:
    """Penalised, biased, masked and scaled logits of one row, float64."""
    z, vocab = logits.astype(np.float64), len(logits)
    if counts is not None:
        words, extra = counts[:vocab].copy(), counts[vocab:]
        if extra[1] == position:
            words[extra[0]] -= 1        # counted by a step that was dropped
        output = words & ((1 << COUNT_BITS) - 1)
        seen = (output > 0) | (words & IN_PROMPT > 0)
        rep = float(settings[3])
        z = np.where(seen, np.where(z > 0, z / rep, z * rep), z)
        z = z - np.where(output > 0, settings[4] + settings[5] * output.astype(np.float64), 0.0)
        edit = words >> COUNT_BITS & ((1 << EDIT_BITS) - 1)
        z = z + np.where(edit > 0, extra.view(np.float32)[edit].astype(np.float64), 0.0)
    if allowed is not None:
        z = np.where(allowed, z, -np.inf)
    return z / settings[0] if settings[0] > 0 else z


def kept(z: np.ndarray, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0) -> np.ndarray:
    """bool [V]: the tokens the filters leave."""
    distance = z.max() - z
    keep = distance < DISTANCE_LIMIT if top_k > 0 or top_p < 1 or min_p > 0 or typical_p < 1 else np.isfinite(z)
    if 0 < top_k < keep.sum():
        keep &= distance <= np.partition(distance, top_k - 1)[top_k - 1]
    if top_p < 1:
        order = np.argsort(distance, kind="stable")
        p = np.where(keep, np.exp(-distance), 0.0)[order]
        before = np.cumsum(p) - p
        last = distance[order][np.flatnonzero(before < np.float64(np.float32(top_p)) * p.sum())[-1]]
        keep &= distance <= last
    if min_p > 0:
        keep &= distance <= -np.log(np.float64(np.float32(min_p)))
    if typical_p < 1:
        p = np.where(keep, np.exp(-distance), 0.0) / np.exp(-distance[keep]).sum()
        surprise = -np.log(np.where(keep, p, 1.0))
        from_entropy = np.where(keep, np.abs(surprise - (p * surprise).sum()), np.inf)
        order = np.argsort(from_entropy, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        keep &= from_entropy <= from_entropy[order][np.flatnonzero(before < np.float64(np.float32(typical_p)))[-1]]
    return keep


def expect(logits: np.ndarray, settings: np.ndarray, counters: np.ndarray, counts: np.ndarray | None,
           allowed: np.ndarray | None = None) -> tuple[int, float, np.ndarray]:
    """Token (-1: not finite, -2: nothing is allowed), logprob and the scores it was the largest of (−inf where dropped),
    for one row."""
    if np.isnan(logits).any() or np.isposinf(logits).any() or np.isneginf(logits).all():
        return -1, float("nan"), np.empty(0)
    z = adjusted(logits, settings, int(counters[3]), counts, allowed)
    if np.isneginf(z).all():
        return -2, float("nan"), np.empty(0)
    raw = logits.astype(np.float64)
    peak = raw.max()
    logprob = raw - peak - np.log(np.exp(raw - peak).sum())
    if settings[0] <= 0:
        scores = z
    else:
        keep = kept(z, int(counters[0]), float(settings[1]), float(settings[2]), float(settings[6]))
        noise = gumbel_noise(len(z), int(counters[3]), int(counters[1]), int(counters[2]))
        scores = np.where(keep, z - z.max() + noise, -np.inf)
    token = int(scores.argmax())
    return token, float(logprob[token]), scores
