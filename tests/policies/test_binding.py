"""Which slot a trial belongs to."""

from __future__ import annotations

from dataclasses import replace

from framework.policies.trials.binding import Binding
from framework.policies.trials.interface import SlotView, TrialView


class BindingStage:
    """A binding with trials and slots that the test changes; each change is applied immediately."""

    def __init__(self, trials_per_slot: int = 2) -> None:
        self.binding = Binding(trials_per_slot)
        self.trials: dict[int, TrialView] = {}
        self.slots: dict[int, SlotView] = {}

    def follow(self) -> dict[int, list[int]]:
        self.binding.update(self.trials, list(self.slots.values()), lambda trial: trial.id)
        return {slot: list(self.binding.bound_to(slot)) for slot in self.slots}

    def arrive(self, *numbers: int, refused: frozenset[int] = frozenset()) -> dict[int, list[int]]:
        self.trials |= {number: TrialView(number, 0.0, refused=refused) for number in numbers}
        return self.follow()

    def run(self, **held: int) -> dict[int, list[int]]:
        for slot, trial in held.items():
            number = int(slot.removeprefix("slot"))
            self.slots[number] = SlotView(number, trial)
            self.trials[trial] = replace(self.trials[trial], runnable=False)
        return self.follow()

    def end(self, trial: int) -> dict[int, list[int]]:
        del self.trials[trial]
        self.slots = {n: SlotView(n) if slot.trial == trial else slot for n, slot in self.slots.items()}
        return self.follow()

    def come(self, *numbers: int) -> dict[int, list[int]]:
        self.slots |= {number: SlotView(number) for number in numbers}
        return self.follow()

    def go(self, number: int) -> dict[int, list[int]]:
        gone = self.slots.pop(number)
        if gone.trial is not None:
            self.trials[gone.trial] = replace(self.trials[gone.trial], runnable=True)
        return self.follow()


def test_an_arriving_trial_goes_to_the_slot_with_the_fewest_and_then_waits() -> None:
    stage = BindingStage()
    stage.come(0, 1)
    assert stage.arrive(0) == {0: [0], 1: []}
    assert stage.arrive(1, 2) == {0: [0, 2], 1: [1]}
    assert stage.arrive(3, 4, 5) == {0: [0, 2], 1: [1, 3]}


def test_the_first_of_the_queue_takes_the_place_of_one_that_ends() -> None:
    stage = BindingStage()
    stage.come(0, 1)
    stage.arrive(*range(6))
    assert stage.end(1) == {0: [0, 2], 1: [3, 4]}
    assert stage.end(0) == {0: [2, 5], 1: [3, 4]}


def test_the_queue_passes_by_those_that_refuse_the_slot() -> None:
    stage = BindingStage()
    stage.come(0, 1)
    stage.arrive(*range(4))
    stage.arrive(4, refused=frozenset({1}))
    stage.arrive(5)
    assert stage.end(1) == {0: [0, 2], 1: [3, 5]}
    assert stage.end(0) == {0: [2, 4], 1: [3, 5]}


def test_the_trials_of_a_slot_that_is_gone_come_first_in_order() -> None:
    stage = BindingStage()
    stage.come(0, 1)
    stage.arrive(*range(5))
    stage.run(slot0=2, slot1=1)
    assert stage.go(0) == {1: [1, 3]}
    assert stage.come(2) == {1: [1, 3], 2: [0, 2]}
    assert stage.end(3) == {1: [1, 4], 2: [0, 2]}


def test_a_trial_that_now_refuses_its_slot_leaves_it() -> None:
    stage = BindingStage()
    stage.come(0, 1)
    stage.arrive(0, 1)
    assert stage.arrive(0, refused=frozenset({0})) == {0: [1], 1: [0]}, "and the idle slot takes the other"


def test_an_idle_slot_takes_its_share_from_the_fullest() -> None:
    stage = BindingStage(trials_per_slot=4)
    stage.come(0)
    stage.arrive(0, 1, 2, 3)
    stage.run(slot0=0)
    assert stage.come(1) == {0: [0, 1], 1: [3, 2]}, "the greatest rank first, until they are even"
    assert stage.come(2) == {0: [0], 1: [3, 2], 2: [1]}
    stage.run(slot0=0, slot1=3, slot2=1)
    assert stage.end(0) == {0: [2], 1: [3], 2: [1]}
    stage.run(slot0=2)
    assert stage.end(1) == {0: [2], 1: [3], 2: []}, "no slot has a surplus trial"


def test_an_idle_slot_leaves_another_the_only_trial_that_it_can_run() -> None:
    stage = BindingStage()
    stage.come(0)
    stage.arrive(0)
    assert stage.come(1) == {0: [0], 1: []}
    assert stage.arrive(1, 2) == {0: [0, 2], 1: [1]}
    stage.slots[0] = SlotView(0, None, busy=True)
    stage.run(slot1=1)
    assert stage.end(1) == {0: [0], 1: [2]}
    assert stage.end(2) == {0: [], 1: [0]}, "a slot that is being filled or emptied has no use for it now"


def test_an_idle_slot_takes_nothing_that_refuses_it() -> None:
    stage = BindingStage()
    stage.come(0)
    stage.arrive(0)
    stage.arrive(1, refused=frozenset({1}))
    stage.run(slot0=0)
    assert stage.come(1) == {0: [0, 1], 1: []}
    assert stage.come(2) == {0: [0], 1: [], 2: [1]}


def test_a_slot_keeps_the_trial_that_is_about_to_get_it() -> None:
    stage = BindingStage()
    stage.come(0)
    stage.arrive(0, 1, 2)
    stage.run(slot0=0)
    stage.slots[0] = replace(stage.slots[0], busy=True)
    stage.trials[1] = replace(stage.trials[1], runnable=False)
    assert stage.follow() == {0: [0, 1]}


def test_a_trial_that_cannot_run_is_bound_to_nothing_but_the_slot_that_has_it() -> None:
    stage = BindingStage()
    stage.come(0)
    stage.arrive(0, 1, 2)
    stage.trials[1] = replace(stage.trials[1], runnable=False)
    assert stage.follow() == {0: [0, 2]}
    stage.end(0)
    assert stage.follow() == {0: [2]}
    stage.trials[1] = replace(stage.trials[1], runnable=True)
    assert stage.follow() == {0: [2, 1]}


def test_trials_that_run_already_are_bound_where_they_run() -> None:
    stage = BindingStage()
    stage.trials = {number: TrialView(number, 0.0, runnable=number != 2) for number in range(4)}
    stage.slots = {0: SlotView(0), 1: SlotView(1, 2)}
    assert stage.follow() == {0: [0, 1], 1: [2, 3]}
