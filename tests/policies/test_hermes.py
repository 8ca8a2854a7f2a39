"""The paper's rule and what it leaves open, on one slot."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from framework.policies.trials.hermes import HermesPolicy
from framework.policies.trials.interface import Choice, Milestone, PolicySettings, Reading, SlotView, TrialView
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage

SETTINGS = PolicySettings(quantum_s=10.0, trials_per_slot=4)
FIXED = PolicySettings(quantum_s=10.0, trials_per_slot=4, milestones=(), quantum_growth=0.0)


def after_one_quantum(number: int, fall: float, runnable: bool = True, preemptible: bool = True) -> TrialView:
    """A trial of one quantum, with this convergence."""
    reading = Reading(10.0, 100, 1 - fall / 2, 1 - fall, 1.0, 1)
    return TrialView(number, 0.0, [reading], [0], runnable, preemptible)


def at_the_end_of_a_quantum(running: TrialView, *waiting: TrialView) -> Choice | None:
    """What the policy decides of a slot that held the trial for a quantum."""
    policy = HermesPolicy(SETTINGS)
    trials = sorted([running, *waiting], key=lambda trial: trial.id)
    slots = [SlotView(0, running.id, since_s=100.0)]
    first = policy.decide(101.0, trials, slots)
    assert (dict(first.runs), first.wake_at_s) == ({}, 111.0), "the quantum begins when the slot has been filled"
    return policy.decide(111.0, trials, slots).runs.get(0)


def test_the_fastest_convergence_runs() -> None:
    trials = [after_one_quantum(number, fall) for number, fall in enumerate([0.1, 0.3, 0.2])]
    choice = HermesPolicy(SETTINGS).decide(0.0, trials, [SlotView(0)]).runs[0]
    assert choice == Choice(1, "fastest convergence", pytest.approx(0.3))


def test_a_trial_that_never_ran_comes_first() -> None:
    choice = at_the_end_of_a_quantum(after_one_quantum(0, 0.5, runnable=False), TrialView(1, 0.0), TrialView(2, 0.0))
    assert choice == Choice(1, "first slice")


def test_the_running_trial_is_a_candidate_and_continues_at_equal_convergence() -> None:
    for running, waiting, chosen in ((0.2, 0.1, 1), (0.2, 0.2, 1), (0.1, 0.2, 0)):
        choice = at_the_end_of_a_quantum(after_one_quantum(1, running, runnable=False), after_one_quantum(0, waiting))
        assert choice is not None
        assert choice.trial == chosen


def test_of_equal_ones_the_first_runs() -> None:
    choice = at_the_end_of_a_quantum(
        after_one_quantum(0, 0.1, runnable=False), after_one_quantum(1, 0.2), after_one_quantum(2, 0.2)
    )
    assert choice == Choice(1, "fastest convergence", pytest.approx(0.2))


def test_only_preemptible_trials_are_preempted() -> None:
    running = after_one_quantum(0, 0.1, runnable=False, preemptible=False)
    assert at_the_end_of_a_quantum(running, after_one_quantum(1, 0.2)) is None


def test_a_trial_is_not_interrupted_before_its_first_report() -> None:
    silent = TrialView(5, 0.0, [], [0], runnable=False)
    assert at_the_end_of_a_quantum(silent, TrialView(1, 0.0)) == Choice(5, "no report yet")


def test_of_unknown_trials_one_that_never_ran_comes_first() -> None:
    trials = [TrialView(0, 0.0, [], [0]), TrialView(1, 0.0)]
    assert HermesPolicy(SETTINGS).decide(0.0, trials, [SlotView(0)]).runs[0] == Choice(1, "first slice")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_trial_comes_after_one_whose_loss_rises(value: float) -> None:
    broken = TrialView(0, 0.0, [Reading(10.0, 100, value, value, value)], [0], runnable=False)
    rising = TrialView(1, 0.0, [Reading(at_s, int(at_s), at_s, at_s, at_s) for at_s in (10.0, 20.0)], [0])
    assert at_the_end_of_a_quantum(broken, rising) == Choice(1, "fastest convergence", pytest.approx(-10.0))
    assert at_the_end_of_a_quantum(broken) == Choice(0, "no other trial waits"), "but it runs when nothing else can"


def test_a_trial_passed_over_too_often_gets_one_quantum() -> None:
    falling = FakeTrial(lambda train_s: 100.0 - train_s, length_s=100_000.0)
    flat = [FakeTrial(lambda train_s: 1.0, length_s=100_000.0) for _ in range(2)]
    stage = PolicyStage(HermesPolicy(FIXED), [falling, *flat], [FakeSlot()]).run(until_s=5000.0)
    aged = [start for start in stage.starts if start.reason == "passed over too often"]
    assert Counter(start.trial for start in aged).keys() == {1, 2}
    share = (stage.train_s(1) + stage.train_s(2)) / stage.now_s
    assert 0.02 < share < 0.1
    assert not any(start.trial == follower.trial for start, follower in pairwise(aged))
    for trial in (1, 2):
        times_s = [start.at_s for start in aged if start.trial == trial]
        assert max(later - earlier for earlier, later in pairwise(times_s)) < 45 * 12.0


def test_the_quantum_grows_at_milestones() -> None:
    settings = PolicySettings(10.0, 4, (Milestone(0.5, 30.0),))
    policy = HermesPolicy(settings)
    readings = [Reading(10.0, 10, 4.0, 4.0, 4.0)]
    trial, slot = TrialView(0, 0.0, readings, [0], runnable=False), SlotView(0, 0)
    assert policy.decide(0.0, [trial], [slot]).wake_at_s == 10.0
    readings.append(Reading(20.0, 20, 1.0, 1.0, 1.0))
    assert policy.decide(10.0, [trial], [slot]).wake_at_s == 40.0


def test_the_quantum_grows_with_each_preemption() -> None:
    slot = SlotView(0, 0)
    readings = [Reading(10.0 * n, 10 * n, 5.0 - 0.1 * n, 5.0 - 0.1 * n, 5.0 - 0.1 * n) for n in range(1, 5)]
    trial = TrialView(0, 0.0, readings, [0, 1, 3], runnable=False)
    for settings, wake_at_s in ((SETTINGS, 15.0), (FIXED, 10.0)):
        assert HermesPolicy(settings).decide(0.0, [trial], [slot]).wake_at_s == wake_at_s
    longer = PolicySettings(10.0, 4, (Milestone(0.02, times=3.0),), quantum_growth=1.0)
    assert HermesPolicy(longer).decide(0.0, [trial], [slot]).wake_at_s == 90.0, "both count"


def test_growing_quanta_spare_preemptions() -> None:
    plans = [FakeTrial(lambda t, n=n: math.exp(-0.004 * t * n), length_s=1000.0) for n in (1, 1, 2)]
    worlds = [PolicyStage(HermesPolicy(settings), plans, [FakeSlot()]).run(10_000.0) for settings in (SETTINGS, FIXED)]
    assert all(stage.has_ended(number) for stage in worlds for number in range(3))
    assert len(worlds[0].starts) < len(worlds[1].starts)


def test_the_paper_order_of_a_small_search() -> None:
    """Each trial has its first quantum, then the one that falls fastest runs to its end."""
    paces = [1.0, 3.0, 2.0]
    plans = [FakeTrial(lambda train_s, pace=pace: 1000.0 - pace * train_s, length_s=50.0) for pace in paces]
    stage = PolicyStage(HermesPolicy(SETTINGS), plans, [FakeSlot()]).run(until_s=1000.0)
    assert [start.trial for start in stage.starts] == [0, 1, 2, 1, 2, 0]
