"""Quanta and convergence."""

from __future__ import annotations

import math

import pytest

from framework.policies.trials.interface import Milestone, PolicySettings, Reading, TrialView
from framework.policies.trials.losses import LossHistory

SETTINGS = PolicySettings(quantum_s=10.0)


def reading(train_s: float, low: float, high: float | None = None, count: int = 5) -> Reading:
    high = low if high is None else high
    return Reading(train_s, int(10 * train_s), (low + high) / 2, low, high, count)


def history(readings: list[Reading], slices: list[int], settings: PolicySettings = SETTINGS) -> LossHistory:
    made = LossHistory(settings)
    made.update(TrialView(0, 0.0, readings, slices))
    return made


def test_before_the_first_reading_there_is_no_convergence() -> None:
    assert history([], [0]).score is None


def test_the_first_quantum_counts_its_range() -> None:
    assert history([reading(5, 4.0, 8.0), reading(10, 3.0, 5.0)], [0]).score == pytest.approx((8 - 3) / 10)


def test_later_quanta_count_the_fall_of_the_representative_loss() -> None:
    first, second = [reading(5, 4.0, 8.0), reading(10, 3.0, 5.0)], [reading(15, 2.0, 5.0), reading(20, 1.0, 3.0)]
    expected = ((8 + 3) / 2 - (5 + 1) / 2) / 10
    assert history(first + second, [0]).score == pytest.approx(expected), "within one slice"
    assert history(first + second, [0, 2]).score == pytest.approx(expected), "in two slices"


def test_the_same_readings_give_the_same_however_they_come() -> None:
    readings = [reading(2.5 * n, 10 / n, 12 / n, count=n) for n in range(1, 40)]
    slices = [0, 5, 6, 20, 33, 50]
    followed = LossHistory(SETTINGS)
    for seen in range(len(readings) + 1):
        followed.update(TrialView(0, 0.0, readings[:seen], [at for at in slices if at <= seen]))
        assert followed.score == history(readings[:seen], slices).score


def test_what_is_left_of_a_slice_belongs_to_its_last_quantum() -> None:
    before = [reading(10, 6.0, 8.0)]
    late = [reading(20, 4.0, 5.0), reading(20.4, 2.0, 2.0, count=1)]
    assert history(before + late, [0, 1]).score == pytest.approx((7 - 3.5) / 6)
    after = reading(30, 1.0)
    assert history([*before, *late, after], [0, 1, 3]).score == pytest.approx((3.5 - 1) / 5)


def test_a_slice_that_ends_early_is_a_quantum() -> None:
    assert history([reading(10, 6.0, 8.0), reading(12, 5.0)], [0, 1]).score == pytest.approx((7 - 5) / 5)


def test_slices_and_quanta_without_a_reading_do_not_count() -> None:
    assert history([reading(10, 8.0), reading(20, 6.0)], [0, 1, 1, 1]).score == pytest.approx(2 / 5)
    assert history([reading(10, 8.0), reading(20, 6.0)], [0, 1, 2]).score == pytest.approx(2 / 5)
    rare = [reading(60, 8.0, count=1), reading(120, 6.0, count=1), reading(180, 5.0, count=1)]
    assert history(rare, [0]).score == pytest.approx(1.0)


def test_after_a_stretch_of_many_quanta_they_are_as_long_as_ever() -> None:
    readings = [reading(4, 8.0), reading(66, 6.0), reading(67, 5.0), reading(68, 3.0)]
    assert history(readings, [0]).score == pytest.approx((6 - 4) / 10)


def test_convergence_is_negative_where_losses_rise() -> None:
    assert history([reading(10, 6.0), reading(20, 8.0)], [0]).score == pytest.approx(-2 / 5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_comes_last_and_the_next_quantum_starts_anew(value: float) -> None:
    broken = [reading(5, 1.0), reading(10, value), reading(14, 1.0)]
    assert history(broken, [0]).score == -math.inf
    assert history([*broken, reading(20, 1.0, 3.0)], [0]).score == pytest.approx((3 - 1) / 10)


def test_enormous_losses_are_no_error() -> None:
    assert history([reading(10, -1e308, 1e308)], [0]).score == -math.inf
    assert history([reading(10, 1.7e308), reading(20, 1.0)], [0]).score == pytest.approx(1.7e308 / 5)


def test_the_quantum_grows_at_milestones_and_does_not_shrink_again() -> None:
    settings = PolicySettings(10.0, milestones=(Milestone(0.5, 20.0), Milestone(0.75, 40.0)))
    losses = [8.0, 6.0, 4.0, 3.0, 2.0, 7.0]
    lengths_s = []
    readings: list[Reading] = []
    followed = LossHistory(settings)
    trained_s = 0.0
    for loss in losses:
        trained_s += followed.quantum_s
        readings.append(reading(trained_s, loss))
        followed.update(TrialView(0, 0.0, readings, [0]))
        lengths_s.append(followed.quantum_s)
    assert lengths_s == [10.0, 10.0, 20.0, 20.0, 40.0, 40.0]
    assert followed.score == pytest.approx((2 - 7) / 5), "a quantum keeps its initial length"


def test_milestones_count_from_the_first_quantum_with_a_loss() -> None:
    settings = PolicySettings(10.0, milestones=(Milestone(0.5, 20.0),))
    readings = [reading(10, math.nan), reading(20, 8.0), reading(30, 6.0), reading(40, 4.0)]
    assert [history(readings[:seen], [0], settings).quantum_s for seen in (2, 3, 4)] == [10.0, 10.0, 20.0]


def test_an_objective_that_was_maximised_counts_by_the_size_of_its_first_value() -> None:
    settings = PolicySettings(10.0, milestones=(Milestone(0.5, 20.0),))
    assert history([reading(10, -0.4), reading(20, -0.5)], [0], settings).quantum_s == 10.0
    assert history([reading(10, -0.4), reading(20, -0.8)], [0], settings).quantum_s == 20.0
