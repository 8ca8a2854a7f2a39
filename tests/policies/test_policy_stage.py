"""The checks of the world find what they are there for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from framework.policies.trials.interface import Choice, Decision, SlotView, TrialView
from tests.policies.policy_stage import FakeSlot, FakeTrial, PolicyStage, violations

TRIALS = [
    TrialView(0, 0.0, runnable=False),
    TrialView(1, 0.0),
    TrialView(2, 0.0, runnable=False, preemptible=False),
    TrialView(3, 0.0, refused=frozenset({3})),
    TrialView(4, 0.0, runnable=False),
]
SLOTS = [SlotView(0, trial=0), SlotView(1, trial=2), SlotView(2, trial=4, busy=True), SlotView(3)]


def decision(runs: dict[int, int], wake_at_s: float | None = None, score: float | None = None) -> Decision:
    return Decision({slot: Choice(trial, "", score) for slot, trial in runs.items()}, wake_at_s)


@pytest.mark.parametrize(
    "good", [decision({3: 1}), decision({0: 3, 3: 1}, 10.5), decision({0: 0, 1: 2, 3: 1}, None, -math.inf)]
)
def test_what_is_allowed(good: Decision) -> None:
    assert violations(good, 10.0, TRIALS, SLOTS) == []


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (decision({3: 1, 7: 3}), "slot 7 does not exist"),
        (decision({3: 1, 0: 9}), "trial 9 has not arrived or has ended"),
        (decision({3: 1, 2: 4}), "slot 2 is busy"),
        (decision({3: 4}), "trial 4 cannot be given a slot"),
        (decision({3: 1, 0: 2}), "trial 2 cannot be given a slot"),
        (decision({3: 3}), "trial 3 refuses slot 3"),
        (decision({3: 1, 1: 3}), "trial 2 cannot be suspended"),
        (decision({3: 1, 0: 1}), "trial 1 has two slots"),
        (decision({3: 1}, 10.0), "asks at 10.0 to be woken at 10.0"),
        (decision({3: 1}, math.inf), "asks at 10.0 to be woken at inf"),
        (decision({3: 1}, None, math.nan), "the score of trial 1 is NaN"),
        (decision({}), "slot 3 stays empty, though trial 1 waits"),
    ],
)
def test_what_is_not(bad: Decision, found: str) -> None:
    assert found in violations(bad, 10.0, TRIALS, SLOTS)


@pytest.mark.parametrize(
    ("vacated", "found"),
    [
        (0, []),
        (1, ["trial 2 cannot be suspended"]),
        (2, ["slot 2 cannot be vacated"]),
        (3, ["slot 3 cannot be vacated"]),
        (7, ["slot 7 cannot be vacated"]),
    ],
)
def test_what_may_be_vacated(vacated: int, found: list[str]) -> None:
    assert violations(replace(decision({3: 1}), suspends=frozenset({vacated})), 10.0, TRIALS, SLOTS) == found


class FakePolicy:
    """Fills a slot when it first sees one, and never again."""

    name = "forgetful"

    def __init__(self) -> None:
        self._asked = False

    def decide(self, now_s: float, trials: list[TrialView], slots: list[SlotView]) -> Decision:
        if self._asked or not trials or not slots:
            return Decision()
        self._asked = True
        return decision({0: 0})


def test_a_world_in_which_nothing_can_happen_is_an_error() -> None:
    one, two = FakeTrial(lambda _: 1.0, length_s=10.0), FakeTrial(lambda _: 1.0, length_s=10.0, arrives_s=11.5)
    with pytest.raises(AssertionError, match=r"at 11.5 s: slot 0 stays empty, though trial 1 waits"):
        PolicyStage(FakePolicy(), [one, two], [FakeSlot()]).run(100.0)
    with pytest.raises(AssertionError, match="nothing can happen"):
        PolicyStage(FakePolicy(), [one, two], []).run(100.0)


def test_the_world_keeps_time() -> None:
    plan = FakeTrial(lambda train_s: 100.0 - train_s, length_s=10.0, report_s=4.0)
    stage = PolicyStage(FakePolicy(), [plan], [FakeSlot(comes_s=2.0)], switch_s=1.5).run(100.0)
    assert stage.now_s == 13.5
    readings = stage.trials[0].readings
    assert [reading.train_s for reading in readings] == [4.0, 8.0, 10.0]
    assert [(reading.low, reading.high, reading.count) for reading in readings[:2]] == [(96, 99, 16), (92, 95, 16)]
