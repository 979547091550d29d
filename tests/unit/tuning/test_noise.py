"""The rule of noise: what may replace an incumbent, and what may not."""

from __future__ import annotations

import numpy as np
import pytest

from relaxpack.schedules.tuning.noise import MIN_GAIN, MIN_PAIRS, chance, compare, compare_rounds


def _times(center: float, spread: float, count: int = 15, seed: int = 0) -> list[float]:
    return list(center * (1 + spread * np.random.default_rng(seed).standard_normal(count)))


def test_a_clear_gain_wins() -> None:
    verdict = compare(_times(80, 0.01), _times(100, 0.01, seed=1))
    assert verdict.wins and verdict.ratio == pytest.approx(0.8, rel=0.02) and verdict.pairs == 15


def test_equal_kernels_do_not_replace_each_other() -> None:
    """Whatever the noise is: 1000 pairs of equal kernels under 1 to 20 % of it."""
    noise = np.linspace(0.01, 0.2, 1000)
    wins = sum(compare(_times(100, n, seed=i), _times(100, n, seed=i + 5000)).wins for i, n in enumerate(noise))
    assert wins <= 4     # LUCK of them at most


def test_a_gain_within_the_noise_does_not_win() -> None:
    verdict = compare([99.5] * 4 + [98.0] * 4 + [90.0] * 7, [100.0] * 15)      # by 2 %, half the quartiles' distance is 4 %
    assert not verdict.wins and "within the noise" in verdict.why


def test_a_gain_too_small_to_matter_does_not_win() -> None:
    exact = [100.0] * 15
    assert not compare([100 * (1 - MIN_GAIN / 2)] * 15, exact).wins
    assert compare([100 * (1 - MIN_GAIN * 2)] * 15, exact).wins


def test_a_disturbance_that_hits_both_sides_is_no_gain_and_hides_none() -> None:
    load = np.linspace(1, 3, 15)
    old, new, same = 100 * load, 80 * load, 100.2 * load
    assert compare(list(new), list(old)).wins
    assert not compare(list(same), list(old)).wins


def test_faster_in_most_rounds_is_not_enough_where_chance_could_do_it() -> None:
    steady = [50.0, 55.0] * 6
    assert not compare([*steady, 101.0, 101.0, 101.0], [100.0] * 15).wins      # 12 of 15: 1.8 %
    assert compare([*steady, 52.0, 101.0, 101.0], [100.0] * 15).wins           # 13 of 15: 0.4 %
    assert chance(7, 7) == 1 / 128 and chance(0, 9) == 1.0


def test_too_few_rounds_decide_nothing() -> None:
    verdict = compare([50.0] * (MIN_PAIRS - 1), [100.0] * (MIN_PAIRS - 1))
    assert not verdict.wins and verdict.pairs == MIN_PAIRS - 1 and verdict.ratio == 1.0


def test_only_rounds_in_which_both_sides_were_left_alone_count() -> None:
    # The candidate looks fast only where the incumbent was interrupted.
    old = [100.0] * 8 + [500.0] * 8
    verdict = compare_rounds([100.0] * 16, [True] * 16, old, [True] * 8 + [False] * 8)
    assert not verdict.wins and verdict.pairs == 8


def test_beyond_doubt_needs_no_quiet_machine() -> None:
    old, busy = [100.0, 130.0, 300.0, 120.0, 110.0, 400.0, 105.0, 101.0], [False] * 8
    assert compare_rounds([20.0, 40.0, 22.0, 21.0, 30.0, 200.0, 20.0, 25.0], busy, old, busy).wins
    assert not compare_rounds([60.0] * 8, busy, old, busy).wins
    assert not compare_rounds([20.0] * 6, busy[:6], old[:6], busy[:6]).wins
