"""Population based training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from framework.policies.trials.interface import PolicySettings, Reading, SlotView, TrialView
from framework.policies.trials.pbt import PbtPolicy
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage

SETTINGS = PolicySettings(quantum_s=10.0)


def trained(number: int, train_s: float, loss: float, *, runnable: bool = True, saved: bool = True) -> TrialView:
    reading = Reading(train_s, 1, loss, loss, loss)
    return TrialView(number, 0.0, [reading], [0], runnable, has_checkpoint=saved)


def population(losses: Sequence[float], train_s: float = 10.0) -> tuple[PbtPolicy, list[TrialView]]:
    """Trials that have just trained for their first interval."""
    policy = PbtPolicy(SETTINGS)
    policy.decide(0.0, [TrialView(number, 0.0) for number in range(len(losses))], [])
    return policy, [trained(number, train_s, loss) for number, loss in enumerate(losses)]


def copies(policy: PbtPolicy, trials: Sequence[TrialView]) -> dict[int, int | None]:
    slots = [SlotView(number) for number in range(len(trials))]
    return {choice.trial: choice.copies for choice in policy.decide(10.0, trials, slots).runs.values()}


def test_the_worst_quarter_copies_the_best_quarter() -> None:
    made = copies(*population([3.0, 1.0, 2.0, 8.0, 4.0, 5.0, 9.0, 7.0]))
    assert {trial: source for trial, source in made.items() if source is not None}.keys() == {3, 6}
    assert {made[3], made[6]} <= {1, 2}


def test_two_trials_are_a_population_and_one_is_not() -> None:
    assert copies(*population([2.0, 1.0])) == {0: 1, 1: None}
    assert copies(*population([2.0])) == {0: None}


def test_a_trial_without_a_checkpoint_or_a_finite_loss_is_never_copied() -> None:
    policy, trials = population([2.0, 1.0])
    assert copies(policy, [trials[0], trained(1, 10.0, 1.0, saved=False)]) == {0: None, 1: None}
    assert copies(*population([math.nan, math.inf, -math.inf])) == {0: None, 1: None, 2: None}
    assert copies(*population([math.nan, 3.0])) == {0: 1, 1: None}


def test_a_trial_is_compared_once_in_an_interval() -> None:
    policy, trials = population([2.0, 1.0])
    assert copies(policy, trials)[0] == 1
    copied = [trained(0, 10.0, 1.0), trials[1]]
    assert copies(policy, copied) == {0: None, 1: None}
    assert copies(policy, [trained(0, 20.0, 0.5), trained(1, 20.0, 0.9)]) == {0: None, 1: 0}


def test_a_copy_trains_for_an_interval_from_wherever_it_continues() -> None:
    for train_s in (5.0, 10.0, 30.0):
        policy, trials = population([2.0, 1.0])
        assert copies(policy, trials)[0] == 1
        running = [trained(0, train_s, 1.0, runnable=False), trained(1, 11.0, 1.0, runnable=False)]
        slots = [SlotView(0, 0), SlotView(1, 1)]
        assert not policy.decide(10.0, running, slots).suspends, train_s
        running[0] = trained(0, train_s + 10.0, 0.5, runnable=False)
        assert policy.decide(20.0, running, slots).suspends == {0}


def test_a_trial_that_has_trained_for_its_interval_is_suspended_to_be_saved() -> None:
    policy, _ = population([2.0, 1.0])
    running = [trained(0, 4.0, 2.0, runnable=False), trained(1, 9.8, 1.0, runnable=False)]
    decision = policy.decide(10.0, running, [SlotView(0, 0), SlotView(1, 1)])
    assert (decision.suspends, dict(decision.runs), decision.wake_at_s) == ({1}, {}, 16.0)
    decision = policy.decide(10.0, [*running, TrialView(2, 0.0)], [SlotView(0, 0), SlotView(1, 1)])
    assert (decision.suspends, dict(decision.runs)) == ({1}, {}), "the next one may copy it"


def test_a_trial_is_not_copied_before_its_newest_loss_is_saved() -> None:
    policy, (worse, better) = population([2.0, 1.0])
    suspending = trained(1, 10.0, 1.0, runnable=False)
    assert policy.decide(10.0, [worse, suspending], [SlotView(0), SlotView(1, 1, busy=True)]).runs[0].copies is None
    assert copies(*population([2.0, 1.0])) == {0: better.id, 1: None}


def test_the_trial_that_trained_least_comes_first() -> None:
    policy = PbtPolicy(SETTINGS)
    waiting = [trained(0, 30.0, 1.0), trained(1, 12.0, 2.0), trained(2, 11.0, 3.0)]
    runs = policy.decide(0.0, waiting, [SlotView(0), SlotView(1)]).runs
    assert [runs[slot].trial for slot in (0, 1)] == [2, 1]


def test_a_resumed_search_compares_after_its_next_interval() -> None:
    policy = PbtPolicy(SETTINGS)
    assert copies(policy, [trained(0, 30.0, 2.0), trained(1, 30.0, 1.0)]) == {0: None, 1: None}
    assert copies(policy, [trained(0, 40.0, 2.0), trained(1, 40.0, 1.0)]) == {0: 1, 1: None}


def test_the_population_ends_with_the_good_trials_curve() -> None:
    plans = [FakeTrial(lambda s, floor=floor: floor + math.exp(-s / 50), length_s=200.0) for floor in range(8)]
    stage = PolicyStage(PbtPolicy(SETTINGS), plans, [FakeSlot(), FakeSlot()]).run(until_s=10_000.0)
    assert all(stage.has_ended(number) for number in range(8))
    last = [stage.trials[number].readings[-1].loss for number in range(8)]
    assert sum(loss < 1.5 for loss in last) >= 6, last
