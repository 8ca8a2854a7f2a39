"""How fast a trial is believed to be where it was not measured."""

from __future__ import annotations

import math

import pytest

from framework.policies.trials.interface import TrialView
from framework.policies.trials.speeds import PRIOR_LOG_STD, SpeedEstimates


def estimates(*trials: tuple[float, dict[str, float]], explores: bool = False) -> SpeedEstimates:
    """Of trials numbered from 0, each with its batch size and what was measured."""
    speeds = SpeedEstimates(explores=explores)
    speeds.update(
        TrialView(number, 0.0, batch_size=batch, speeds=measured) for number, (batch, measured) in enumerate(trials)
    )
    return speeds


def test_equation_1_for_a_trial_that_never_ran() -> None:
    speeds = estimates((32.0, {"k80": 100.0}), (64.0, {"v100": 900.0, "k80": 150.0}), (128.0, {}))
    # The first trial measured on the K80 is trial 0, on the V100 trial 1.
    assert speeds.performance(2, ["k80", "v100"]) == pytest.approx({"k80": 100 * 128 / 32, "v100": 900 * 128 / 64})


def test_what_was_measured_replaces_the_estimate() -> None:
    speeds = estimates((32.0, {"k80": 100.0}), (64.0, {}))
    assert speeds.performance(1, ["k80"]) == pytest.approx({"k80": 200.0})
    speeds.update([TrialView(1, 0.0, batch_size=64.0, speeds={"k80": 130.0})])
    assert speeds.performance(1, ["k80"]) == pytest.approx({"k80": 130.0})
    speeds.update([TrialView(1, 0.0, batch_size=64.0, speeds={"k80": 140.0})])
    assert speeds.performance(1, ["k80"]) == pytest.approx({"k80": 140.0})
    assert speeds.measured == 2


def test_another_model_is_estimated_by_the_ratio_of_the_kinds_and_its_own_speed() -> None:
    speeds = estimates((32.0, {"k80": 100.0, "v100": 400.0}), (32.0, {"k80": 10.0, "v100": 90.0}), (32.0, {"k80": 1.0}))
    assert speeds.performance(2, ["k80", "v100"]) == pytest.approx({"k80": 1.0, "v100": math.sqrt(4 * 9)})


def test_as_printed_equation_1_is_for_all_that_is_not_measured() -> None:
    trials = ((32.0, {"k80": 100.0, "v100": 400.0}), (64.0, {"k80": 10.0}))
    speeds = SpeedEstimates(explores=False, by_ratio=False)
    speeds.update(TrialView(n, 0.0, batch_size=batch, speeds=measured) for n, (batch, measured) in enumerate(trials))
    assert speeds.performance(1, ["k80", "v100"]) == pytest.approx({"k80": 10.0, "v100": 400 * 64 / 32})


def test_trials_that_are_alike_tell_more_than_others() -> None:
    alike = (32.0, {"k80": 104.0, "v100": 208.0})
    other_batch, other_speed = (64.0, {"k80": 100.0, "v100": 900.0}), (32.0, {"k80": 50.0, "v100": 450.0})
    speeds = estimates(alike, other_batch, other_speed, (32.0, {"k80": 100.0}), explores=True)
    assert speeds.performance(3, ["k80", "v100"]) == pytest.approx({"k80": 100.0, "v100": 200.0})


def test_what_is_uncertain_counts_as_faster_and_the_less_so_the_more_is_known() -> None:
    known = [(32.0, {"k80": 10.0**number, "v100": 4 * 10.0**number}) for number in range(1, 9)]
    for count in (1, 3, 8):
        speeds = estimates(*known[:count], (32.0, {"k80": 1.0}), explores=True)
        expected = 4 * math.exp(PRIOR_LOG_STD / math.sqrt(1 + count))
        assert speeds.performance(count, ["k80", "v100"])["v100"] == pytest.approx(expected)
        assert speeds.performance(count, ["k80", "v100"])["k80"] == 1.0


def test_an_unused_kind_is_average() -> None:
    speeds = estimates((32.0, {"k80": 100.0, "v100": 300.0}), (32.0, {}))
    assert speeds.performance(0, ["k80", "v100", "tpu"])["tpu"] == pytest.approx(200.0)
    assert speeds.performance(1, ["tpu"]) == {"tpu": 1.0}
    assert estimates((1.0, {})).performance(0, ["k80", ""]) == {"k80": 1.0, "": 1.0}


def test_speeds_of_trials_that_have_ended_still_tell() -> None:
    speeds = estimates((32.0, {"k80": 100.0, "v100": 400.0}))
    speeds.update([TrialView(7, 0.0, batch_size=16.0, speeds={"k80": 20.0})])
    assert speeds.performance(7, ["v100"]) == pytest.approx({"v100": 80.0})


def test_a_speed_that_is_no_speed_is_not_measured() -> None:
    speeds = estimates((32.0, {"k80": 0.0, "v100": math.inf, "p100": math.nan}))
    assert speeds.measured == 0
