"""Virtual time: what a decision costs, what is reported, what a policy may not do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from benchmarks.simulation.bins import Bin
from benchmarks.simulation.curves import Curve
from benchmarks.simulation.oracle import OraclePolicy
from benchmarks.simulation.world import Outcome, PolicyViolationError, World, WorldSettings
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView
from framework.policies.trials.registry import POLICIES, make_policy

Decide = Callable[[float, Sequence[TrialView], Sequence[SlotView]], Decision]


def straight(name: str, length_s: float) -> Curve:
    """Loss 1 at the beginning, 0 at the end; ten steps a second."""
    return Curve(name, [0.0, length_s], [0, 10 * length_s], [1.0, 0.0])


def bin_of(lengths_s: Sequence[float], targets_s: Sequence[float]) -> Bin:
    return Bin(tuple(straight(str(place), length) for place, length in enumerate(lengths_s)), tuple(targets_s))


class FakePolicy:
    """Does what a function says, and remembers what it saw."""

    name = "scripted"

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self.calls: list[tuple[float, list[tuple[int, bool, int]], list[SlotView]]] = []

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        seen = [(trial.id, trial.runnable, len(trial.readings)) for trial in trials]
        self.calls.append((now_s, seen, list(slots)))
        return self._decide(now_s, trials, slots)


def first_come(now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
    waiting = [trial.id for trial in trials if trial.runnable]
    free = [slot.id for slot in slots if slot.trial is None]
    return Decision({slot: Choice(trial, "first come") for slot, trial in zip(free, waiting, strict=False)})


def test_a_trial_costs_the_overhead_and_then_its_own_time() -> None:
    trials = bin_of([10, 20, 10], [5, 15, math.inf])
    outcome = World(trials, FakePolicy(first_come), WorldSettings(1, 1.0, 2.5)).run()
    assert outcome.reached_s == (6, 1 + 10 + 1 + 15)
    assert outcome.preemptions == 0
    leaving = World(trials, FakePolicy(first_come), WorldSettings(1, 1.0, 2.5, until="target")).run()
    assert leaving.reached_s == (6, 6 + 1 + 15)


def test_trials_arrive_one_after_the_other() -> None:
    policy = FakePolicy(first_come)
    outcome = World(bin_of([10, 10], [10, 10]), policy, WorldSettings(2, 0.0, 5.0, arrival_s=4.0)).run()
    assert outcome.reached_s == (10, 14)
    assert [len(trials) for _, trials, _ in policy.calls[:2]] == [1, 1]
    assert (4.0, [(0, False, 0), (1, True, 0)]) in [call[:2] for call in policy.calls]


def alternate(quantum_s: float) -> Decide:
    def decide(now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        (slot,) = slots
        waiting = [trial.id for trial in trials if trial.runnable]
        if slot.busy or not waiting:
            return Decision()
        if slot.trial is None or now_s - slot.since_s >= quantum_s:
            return Decision({0: Choice(waiting[0], "next")})
        return Decision({}, slot.since_s + quantum_s)

    return decide


def test_a_suspended_trial_resumes_where_it_was_and_reports_the_rest() -> None:
    views: dict[int, TrialView] = {}
    turns = alternate(4.0)

    def decide(now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        views.update((trial.id, trial) for trial in trials)
        return turns(now_s, trials, slots)

    policy = FakePolicy(decide)
    outcome = World(bin_of([9, 9], [9, 9]), policy, WorldSettings(1, 1.0, 2.0)).run()
    # Slices of 4 s, of which 1 s is overhead: 3, 3, 3, 3, 3 and the last 3 in turns.
    assert outcome.reached_s == (20, 24)
    assert outcome.preemptions == 4
    assert [reading.train_s for reading in views[0].readings] == [2, 3, 5, 6, 8]
    assert list(views[0].slices) == [0, 2, 4]
    assert [reading.loss for reading in views[0].readings] == pytest.approx(
        [1 - middle_s / 9 for middle_s in (1, 2.5, 4, 5.5, 7)]
    )
    assert [reading.count for reading in views[0].readings] == [20, 10, 20, 10, 20]
    busy = [(now_s, trials) for now_s, trials, (slot,) in policy.calls if slot.busy]
    assert all(not runnable for _, trials in busy for _, runnable, _ in trials)


def test_both_trials_of_a_replacement_are_held_until_it_is_over() -> None:
    policy = FakePolicy(alternate(4.0))
    World(bin_of([9, 9, 9], [9, 9, 9]), policy, WorldSettings(1, 1.0, 2.0, arrival_s=0.25)).run()
    now_s, trials, (slot,) = policy.calls[2]
    assert (now_s, slot) == (0.5, SlotView(0, 0, 0.0, busy=True))
    filled_s, trials, (slot,) = policy.calls[3]
    assert (filled_s, slot) == (1.0, SlotView(0, 0, 0.0))
    assert [runnable for _, runnable, _ in trials] == [False, True, True]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({0: 0, 1: 0}, "slot 0 has that trial"),
        ({7: 0}, "there is no such slot"),
        ({0: 9}, "there is no such trial"),
    ],
)
def test_impossible_decisions(wrong: dict[int, int], said: str) -> None:
    policy = FakePolicy(lambda *_: Decision({slot: Choice(trial, "") for slot, trial in wrong.items()}))
    with pytest.raises(PolicyViolationError, match=said):
        World(bin_of([5, 5], [5, 5]), policy, WorldSettings(2, 1.0, 1.0)).run()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ({0: {0: 0}, 1: {0: 1}}, "the slot is busy"),
        ({0: {0: 0}, 2: {1: 0}}, "slot 0 has that trial"),
        ({0: {0: 0}, 3: {0: 1}, 4: {1: 0}}, "the trial is not runnable"),
    ],
)
def test_decisions_that_come_too_soon(script: dict[int, dict[int, int]], said: str) -> None:
    """The policy is asked every 0.5 s; after 1 s a trial is in its slot."""
    calls = itertools.count()

    def decide(now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        runs = script.get(next(calls), {})
        return Decision({slot: Choice(trial, "") for slot, trial in runs.items()}, now_s + 0.5)

    with pytest.raises(PolicyViolationError, match=said):
        World(bin_of([5, 5], [5, 5]), FakePolicy(decide), WorldSettings(2, 1.0, 1.0)).run()


def test_a_policy_may_not_leave_all_waiting_nor_ask_for_the_past() -> None:
    for idle in (lambda *_: Decision(), lambda now_s, *_: Decision({}, now_s + 1.0)):
        with pytest.raises(PolicyViolationError, match="leaves 1 trials waiting"):
            World(bin_of([5], [5]), FakePolicy(idle), WorldSettings(1, 1.0, 1.0)).run()
    with pytest.raises(PolicyViolationError, match="requests its next call at"):
        World(bin_of([5], [5]), FakePolicy(lambda now_s, *_: Decision({}, now_s)), WorldSettings(1, 1.0, 1.0)).run()


def run(name: str, trials: Bin, world: WorldSettings) -> Outcome:
    settings = PolicySettings(quantum_s=3.0, switch_s=world.overhead_s, seed=1)
    policy = OraclePolicy(trials, settings) if name == "oracle" else make_policy(name, settings)
    return World(trials, policy, world).run()


def random_bin(seed: int, jobs: int) -> Bin:
    rng = np.random.default_rng(seed)
    curves, targets_s = [], []
    for number in range(jobs):
        length_s = float(rng.uniform(5, 40))
        losses = np.exp(-np.linspace(0, rng.uniform(0.5, 4), 12)) + rng.normal(0, 0.01, 12)
        if rng.random() < 0.2:
            losses[6:] = np.nan
        curves.append(Curve(str(number), np.linspace(0.1, length_s, 12).tolist(), list(range(12)), losses.tolist()))
        targets_s.append(curves[-1].time_to(0.3))
    return Bin(tuple(curves), tuple(targets_s))


def best_mean_s(trials: Bin, slots: int, overhead_s: float) -> float:
    """The least mean time to the target over all orders in which the good ones can be put into slots."""
    times_s = [time_s for time_s in trials.target_s if math.isfinite(time_s)]
    means_s = []
    for order in itertools.permutations(times_s):
        free_s = [0.0] * slots
        reached_s = []
        for time_s in order:
            slot = free_s.index(min(free_s))
            free_s[slot] += overhead_s + time_s
            reached_s.append(free_s[slot])
        means_s.append(sum(reached_s) / len(reached_s))
    return min(means_s)


@pytest.mark.parametrize("until", ["end", "target"])
@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_the_limit(seed: int, until: str) -> None:
    trials = random_bin(seed, 9)
    assert 2 <= trials.good <= 8
    world = WorldSettings(2, 0.3, 0.7, until="end" if until == "end" else "target")
    limit = np.mean(run("oracle", trials, world).reached_s)
    assert limit == pytest.approx(best_mean_s(trials, 2, 0.3), rel=1e-6)
    for name in POLICIES:
        assert np.mean(run(name, trials, world).reached_s) >= limit * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POLICIES, "oracle"])
def test_policies_keep_the_rules_and_are_deterministic(name: str) -> None:
    for seed in range(10, 15):
        trials = random_bin(seed, 16)
        for world in (WorldSettings(3, 0.5, 0.75), WorldSettings(3, 0.0, 1.0, arrival_s=2.5, until="target")):
            outcome = run(name, trials, world)
            assert len(outcome.reached_s) == trials.good
            assert run(name, trials, world) == outcome
