"""Targets and bins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from benchmarks.simulation.bins import count_good, default_target, draw_bin
from benchmarks.simulation.curves import Curve
from dike.exceptions import BadInputError


def falling(finals: Sequence[float], first: float = 10.0) -> list[Curve]:
    return [Curve(str(number), [1, 2], [1, 2], [first, final]) for number, final in enumerate(finals)]


def test_the_target_is_nine_tenths_of_the_way_to_what_the_best_two_percent_reach() -> None:
    finals = [float(number) for number in range(100)]
    assert default_target(falling(finals)) == pytest.approx(10 + 0.9 * (1 - 10))
    assert default_target(falling(finals), 0.5) == pytest.approx(10 + 0.5 * (1 - 10))


def test_diverged_trials_count_among_all_and_are_not_the_best() -> None:
    curves = falling([0.0, 1.0, math.nan, math.inf])
    assert default_target(curves) == pytest.approx(1.0)


@pytest.mark.parametrize("finals", [[10.0, 12.0], [math.nan]])
def test_nothing_learned_is_bad_input(finals: list[float]) -> None:
    with pytest.raises(BadInputError, match="--target"):
        default_target(falling(finals))


def test_a_bin_has_as_many_good_ones_as_asked_for_and_a_seed_gives_it_again() -> None:
    curves = falling([0.0] * 10 + [8.0] * 10)
    bins = [draw_bin(curves, 1.0, 8, 3, seed) for seed in range(20)]
    for drawn in bins:
        assert len({curve.name for curve in drawn.curves}) == 8
        assert drawn.good == count_good(drawn.curves, 1.0) == 3
        assert drawn.target_s == tuple(curve.time_to(1.0) for curve in drawn.curves)
    assert [draw_bin(curves, 1.0, 8, 3, seed) for seed in range(20)] == bins
    orders = {tuple(math.isfinite(time_s) for time_s in drawn.target_s) for drawn in bins}
    assert len(orders) > 5


def test_too_few_of_a_kind_is_bad_input() -> None:
    curves = falling([0.0] * 3 + [8.0] * 10)
    with pytest.raises(
        BadInputError, match="3 of the 13 trials reach the target 1, so there is no bin of 8 with 4 good"
    ):
        draw_bin(curves, 1.0, 8, 4, 0)
    with pytest.raises(BadInputError, match="no bin of 13 with 2 good"):
        draw_bin(curves, 1.0, 13, 2, 0)
