"""Which candidate of a task wins: decode kernels by the time of a layer that they stand in, others by their own. Runs
anywhere, without TVM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from relaxpack.schedules.tuning.noise import Verdict
from relaxpack.tuning.chain import CHAIN_GAIN
from relaxpack.tuning.duel import decide, in_step
from relaxpack.tuning.rounds import Rounds

SLOWER = 1.02          # a case on which a candidate is slower than the rule by more than this disqualifies it


@dataclass(frozen=True)
class Decision:
    """Of one task. `times_us` of the winner: its own, beside a neighbour where there is one; of a kernel of a decode step
    the rule's and the difference in a layer."""

    task: dict[str, Any]
    rule: dict[str, Any]
    winner: dict[str, Any]
    verdict: Verdict
    times_us: tuple[float, ...]

    @property
    def improved(self) -> bool:
        return bool(self.winner["number"])

    @property
    def rule_us(self) -> float:
        return median(means(deciding(self.task, self.rule)))

    @property
    def in_layer(self) -> tuple[float, float] | None:
        """Microseconds of a layer with the rule's kernel and with the winner."""
        if "chain_us" not in self.rule:
            return None
        return median(self.rule["chain_us"]), median(self.winner["chain_us"])


def deciding(task: dict[str, Any], entry: dict[str, Any]) -> list[list[float]]:
    """Times by case and round: beside the neighbour where the task has one, else alone."""
    times: list[list[float]] = entry["beside_us"] if entry.get("beside_us") else entry["alone_us"]
    return times


def means(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The geometric mean over the cases, round by round."""
    return tuple(round(geometric_mean(one), 4) for one in zip(*times, strict=True))


def geometric_mean(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


def decided(task: dict[str, Any]) -> Decision | str:
    """The rule stands unless a candidate beats it. Or why nothing can be said."""
    timed = [entry for entry in task["candidates"] if entry.get("alone_us")]
    if not timed or timed[0]["number"]:
        failure = task["candidates"][0].get("failure", f"error {task['candidates'][0].get('error')}")
        return f"the rule's kernel failed ({failure}): nothing to compare with"
    return _in_chain(task, timed) if "chain" in task else _alone(task, timed)


def _in_chain(task: dict[str, Any], timed: Sequence[dict[str, Any]]) -> Decision:
    rule = timed[0]
    own = means(deciding(task, rule))
    if "chain_us" not in rule:
        why = f"no time in a chain of layers ({task.get('chain_failure', 'not run')}): the rule stands"
        return Decision(task, rule, rule, Verdict(False, 1.0, 0.0, 0, why), own)
    others = [entry for entry in timed[1:] if entry.get("chain_us")]
    rotated = min(case["rotated_bytes"] for case in task["cases"])
    rounds = [_rounds(times, rotated) for times in (
        rule["chain_us"], task["twin_chain_us"], *(entry["chain_us"] for entry in others))]
    index, verdict = decide(rounds, same=True, min_gain=CHAIN_GAIN)
    times = in_step(rounds[index], rounds[1], median(own), task["calls"]).times_us
    return Decision(task, rule, [rule, rule, *others][index], verdict, tuple(round(us, 4) for us in times))


def _alone(task: dict[str, Any], timed: Sequence[dict[str, Any]]) -> Decision:
    """Not slower on any case."""
    rule = timed[0]
    twin = task.get("twin_beside_us" if rule.get("beside_us") else "twin_us") or deciding(task, rule)
    limit = [SLOWER * median(times) for times in deciding(task, rule)]
    others = [entry for entry in timed[1:] if all(
        median(times) <= most for times, most in zip(deciding(task, entry), limit, strict=True))]
    rotated = min(case["rotated_bytes"] for case in task["cases"])
    rounds = [_rounds(means(times), rotated) for times in (
        deciding(task, rule), twin, *(deciding(task, entry) for entry in others))]
    index, verdict = decide(rounds, same=True)
    winner = [rule, rule, *others][index]
    return Decision(task, rule, winner, verdict, means(deciding(task, winner)))


def together_wins(times: dict[str, Any]) -> Verdict:
    """Whether all winners of a chain make a layer faster."""
    if "failure" in times:
        return Verdict(False, 1.0, 0.0, 0, times["failure"])
    rounds = [_rounds(times[name], 0) for name in ("rule_us", "twin_us", "winners_us")]
    return decide(rounds, same=True, min_gain=CHAIN_GAIN)[1]


def _rounds(times: Sequence[float], rotated: int) -> Rounds:
    return Rounds(tuple(times), (True,) * len(times), rotated)
