"""What ended trials of another search say of a trial."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from framework.policies.trials.dike_policy import DikePolicy
from framework.policies.trials.earlier_trials import EarlierTrial, EarlierTrials
from framework.policies.trials.interface import PolicySettings, Reading, SlotView, TrialView

QUANTUM_S = 10.0
STEPS = 100


def falls_late(step: float) -> float:
    """Nothing happens in the first half, and then it comes far."""
    return 3.0 if step <= STEPS / 2 else 3.0 - 2.8 * (step - STEPS / 2) / (STEPS / 2)


def flattens(step: float) -> float:
    """Falls early, but not far."""
    return max(1.5, 2.9 - 0.1 * step)


EARLIER = [
    EarlierTrial(range(1, STEPS + 1), [curve(step) + 0.01 * number for step in range(1, STEPS + 1)])
    for curve, count in ((falls_late, 4), (flattens, 12))
    for number in range(count)
]


def trial(number: int, losses: Sequence[float], step_s: float = 1.0, batch_size: float = 1.0) -> TrialView:
    """One that waits and has reported these losses, one for each step."""
    readings = [Reading(step_s * step, step, loss, loss, loss) for step, loss in enumerate(losses, 1)]
    return TrialView(number, 0.0, readings, [0], batch_size=batch_size)


def of(curve: object, steps: int) -> list[float]:
    assert callable(curve)
    return [curve(step) for step in range(1, steps + 1)]


def test_a_trial_like_those_that_came_far_has_the_better_chance_though_its_loss_is_higher() -> None:
    earlier = EarlierTrials(EARLIER)
    late, quick = trial(0, of(falls_late, 40)), trial(1, of(flattens, 40))
    assert late.readings[-1].loss > quick.readings[-1].loss
    assert earlier.chance(late, QUANTUM_S) > 10 * earlier.chance(quick, QUANTUM_S) > 0


def test_the_policy_gives_the_slot_to_it_and_without_earlier_trials_to_the_other() -> None:
    trials = [trial(0, of(falls_late, 40)), trial(1, of(flattens, 20))]
    settings = PolicySettings(quantum_s=QUANTUM_S)
    chosen = {
        earlier is None: DikePolicy(settings, earlier=earlier).decide(0.0, trials, [SlotView(0)]).runs[0]
        for earlier in (None, EarlierTrials(EARLIER))
    }
    assert chosen[True].trial == 1
    assert chosen[False].trial == 0
    assert chosen[False].reason == "best chance by earlier trials"


def test_the_chance_grows_as_the_goal_comes_nearer() -> None:
    chances = [EarlierTrials(EARLIER).chance(trial(0, of(falls_late, steps)), QUANTUM_S) for steps in (10, 40, 70, 90)]
    assert chances == sorted(set(chances))


def test_samples_count_and_not_seconds_or_steps() -> None:
    """A search on machines that are three times as slow, with steps of twice as many samples."""
    usual = EarlierTrials(EARLIER).chance(trial(0, of(falls_late, 40)), QUANTUM_S)
    known = EarlierTrials([dataclasses.replace(one, batch_size=32.0) for one in EARLIER])
    of_two = [falls_late(2 * step) for step in range(1, 21)]
    slow = known.chance(trial(0, of_two, step_s=6.0, batch_size=64.0), 3 * QUANTUM_S)
    assert slow == pytest.approx(usual, rel=0.05)


def test_steps_count_where_a_batch_size_is_unknown() -> None:
    usual = EarlierTrials(EARLIER).chance(trial(0, of(falls_late, 40)), QUANTUM_S)
    unknown = EarlierTrials([dataclasses.replace(one, batch_size=64.0) for one in EARLIER])
    assert unknown.chance(trial(0, of(falls_late, 40)), QUANTUM_S) == usual
    assert EarlierTrials(EARLIER).chance(trial(0, of(falls_late, 40), batch_size=64.0), QUANTUM_S) == usual


def test_a_trial_that_has_reported_nothing_is_one_of_many() -> None:
    """It is neither put off nor does it hold a slot for long beside one that is likely to come far."""
    earlier, silent = EarlierTrials(EARLIER), TrialView(1, 0.0, slices=[0])
    far, lost = trial(0, of(falls_late, 60)), trial(2, of(flattens, 60))
    chances = [earlier.chance(view, QUANTUM_S, QUANTUM_S) for view in (lost, silent, far)]
    assert chances == sorted(set(chances))
    assert earlier.chance(silent, QUANTUM_S, 10 * QUANTUM_S) < chances[1] / 5


@pytest.mark.parametrize(
    "losses", [[3.0, math.nan], [math.inf, 2.0], [1e300, 1e-300], [-1e200, -1e300], [5.0] * 3000, [0.0]]
)
def test_any_losses_have_a_chance_above_0(losses: list[float]) -> None:
    chance = EarlierTrials(EARLIER).chance(trial(0, losses), QUANTUM_S)
    assert 0 < chance < math.inf


def test_earlier_trials_that_diverged_or_are_all_alike_do_no_harm() -> None:
    lost = [EarlierTrial([1, 2], [math.nan, math.inf]), EarlierTrial([5, 6], [math.nan, 1.0])]
    for some in (lost * 4, [EarlierTrial([1, 2], [1.0, 1.0])] * 8, [EarlierTrial([1], [math.nan])] * 8):
        assert 0 < EarlierTrials(some).chance(trial(0, [2.0, 1.0]), QUANTUM_S) < math.inf


def test_a_trial_that_has_been_trained_for_longer_is_compared_with_the_ends() -> None:
    earlier = EarlierTrials(EARLIER)
    there, far = trial(0, [*of(falls_late, STEPS), *[0.2] * 200]), trial(1, [*of(flattens, STEPS), *[1.5] * 200])
    assert earlier.chance(there, QUANTUM_S) > 10 * earlier.chance(far, QUANTUM_S)
