"""FIFO, round robin and SLAQ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from framework.policies.trials.fifo import FifoPolicy
from framework.policies.trials.interface import PolicySettings, Reading, SlotView, TrialView
from framework.policies.trials.round_robin import RoundRobinPolicy
from framework.policies.trials.slaq import LossPrediction, SlaqPolicy
from framework.policies.trials.slaq_curves import SHAPES, predicted_fall
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage

SETTINGS = PolicySettings(quantum_s=10.0, trials_per_slot=4)


def plans(count: int, length_s: float = 25.0) -> list[FakeTrial]:
    return [FakeTrial(lambda train_s: 9.0 - train_s, length_s) for _ in range(count)]


def test_fifo_runs_each_to_its_end_and_never_wakes() -> None:
    stage = PolicyStage(FifoPolicy(SETTINGS), plans(6), [FakeSlot(), FakeSlot()]).run(until_s=1000.0)
    assert [start.trial for start in stage.starts] == [0, 1, 2, 3, 4, 5]
    running = TrialView(0, 0.0, slices=[0], runnable=False)
    assert FifoPolicy(SETTINGS).decide(5.0, [running], [SlotView(0, 0)]).wake_at_s is None


def test_round_robin_gives_each_a_quantum_in_turn() -> None:
    policy = RoundRobinPolicy(SETTINGS)
    stage = PolicyStage(policy, plans(3), [FakeSlot()]).run(until_s=1000.0)
    assert [start.trial for start in stage.starts] == [0, 1, 2] * 3
    policy.decide(1000.0, [], [])
    assert policy.passed_over == {}, "trials that have ended are forgotten"


def test_round_robin_turns_to_one_that_waits_whatever_it_knows_of_it() -> None:
    policy = RoundRobinPolicy(SETTINGS)
    trials = [TrialView(0, 0.0, slices=[0], runnable=False), TrialView(1, 0.0, slices=[0])]
    policy.decide(0.0, trials, [SlotView(0, 0)])
    assert policy.decide(10.0, trials, [SlotView(0, 0)]).runs[0].trial == 1


def test_round_robin_lets_one_that_comes_late_in_once_a_round() -> None:
    late = FakeTrial(lambda train_s: 1.0, length_s=25.0, arrives_s=15.0)
    stage = PolicyStage(RoundRobinPolicy(SETTINGS), [*plans(2), late], [FakeSlot()]).run(until_s=1000.0)
    assert [start.trial for start in stage.starts] == [0, 1, 0, 2, 1, 0, 2, 1, 2]


@pytest.mark.parametrize(
    "curve",
    [
        lambda t: 2.0 + 3.0 * np.exp(-t / SHAPES[8]),
        lambda t: 2.0 + 3.0 * np.exp(-t / SHAPES[3]),
        lambda t: 2.0 + 3.0 / (t + SHAPES[4]),
        lambda t: -5.0 + 3.0 / (t + SHAPES[7]),
        lambda t: 2.0 - 0.5 / (t + SHAPES[11]),
    ],
)
@pytest.mark.parametrize("ahead", [0.05, 0.5])
def test_the_fall_of_a_curve_of_its_families_is_predicted_exactly(curve, ahead: float) -> None:  # type: ignore[no-untyped-def]
    times = np.linspace(0, 1, 20)
    assert predicted_fall(times, curve(times), ahead) == pytest.approx(curve(1.0) - curve(1.0 + ahead), rel=1e-6)


def test_a_curve_between_the_grid_s_is_predicted_nearly_and_noise_does_no_harm() -> None:
    times = np.linspace(0, 1, 20)
    truth = 3.0 * (math.exp(-1.0 / 0.6) - math.exp(-1.2 / 0.6))
    losses = 3.0 * np.exp(-times / 0.6)
    assert predicted_fall(times, losses, 0.2) == pytest.approx(truth, rel=0.2)
    noise = np.random.default_rng(0).normal(scale=0.02, size=20)
    assert predicted_fall(times, losses + noise, 0.2) == pytest.approx(truth, rel=0.5)
    assert predicted_fall(times, np.full(20, 0.1), 0.2) == pytest.approx(0.0, abs=1e-12)


def test_newer_losses_weigh_more() -> None:
    """A line with a bump at either end, which it has the same leverage on."""
    times = np.linspace(0, 1, 20)

    def bumped(at: int) -> float:
        losses = 1.0 - times
        losses[at] += 0.1
        return abs(predicted_fall(times, losses, 0.2) - 0.2)

    assert bumped(-1) > 1.5 * bumped(0)


def readings(losses: list[float], every_s: float = 10.0) -> list[Reading]:
    return [Reading(every_s * n, n, loss, loss, loss) for n, loss in enumerate(losses, 1)]


def score(losses: list[float]) -> float | None:
    prediction = LossPrediction(SETTINGS)
    prediction.update(TrialView(0, 0.0, readings(losses), [0]))
    return prediction.score


def test_the_prediction_is_normalised_by_the_greatest_change_so_far() -> None:
    small, large = ([scale * 0.5**n for n in range(8)] for scale in (1.0, 1000.0))
    expected = (0.5**7 - 0.5**8) / 0.5
    assert score(small) == pytest.approx(score(large))
    assert score(small) == pytest.approx(expected, rel=0.3)
    assert (score([n**2 for n in range(8)]) or 0) < 0, "a loss that rises"


def test_what_cannot_be_predicted() -> None:
    assert score([]) is None
    assert score([3.0, 2.0]) is None
    assert score([3.0, 2.0, math.nan]) == -math.inf
    assert score([math.inf]) == -math.inf
    assert score([math.nan, 1.0]) == 0.0
    assert score([2.0, 2.0, 2.0, 2.0]) == 0.0
    assert score([1e308, -1e308, 1e308, 1.0]) == 0.0
    stands_still = [Reading(5.0, n, 1.0 / n, 1.0, 1.0) for n in range(1, 5)]
    prediction = LossPrediction(SETTINGS)
    prediction.update(TrialView(0, 0.0, stands_still, [0]))
    assert prediction.score == 0.0


def test_slaq_prefers_early_progress_whatever_the_scale_of_a_loss() -> None:
    """The steeper curve has reached its floor; the other still falls at its initial rate."""
    done = TrialView(0, 0.0, readings([1000.0, 100.0, 10.0, 1.0, 0.1, 0.01]), [0])
    going = TrialView(1, 0.0, readings([1.0, 0.9, 0.8, 0.7, 0.6, 0.5]), [0])
    choice = SlaqPolicy(SETTINGS).decide(0.0, [done, going], [SlotView(0)]).runs[0]
    assert (choice.trial, choice.reason) == (1, "greatest predicted fall")
    assert choice.score == pytest.approx(1.0, rel=0.2)
