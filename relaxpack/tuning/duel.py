"""Who wins a duel: the incumbent, the rule and the finalists, timed in turn by themselves or in chains of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from relaxpack.schedules.tuning.noise import MIN_GAIN, MIN_PAIRS, Verdict, compare, compare_rounds
from relaxpack.tuning.rounds import Rounds

LEAST_US = 0.01              # what a kernel takes at least


def decide(rounds: Sequence[Rounds], same: bool = False, least_gain: float = 0.0,
           min_gain: float = MIN_GAIN) -> tuple[int, Verdict]:
    """Which one is used: 0, the incumbent, unless one from 2 on beats it by the rule of noise. Where nothing was tried,
    it is compared with itself.

    `same`: 0 and 1 are the same kernel. By how much these two differ is what this machine mistakes for a difference just
    now; a gain must be twice that, and at least `least_gain`. `min_gain`: see `noise.compare`."""
    old = rounds[0]
    twin = compare_rounds(rounds[1].times_us, rounds[1].clean, old.times_us, old.clean, min_gain)
    mistaken = abs(1 - twin.ratio) if same and twin.pairs >= MIN_PAIRS else 0.0
    verdicts = {index: compare_rounds(rounds[index].times_us, rounds[index].clean, old.times_us, old.clean, min_gain)
                for index in range(2, len(rounds))} or {0: compare(old.kept(), old.kept(), min_gain)}
    for index, verdict in verdicts.items():
        if verdict.wins and 1 - verdict.ratio <= 2 * mistaken:
            why = f"faster by {1 - verdict.ratio:.1%}, but the same kernel measured twice differs by {mistaken:.1%}"
            verdicts[index] = replace(verdict, wins=False, why=why)
        elif verdict.wins and 1 - verdict.ratio < least_gain:
            verdicts[index] = replace(verdict, wins=False, why=f"faster by {1 - verdict.ratio:.1%}, {least_gain:.0%} needed")
    winners = [index for index, verdict in verdicts.items() if verdict.wins]
    if winners:
        best = min(winners, key=lambda index: verdicts[index].ratio)
        return best, verdicts[best]
    return 0, min(verdicts.values(), key=lambda verdict: verdict.ratio)


def in_step(rounds: Rounds, rule: Rounds, alone_us: float, calls: int) -> Rounds:
    """Times of a kernel, so that records of different chains can be compared: what the rule's takes alone, and by how much a
    layer with `calls` of this one takes longer than one with the rule's, in the same rounds."""
    times = (max(LEAST_US, alone_us + (own - other) / calls)
             for own, other in zip(rounds.times_us, rule.times_us, strict=True))
    clean = tuple(a and b for a, b in zip(rounds.clean, rule.clean, strict=True))
    return Rounds(tuple(times), clean, rounds.rotated_bytes)


def chain_facts(rule_us: float, own_us: float, function: str, calls: int, tuned: int = 0) -> str:
    """For the conditions of a record; microseconds of a layer. `tuned`: kernels around it that are not the rule's."""
    around = f", records for {tuned} of the others" if tuned else ""
    return (f"whole layers of {function}, {calls} of these in each{around}: {rule_us:.3f} us a layer by the rule, "
            f"{own_us:.3f} with this; times are what the rule's takes alone, and the difference")
