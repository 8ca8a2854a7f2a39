"""Asynchronous successive halving with pauses."""

from __future__ import annotations

import math
from dataclasses import replace

from framework.policies.trials.asha import AshaPolicy
from framework.policies.trials.interface import Choice, PolicySettings, Reading, SlotView, TrialView
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage

SETTINGS = PolicySettings(quantum_s=10.0)


def paused(number: int, train_s: float, loss: float, runnable: bool = True) -> TrialView:
    return TrialView(number, 0.0, [Reading(train_s, 1, loss, loss, loss)], [0], runnable)


def choice(*trials: TrialView) -> Choice:
    return AshaPolicy(SETTINGS).decide(0.0, trials, [SlotView(0)]).runs[0]


def test_the_best_quarter_of_a_rung_is_promoted_before_anything_new_starts() -> None:
    first_rung = [paused(number, 10.0, loss) for number, loss in enumerate([3.0, 1.0, 2.0, 4.0])]
    assert choice(*first_rung, TrialView(4, 0.0)) == Choice(1, "promoted", -1.0)
    assert choice(*first_rung[:3], TrialView(4, 0.0)) == Choice(4, "first slice")


def test_the_highest_rung_is_looked_at_first() -> None:
    second_rung = [paused(number, 40.0, loss) for number, loss in enumerate([9.0, 6.0, 7.0, 8.0])]
    first_rung = [paused(number, 10.0, loss) for number, loss in enumerate([0.2, 0.1], 4)]
    assert choice(*second_rung, *first_rung).trial == 1


def test_where_asha_would_be_done_the_best_paused_trial_resumes() -> None:
    trials = [paused(0, 10.0, 1.0), paused(1, 40.0, 4.0), paused(2, 40.0, 3.0)]
    assert choice(*trials) == Choice(2, "best of the suspended", -3.0)


def test_losses_that_are_no_numbers_are_never_promoted_and_run_last() -> None:
    broken = [paused(number, 40.0, loss) for number, loss in enumerate([math.nan, -math.inf, math.inf, math.nan])]
    assert choice(*broken, TrialView(4, 0.0)).trial == 4
    assert choice(*broken, paused(4, 10.0, 5.0)).trial == 4
    mended = [replace(trial, readings=[*trial.readings, Reading(50.0, 2, 1.0, 1.0, 1.0)]) for trial in broken]
    assert choice(*mended, TrialView(4, 0.0)).trial == 4
    assert choice(*broken) == Choice(0, "no other trial can run")


def test_a_trial_runs_from_rung_to_rung() -> None:
    policy = AshaPolicy(SETTINGS)
    readings: list[Reading] = []
    running, waiting = TrialView(0, 0.0, readings, [0], runnable=False), TrialView(1, 0.0)
    assert policy.decide(0.0, [running, waiting], [SlotView(0, 0)]).wake_at_s == 10.0
    readings.append(Reading(8.0, 8, 1.0, 1.0, 1.0))
    early = policy.decide(10.0, [running, waiting], [SlotView(0, 0)])
    assert (dict(early.runs), early.wake_at_s) == ({}, 12.0)
    readings.append(Reading(9.9, 10, 1.0, 1.0, 1.0))
    assert policy.decide(12.0, [running, waiting], [SlotView(0, 0)]).runs[0] == Choice(1, "first slice")


def test_a_trial_that_lost_its_slot_resumes_to_its_rung_first() -> None:
    policy = AshaPolicy(SETTINGS)
    readings = [Reading(10.0, 10, 1.0, 1.0, 1.0)]
    others = [TrialView(1, 0.0), TrialView(2, 0.0)]
    assert policy.decide(0.0, [TrialView(0, 0.0, readings, [0])], [SlotView(0)]).runs[0].trial == 0
    readings.append(Reading(25.0, 25, 1.0, 1.0, 1.0))
    back = policy.decide(20.0, [TrialView(0, 0.0, readings, [0, 1]), *others], [SlotView(1)])
    assert back.runs[1] == Choice(0, "continues to its rung", -1.0)


def test_slots_are_given_to_the_best_that_do_not_refuse_them() -> None:
    trials = [TrialView(0, 0.0, refused=frozenset({0})), TrialView(1, 0.0)]
    runs = AshaPolicy(SETTINGS).decide(0.0, trials, [SlotView(0), SlotView(1)]).runs
    assert {slot: made.trial for slot, made in runs.items()} == {0: 1, 1: 0}


def test_the_best_trial_is_done_long_before_the_worst() -> None:
    plans = [FakeTrial(lambda train_s, floor=floor: floor, length_s=300.0) for floor in (5, 3, 7, 1, 8, 2, 6, 4)]
    stage = PolicyStage(AshaPolicy(SETTINGS), plans, [FakeSlot()]).run(until_s=10_000.0)
    ends_s = {number: trial.ended_s or math.inf for number, trial in stage.trials.items()}
    assert min(ends_s, key=lambda number: ends_s[number]) == 3
    assert ends_s[3] < 700.0
    assert max(ends_s.values()) > 2400.0
