"""Virtual time: trials follow recorded curves in slots that a policy gives out."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from framework.policies.interface import Choice, Policy, Reading, SlotView, TrialView
from framework.simulation.bins import Bin
from framework.simulation.curves import Curve

Until = Literal["end", "target"]

_ROUNDING = 1e-6
"""Sums of times may be wrong by this share of the time between two reports."""


class PolicyViolationError(Exception):
    """A policy has broken a rule of `framework.policies.interface.Policy`; the message says which."""


@dataclass(frozen=True)
class WorldSettings:
    """What does not depend on the policy.

    Attributes:
        slots: how many there are.
        overhead_s: seconds for which a slot does not train when a trial is put into it, whether it suspends another
            before or not, and whether the trial is new or resumes.
        report_s: seconds of training from one reading to the next; what is left is reported at a suspension.
        arrival_s: seconds from the arrival of a trial to that of the next; 0: all arrive at time 0.
        until: whether trials leave at the end of their curve, or as soon as they have reached the target.
    """

    slots: int
    overhead_s: float
    report_s: float
    arrival_s: float = 0.0
    until: Until = "end"


@dataclass(frozen=True)
class Outcome:
    """What a policy has made of a bin.

    Attributes:
        reached_s: when the good trials reached the target, ascending.
        preemptions: how often a trial had to make place for another.
        decisions: how often the policy was asked.
    """

    reached_s: tuple[float, ...]
    preemptions: int
    decisions: int


class _Event(Enum):
    ARRIVAL = auto()
    FILLED = auto()
    END = auto()


@dataclass(slots=True)
class _Trial:
    id: int
    curve: Curve
    target_s: float
    ends_s: float
    trained_s: float = 0.0
    reported_s: float = 0.0
    reached: bool = False
    readings: list[Reading] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    """A slot; `fills` tells an event of its current trial from one of an earlier trial."""

    id: int
    trial: _Trial | None = None
    leaving: _Trial | None = None
    since_s: float = 0.0
    trains_from_s: float = 0.0
    trained_before_s: float = 0.0
    busy: bool = False
    fills: int = 0


class World:
    """One policy on one bin, from the first arrival until all good trials have reached the target.

    A decision takes effect at once: the trial that has to make place reports what it has not yet reported, and for
    `overhead_s` neither it nor the one that takes its place can be run elsewhere; then the new one trains, one second
    of its curve in a second. The policy is asked when trials arrive or end, when a slot is filled, and when it wants.

    Args:
        trials: the bin.
        policy: a new policy.
        settings: see there.
    """

    def __init__(self, trials: Bin, policy: Policy, settings: WorldSettings) -> None:
        self._policy = policy
        self._settings = settings
        self._rounding_s = _ROUNDING * settings.report_s
        self._now_s = 0.0
        self._trials = [
            _Trial(
                number,
                curve,
                target_s,
                min(curve.length_s, target_s) if settings.until == "target" else curve.length_s,
            )
            for number, (curve, target_s) in enumerate(zip(trials.curves, trials.target_s, strict=True))
        ]
        self._slots = [_Slot(number) for number in range(settings.slots)]
        self._trial_views: dict[int, TrialView] = {}
        self._slot_views = [SlotView(slot.id) for slot in self._slots]
        self._events: list[tuple[float, int, _Event, int, int]] = []
        self._counter = itertools.count()
        self._missing = trials.good
        self._reached_s: list[float] = []
        self._preemptions = 0
        self._decisions = 0

    def run(self) -> Outcome:
        """Runs it.

        Raises:
            PolicyViolationError: if the policy breaks a rule.
        """
        for trial in self._trials:
            self._push(trial.id * self._settings.arrival_s, _Event.ARRIVAL, trial.id)
        wake_s = math.inf
        while self._missing:
            if not self._events and all(slot.trial is None for slot in self._slots):
                raise PolicyViolationError(f"{self._policy.name} leaves {len(self._trial_views)} trials waiting")
            self._now_s = min(self._events[0][0], wake_s) if self._events else wake_s
            something_happened = self._now_s == wake_s
            while self._events and self._events[0][0] <= self._now_s:
                _, _, event, number, fills = heapq.heappop(self._events)
                something_happened |= self._take(event, number, fills)
            if not something_happened:
                continue
            for slot in self._slots:
                self._train(slot)
            if self._missing:
                wake_s = self._decide()
        return Outcome(tuple(sorted(self._reached_s)), self._preemptions, self._decisions)

    def _push(self, time_s: float, event: _Event, number: int, fills: int = 0) -> None:
        heapq.heappush(self._events, (time_s, next(self._counter), event, number, fills))

    def _take(self, event: _Event, number: int, fills: int) -> bool:
        """Makes an event happen; whether it did."""
        if event is _Event.ARRIVAL:
            trial = self._trials[number]
            self._trial_views[number] = TrialView(number, self._now_s, trial.readings, trial.slices)
            return True
        slot = self._slots[number]
        if slot.fills != fills or slot.trial is None:
            return False
        if event is _Event.FILLED:
            if slot.leaving is not None:
                self._see_trial(slot.leaving, runnable=True)
                slot.leaving = None
            slot.busy = False
            slot.trains_from_s, slot.trained_before_s = self._now_s, slot.trial.trained_s
            self._push(self._now_s + slot.trial.ends_s - slot.trial.trained_s, _Event.END, number, fills)
        else:
            self._train(slot, ends=True)
            del self._trial_views[slot.trial.id]
            slot.trial = None
        self._see_slot(slot)
        return True

    def _train(self, slot: _Slot, *, ends: bool = False) -> None:
        """Lets the trial of a slot come to where it is now; `ends` says that this is its end, rounding or not."""
        trial = slot.trial
        if trial is None or slot.busy:
            return
        passed_s = self._now_s - slot.trains_from_s
        trial.trained_s = trial.ends_s if ends else min(slot.trained_before_s + passed_s, trial.ends_s)
        if not trial.reached and trial.trained_s >= trial.target_s - self._rounding_s:
            trial.reached = True
            self._missing -= 1
            self._reached_s.append(slot.trains_from_s + trial.target_s - slot.trained_before_s)
        every_s = self._settings.report_s
        while trial.trained_s - trial.reported_s >= every_s - self._rounding_s:
            self._report(trial, min(trial.reported_s + every_s, trial.trained_s))

    def _report(self, trial: _Trial, until_s: float) -> None:
        trial.readings.append(trial.curve.reading(trial.reported_s, until_s))
        trial.reported_s = until_s

    def _decide(self) -> float:
        """Asks the policy, does what it says, and returns when to ask again."""
        self._decisions += 1
        decision = self._policy.decide(self._now_s, list(self._trial_views.values()), list(self._slot_views))
        taken = {slot.trial.id: slot.id for slot in self._slots if slot.trial is not None}
        for slot_id, choice in decision.runs.items():
            self._check(slot_id, choice, taken)
            taken[choice.trial] = slot_id
        for slot_id, choice in sorted(decision.runs.items()):
            slot = self._slots[slot_id]
            if slot.trial is None or slot.trial.id != choice.trial:
                self._fill(slot, self._trials[choice.trial])
        if decision.wake_at_s is None:
            return math.inf
        if not decision.wake_at_s > self._now_s:
            raise PolicyViolationError(
                f"{self._policy.name} wants to be asked at {decision.wake_at_s} s, and it is {self._now_s} s"
            )
        return decision.wake_at_s

    def _check(self, slot_id: int, choice: Choice, taken: dict[int, int]) -> None:
        wrong = None
        if not 0 <= slot_id < len(self._slots):
            wrong = "there is no such slot"
        elif self._slots[slot_id].busy:
            wrong = "the slot is busy"
        elif choice.trial not in self._trial_views:
            wrong = "there is no such trial, or it has ended"
        elif taken.get(choice.trial, slot_id) != slot_id:
            wrong = f"slot {taken[choice.trial]} has that trial"
        elif choice.trial not in taken and not self._trial_views[choice.trial].runnable:
            wrong = "the trial is not runnable"
        if wrong:
            raise PolicyViolationError(
                f"{self._policy.name} gives slot {slot_id} to trial {choice.trial} at {self._now_s} s, but {wrong}"
            )

    def _fill(self, slot: _Slot, trial: _Trial) -> None:
        slot.leaving = slot.trial
        if slot.leaving is not None:
            self._preemptions += 1
            if slot.leaving.trained_s - slot.leaving.reported_s > self._rounding_s:
                self._report(slot.leaving, slot.leaving.trained_s)
        slot.trial, slot.busy, slot.since_s = trial, True, self._now_s
        slot.fills += 1
        trial.slices.append(len(trial.readings))
        self._see_trial(trial, runnable=False)
        self._see_slot(slot)
        self._push(self._now_s + self._settings.overhead_s, _Event.FILLED, slot.id, slot.fills)

    def _see_trial(self, trial: _Trial, *, runnable: bool) -> None:
        before = self._trial_views[trial.id]
        self._trial_views[trial.id] = TrialView(
            trial.id, before.arrived_s, trial.readings, trial.slices, runnable=runnable
        )

    def _see_slot(self, slot: _Slot) -> None:
        trial = None if slot.trial is None else slot.trial.id
        self._slot_views[slot.id] = SlotView(slot.id, trial, slot.since_s, slot.busy)
