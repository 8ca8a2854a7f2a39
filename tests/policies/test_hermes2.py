"""The meta scheduler above Hermes: which trial moves to which kind of slot, when, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from framework.policies.trials.hermes2 import PAPER, Hermes2Policy, MetaRules
from framework.policies.trials.interface import Choice, PolicySettings, Reading, SlotView, TrialView
from framework.policies.trials.registry import make_policy
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage

SETTINGS = PolicySettings(quantum_s=10.0, trials_per_slot=4)
FIXED = PolicySettings(quantum_s=10.0, trials_per_slot=4, milestones=(), quantum_growth=0.0)
ON_K80 = {"k80": 90.0, "p100": 40.0, "v100": 45.0}
ON_V100 = {"k80": 10.0, "p100": 40.0, "v100": 80.0}
EVEN = {"k80": 50.0, "p100": 50.0, "v100": 50.0}


def trial(speeds: Mapping[str, float] | None = None, length_s: float = 200.0, **changes: object) -> FakeTrial:
    return FakeTrial(lambda train_s: 10.0 - 0.01 * train_s, length_s, speeds=speeds or {}, **changes)


def slots(*kinds: str) -> list[FakeSlot]:
    return [FakeSlot(kind=kind) for kind in kinds]


def waiting(number: int, speeds: Mapping[str, float], batch_size: float = 1.0, *, started: bool = True) -> TrialView:
    readings, slices = ([Reading(10.0, 100, 1.0, 0.9, 1.1)], [0]) if started else ([], [])
    return TrialView(number, 0.0, readings, slices, batch_size=batch_size, speeds=speeds)


def chosen(trials: Sequence[TrialView], *kinds: str, policy: Hermes2Policy | None = None) -> dict[str, int]:
    """Kind of slot -> the trial that runs there first; the slots have one kind each."""
    views = [SlotView(number, kind=kind) for number, kind in enumerate(kinds)]
    runs = (policy or Hermes2Policy(SETTINGS)).decide(0.0, trials, views).runs
    return {kinds[slot]: choice.trial for slot, choice in runs.items()}


@pytest.mark.parametrize("kind", ["", "v100"])
def test_on_slots_of_one_kind_it_is_hermes(kind: str) -> None:
    plans = [
        FakeTrial(lambda t, pace=pace: 5.0 / (1 + 0.01 * pace * t), 40.0 + 13 * pace, arrives_s=7.0 * (pace % 3))
        for pace in range(9)
    ]
    worlds = [
        PolicyStage(make_policy(name, SETTINGS), plans, slots(kind, kind)).run(5000.0) for name in ("hermes", "hermes2")
    ]
    assert worlds[0].starts == worlds[1].starts


def test_trials_that_wait_go_where_they_are_fast() -> None:
    trials = [waiting(0, ON_K80), waiting(1, ON_V100)]
    assert chosen(trials, "v100", "k80") == {"k80": 0, "v100": 1}
    assert chosen(trials, "k80", "v100") == {"k80": 0, "v100": 1}


def test_no_kind_is_the_fast_one_for_all() -> None:
    trials = [waiting(0, {"p100": 2.2, "v100": 1.0}), waiting(1, {"p100": 0.6, "v100": 1.0})]
    assert chosen(trials, "v100", "p100") == {"p100": 0, "v100": 1}


def test_equation_2_on_relative_speeds_and_as_printed() -> None:
    """A trial of small samples gains most samples/s, one of large samples most of its own speed."""
    small, large = {"k80": 1000.0, "v100": 1100.0}, {"k80": 10.0, "v100": 60.0}
    trials = [waiting(0, small), waiting(1, large)]
    raw = Hermes2Policy(SETTINGS, PAPER)
    assert chosen(trials, "v100", "k80", policy=raw) == {"v100": 0, "k80": 1}
    assert chosen(trials, "v100", "k80") == {"v100": 1, "k80": 0}
    # Of one model with two batch sizes both say the same.
    one_model = [waiting(0, {"k80": 100.0, "v100": 300.0}, 16.0), waiting(1, {"k80": 110.0, "v100": 700.0}, 64.0)]
    assert chosen(one_model, "v100", "k80") == {"v100": 1, "k80": 0}
    assert chosen(one_model, "v100", "k80", policy=Hermes2Policy(SETTINGS, PAPER)) == {"v100": 1, "k80": 0}


def test_as_printed_large_batches_that_never_ran_go_to_the_faster_kind() -> None:
    known = [waiting(number, {"k80": 100.0, "v100": 400.0}, 32.0) for number in (0, 1)]
    new = [waiting(2, {}, 16.0, started=False), waiting(3, {}, 128.0, started=False)]
    policy = Hermes2Policy(PolicySettings(trials_per_slot=2), PAPER)
    assert chosen([*known, *new], "v100", "k80", policy=policy) == {"v100": 3, "k80": 2}


def test_a_move_is_weighed_against_its_cost_and_free_before_the_start() -> None:
    dear = PolicySettings(quantum_s=10.0, move_s=200.0)
    suspended = [waiting(0, ON_K80), waiting(1, ON_V100)]
    assert chosen(suspended, "v100", "k80", policy=Hermes2Policy(dear)) == {"v100": 0, "k80": 1}
    new = [waiting(0, ON_K80, started=False), waiting(1, ON_V100, started=False)]
    assert chosen(new, "v100", "k80", policy=Hermes2Policy(dear)) == {"v100": 1, "k80": 0}
    # Eq. 2 knows no costs.
    assert chosen(suspended, "v100", "k80", policy=Hermes2Policy(dear, PAPER)) == {"v100": 1, "k80": 0}


def test_every_kind_is_measured_early() -> None:
    plans = [trial(speeds, length_s=1e6) for speeds in (ON_K80, ON_V100, EVEN) * 3]
    stage = PolicyStage(make_policy("hermes2", SETTINGS), plans, slots("k80", "p100", "v100"))
    stage.run(1.0 + 3 * SETTINGS.quantum_s)
    assert {kind for state in stage.trials.values() for kind in state.speeds} == {"k80", "p100", "v100"}
    # Three groups of three equal trials: a measurement of one trial predicts the others of its group.
    stage.run(40 * SETTINGS.quantum_s)
    for speeds in (ON_K80, ON_V100, EVEN):
        measured = [state.speeds for state in stage.trials.values() if state.plan.speeds is speeds]
        assert {kind for one in measured for kind in one} == {"k80", "p100", "v100"}


def test_in_the_end_each_runs_where_it_is_fast() -> None:
    plans = [trial(speeds, length_s=2000.0) for speeds in (EVEN, ON_V100, ON_K80) * 2]
    stage = PolicyStage(make_policy("hermes2", FIXED), plans, slots("k80", "p100", "v100"))
    stage.run(2000.0)
    late = [start for start in stage.starts if start.at_s > 600.0]
    assert late
    best = {id(ON_K80): 0, id(EVEN): 1, id(ON_V100): 2}
    right = [start for start in late if best[id(plans[start.trial].speeds)] == start.slot]
    assert len(right) >= 0.9 * len(late)


def test_counts_stay_even_over_the_cluster() -> None:
    plans = [trial(ON_V100, length_s=1e6) for _ in range(12)]
    stage = PolicyStage(Hermes2Policy(SETTINGS), plans, slots("k80", "p100", "v100"))
    stage.run(600.0)
    # Once they have been measured: the trials that take turns in each slot.
    late = {(start.slot, start.trial) for start in stage.starts if start.at_s > 200.0}
    assert sorted(slot for slot, _ in late) == [0] * 4 + [1] * 4 + [2] * 4


def test_an_idle_slot_takes_over_a_trial_that_runs_on_a_slower_one() -> None:
    plans = [trial(ON_V100, length_s=100.0), trial(ON_V100, length_s=500.0)]
    stage = PolicyStage(make_policy("hermes2", SETTINGS), plans, slots("v100", "k80"), switch_s=1.0)
    assert stage.run(10_000.0).has_ended(1)
    assert [(start.slot, start.at_s) for start in stage.starts if start.trial == 1] == [(1, 0.0), (0, 102.0)]
    stage = PolicyStage(Hermes2Policy(SETTINGS, PAPER), plans, slots("v100", "k80"), switch_s=1.0)
    assert stage.run(10_000.0).has_ended(1)
    assert [start.slot for start in stage.starts if start.trial == 1] == [1]


def test_a_trial_that_cannot_be_suspended_stays() -> None:
    plans = [trial(EVEN, length_s=15.0), trial(ON_V100, length_s=500.0, preemptible=False)]
    stage = PolicyStage(make_policy("hermes2", SETTINGS), plans, slots("v100", "k80"))
    stage.run(10_000.0)
    assert [start.slot for start in stage.starts if start.trial == 1] == [1]


def test_a_running_trial_makes_place_at_the_end_of_its_quantum_only() -> None:
    policy = Hermes2Policy(SETTINGS)
    views = [SlotView(0, kind="v100", trial=0, since_s=0.0), SlotView(1, kind="k80", trial=1, since_s=0.0)]
    both = [
        TrialView(0, 0.0, [Reading(5.0, 50, 1.0, 0.8, 1.2)], [0], runnable=False, speeds=ON_K80),
        TrialView(1, 0.0, [Reading(5.0, 50, 1.0, 0.8, 1.2)], [0], runnable=False, speeds=ON_V100),
    ]
    slow = [
        TrialView(2, 0.0, [Reading(5.0, 50, 1.0, 0.99, 1.01)], [0], speeds=EVEN),
        TrialView(3, 0.0, [Reading(5.0, 50, 1.0, 0.99, 1.01)], [0], speeds=EVEN),
    ]
    first = policy.decide(1.0, [*both, *slow], views)
    assert (first.runs, first.suspends, first.wake_at_s) == ({}, frozenset(), 11.0)
    then = policy.decide(11.0, [*both, *slow], views).runs
    assert {slot: choice.trial for slot, choice in then.items()} in ({0: 2, 1: 3}, {0: 3, 1: 2})


def test_unknown_kinds_of_slots_are_average() -> None:
    trials = [waiting(0, {}, started=False), waiting(1, {}, started=False)]
    assert chosen(trials, "", "abacus") == {"": 0, "abacus": 1}
    assert Hermes2Policy(SETTINGS, MetaRules()).decide(0.0, trials, [SlotView(0)]).runs[0] == Choice(0, "first slice")
