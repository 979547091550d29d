"""When is faster faster? One rule, used wherever a candidate could replace an incumbent.

Times are compared in pairs: both sides run in turn, round by round, so that a disturbance hits both. A candidate wins if

- there are at least MIN_PAIRS rounds in which neither side was interrupted,
- the median of the ratios candidate / incumbent is below 1 by more than their spread (half the distance between the
  quartiles) and by more than MIN_GAIN, and
- it was the faster one in so many rounds that chance alone would do that less than once in 200 times (LUCK).

Where a machine is too busy for that, a candidate still wins if it is beyond doubt: three quarters of its rounds, disturbed
or not, take less than half of what the incumbent's fastest one does.

Otherwise the incumbent stays: a tie is no reason to change code.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_GAIN = 0.01
MIN_PAIRS = 8
LUCK = 0.005
BEYOND_DOUBT = 0.5


@dataclass(frozen=True)
class Verdict:
    wins: bool
    ratio: float      # median of candidate / incumbent; 1 where nothing could be compared
    spread: float     # half the distance between the quartiles of the ratios
    pairs: int
    why: str


def compare(candidate: Sequence[float], incumbent: Sequence[float], min_gain: float = MIN_GAIN) -> Verdict:
    """Times of the same rounds, in order. `min_gain`: where they are those of a chain of which a kernel is a part, less than
    MIN_GAIN."""
    ratios = [a / b for a, b in zip(candidate, incumbent, strict=True)]
    if len(ratios) < MIN_PAIRS:
        return Verdict(False, 1.0, 0.0, len(ratios), f"{len(ratios)} undisturbed rounds, {MIN_PAIRS} needed")
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    spread = (high - low) / 2
    if ratio >= 1 - min_gain:
        return Verdict(False, ratio, spread, len(ratios), f"not {100 * min_gain:g}% faster")
    if ratio >= 1 - spread:
        return Verdict(False, ratio, spread, len(ratios), f"faster by {1 - ratio:.1%}, within the noise of {spread:.1%}")
    faster = sum(one < 1 for one in ratios)
    if chance(faster, len(ratios)) > LUCK:
        return Verdict(False, ratio, spread, len(ratios), f"the faster one in only {faster} of {len(ratios)} rounds")
    return Verdict(True, ratio, spread, len(ratios), f"faster by {1 - ratio:.1%}")


def chance(faster: int, rounds: int) -> float:
    """How likely one of two equal kernels is the faster one in at least so many rounds."""
    return sum(math.comb(rounds, count) for count in range(faster, rounds + 1)) / 2**rounds


def compare_rounds(candidate: Sequence[float], candidate_clean: Sequence[bool], incumbent: Sequence[float],
                   incumbent_clean: Sequence[bool], min_gain: float = MIN_GAIN) -> Verdict:
    """All times of the same rounds, in order, and in which of them each side was left alone."""
    both = [a and b for a, b in zip(candidate_clean, incumbent_clean, strict=True)]
    verdict = compare([t for t, ok in zip(candidate, both, strict=True) if ok],
                      [t for t, ok in zip(incumbent, both, strict=True) if ok], min_gain)
    if verdict.pairs >= MIN_PAIRS or len(candidate) < MIN_PAIRS:
        return verdict
    if statistics.quantiles(candidate, n=4, method="inclusive")[2] < BEYOND_DOUBT * min(incumbent):
        ratio = statistics.median(candidate) / statistics.median(incumbent)
        return Verdict(True, ratio, 0.0, len(candidate), f"faster beyond doubt, about {1 / ratio:.1f} times")
    return verdict
