"""The sampling contract (`SamplingSpec`) in float64 NumPy, Philox included, for tests of the device sampler."""

from __future__ import annotations

import numpy as np

IN_PROMPT = 1 << 30
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


def adjusted(logits: np.ndarray, settings: np.ndarray, counts: np.ndarray | None,
             allowed: np.ndarray | None = None) -> np.ndarray:
    """Penalised, constrained and scaled logits of one row, float64."""
    z = logits.astype(np.float64)
    if counts is not None:
        seen, output = counts != 0, counts & (IN_PROMPT - 1)
        rep = float(settings[3])
        z = np.where(seen, np.where(z > 0, z / rep, z * rep), z)
        z = z - np.where(output > 0, settings[4] + settings[5] * output.astype(np.float64), 0.0)
    if allowed is not None:
        z = np.where(allowed, z, -np.inf)
    return z / settings[0] if settings[0] > 0 else z


def kept(z: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool [V]: the tokens the filters leave."""
    distance = z.max() - z
    keep = distance < DISTANCE_LIMIT if top_k > 0 or top_p < 1 or min_p > 0 else np.isfinite(z)
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
    return keep


def expect(logits: np.ndarray, settings: np.ndarray, counters: np.ndarray, counts: np.ndarray | None,
           allowed: np.ndarray | None = None) -> tuple[int, float, np.ndarray]:
    """Token, logprob and the scores it was the largest of (−inf where dropped), for one row."""
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return -1, float("nan"), np.empty(0)
    z = adjusted(logits, settings, counts, allowed)
    if not np.isfinite(z).any():
        return -1, float("nan"), np.empty(0)
    raw = logits.astype(np.float64)
    peak = raw.max()
    logprob = raw - peak - np.log(np.exp(raw - peak).sum())
    if settings[0] <= 0:
        scores = z
    else:
        keep = kept(z, int(counters[0]), float(settings[1]), float(settings[2]))
        noise = gumbel_noise(len(z), int(counters[3]), int(counters[1]), int(counters[2]))
        scores = np.where(keep, z - z.max() + noise, -np.inf)
    token = int(scores.argmax())
    return token, float(logprob[token]), scores
