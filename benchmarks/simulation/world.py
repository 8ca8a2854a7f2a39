"""Virtual time: trials follow recorded curves in slots that a policy assigns."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from benchmarks.simulation.bins import Bin
from benchmarks.simulation.state import SimulatedSlot, SimulatedTrial, SlotUtilization
from framework.policies.trials.interface import Choice, Policy, TrialView

Until = Literal["end", "target"]

_ROUNDING = 1e-6
"""Tolerance of sums of times, relative to the time between two reports."""


class PolicyViolationError(Exception):
    """A policy has broken a rule of `framework.policies.trials.interface.Policy`; the message names it."""


@dataclass(frozen=True)
class WorldSettings:
    """Settings independent of the policy.

    Attributes:
        overhead_s: seconds without training when a trial is put into a slot, new or resumed, the suspension of the
            previous trial included.
        report_s: seconds of training from one reading to the next; the rest is reported at a suspension.
        arrival_s: seconds from one trial's arrival to the next; 0: all arrive at time 0.
        until: whether trials leave at the end of their curve or at the target.
        kinds: the GPU type of each slot; empty if they are alike. With types the simulation continues until all trials
            have left.
        move_s: seconds in addition to `overhead_s` if the trial ran in another slot before.
    """

    slots: int
    overhead_s: float
    report_s: float
    arrival_s: float = 0.0
    until: Until = "end"
    kinds: tuple[str, ...] = ()
    move_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of one policy on a bin.

    Attributes:
        reached_s: when the good trials reached the target, ascending.
        preemptions: number of preemptions until then.
        completion_s: seconds from each trial's arrival until it left, by number; empty if slots are alike.
        speed: mean relative speed of a slot while there were trials for all slots (or, with fewer trials than slots,
            while all were there): its trial's speed relative to the trial's mean over the GPU types, 0 while empty or
            busy. 1 if slots are alike and never idle.
    """

    reached_s: tuple[float, ...]
    preemptions: int
    decisions: int
    completion_s: tuple[float, ...] = ()
    speed: float = math.nan


class _Event(Enum):
    """FILLED: a slot has been filled or emptied."""

    ARRIVAL = auto()
    FILLED = auto()
    END = auto()


class World:
    """Runs one policy on one bin, from the first arrival until all good trials have reached the target.

    A decision takes effect immediately: the victim reports the rest of its training, and for `overhead_s` neither it
        nor
    its successor can run elsewhere; then the successor trains, one second of its curve per second, scaled by the speed
    of the slot's GPU type relative to the curve's. Emptying a slot takes as long. The policy is called when trials
    arrive or end, when a slot has been filled or emptied, and at the times it requests.
    """

    def __init__(self, trials: Bin, policy: Policy, settings: WorldSettings) -> None:
        self._policy = policy
        self._settings = settings
        self._rounding_s = _ROUNDING * settings.report_s
        self._now_s = 0.0
        jobs = trials.jobs or (None,) * len(trials.curves)
        self._trials = [
            SimulatedTrial(
                number,
                curve,
                target_s,
                min(curve.length_s, target_s) if settings.until == "target" else curve.length_s,
                job,
            )
            for number, (curve, target_s, job) in enumerate(zip(trials.curves, trials.target_s, jobs, strict=True))
        ]
        kinds = settings.kinds or ("",) * settings.slots
        self._slots = [SimulatedSlot(number, kind) for number, kind in enumerate(kinds)]
        self._trial_views: dict[int, TrialView] = {}
        self._slot_views = [slot.view() for slot in self._slots]
        self._events: list[tuple[float, int, _Event, int, int]] = []
        self._counter = itertools.count()
        self._unreached = trials.good
        self._reached_s: list[float] = []
        self._completion_s: dict[int, float] = {}
        self._utilization = SlotUtilization(len(self._slots), len(self._trials))
        self._preemptions = 0
        self._decisions = 0

    def run(self) -> Outcome:
        """Runs the bin.

        Raises:
            PolicyViolationError: if the policy breaks a rule.
        """
        for trial in self._trials:
            self._push(trial.id * self._settings.arrival_s, _Event.ARRIVAL, trial.id)
        wake_s = math.inf
        preemptions = 0
        while not self._is_over:
            if not self._events and all(slot.trial is None for slot in self._slots):
                raise PolicyViolationError(f"{self._policy.name} leaves {len(self._trial_views)} trials waiting")
            self._now_s = min(self._events[0][0], wake_s) if self._events else wake_s
            something_happened = self._now_s == wake_s
            while self._events and self._events[0][0] <= self._now_s:
                _, _, event, number, fills = heapq.heappop(self._events)
                something_happened |= self._apply(event, number, fills)
            if not something_happened:
                continue
            for slot in self._slots:
                self._train(slot)
            self._utilization.advance(self._now_s)
            if not self._is_over:
                wake_s = self._decide()
            if self._unreached:
                preemptions = self._preemptions
        completion_s = tuple(self._completion_s[trial.id] for trial in self._trials) if self._settings.kinds else ()
        return Outcome(
            tuple(sorted(self._reached_s)), preemptions, self._decisions, completion_s, self._utilization.speed
        )

    @property
    def _is_over(self) -> bool:
        return not self._unreached and (not self._settings.kinds or len(self._completion_s) == len(self._trials))

    def _push(self, time_s: float, event: _Event, number: int, fills: int = 0) -> None:
        heapq.heappush(self._events, (time_s, next(self._counter), event, number, fills))

    def _apply(self, event: _Event, number: int, fills: int) -> bool:
        """Applies an event; returns whether it was still valid."""
        if event is _Event.ARRIVAL:
            self._trial_views[number] = self._trials[number].view(self._now_s, runnable=True)
            return True
        slot = self._slots[number]
        if slot.fills != fills:
            return False
        if event is _Event.END:
            self._end(slot)
        else:
            if slot.leaving is not None:
                self._update_trial_view(slot.leaving, runnable=True)
                slot.leaving = None
            slot.busy = False
            if slot.trial is not None:
                slot.trains_from_s, slot.trained_before_s = self._now_s, slot.trial.trained_s
                ends_s = self._now_s + slot.trial.ends_s / slot.pace - slot.trial.trained_s / slot.pace
                self._push(ends_s, _Event.END, number, fills)
        self._update_slot_view(slot)
        return True

    def _end(self, slot: SimulatedSlot) -> None:
        trial = slot.trial
        if trial is None:
            return
        self._train(slot, ends=True)
        self._completion_s[trial.id] = self._now_s - self._trial_views.pop(trial.id).arrived_s
        self._utilization.trial_left()
        slot.trial = None

    def _train(self, slot: SimulatedSlot, *, ends: bool = False) -> None:
        """Advances the trial of a slot to now; `ends` sets it to its end in spite of rounding."""
        trial = slot.trial
        if trial is None or slot.busy:
            return
        passed_s = (self._now_s - slot.trains_from_s) * slot.pace
        before_s = trial.trained_s
        trial.trained_s = trial.ends_s if ends else min(slot.trained_before_s + passed_s, trial.ends_s)
        self._utilization.add(slot, trial.trained_s - before_s)
        rounding_s = self._rounding_s * slot.pace
        if not trial.reached and trial.trained_s >= trial.target_s - rounding_s:
            trial.reached = True
            self._unreached -= 1
            self._reached_s.append(slot.trains_from_s + trial.target_s / slot.pace - slot.trained_before_s / slot.pace)
        every_s = self._settings.report_s * slot.pace
        while trial.trained_s - trial.reported_s >= every_s - rounding_s:
            trial.report(min(trial.reported_s + every_s, trial.trained_s), slot.kind)

    def _decide(self) -> float:
        """Calls the policy and applies its decision; returns when to call it again."""
        self._decisions += 1
        decision = self._policy.decide(self._now_s, list(self._trial_views.values()), list(self._slot_views))
        taken = {slot.trial.id: slot.id for slot in self._slots if slot.trial is not None}
        for slot_id, choice in decision.runs.items():
            self._check(slot_id, choice, taken)
            taken[choice.trial] = slot_id
        for slot_id in decision.suspends:
            if slot_id in decision.runs or slot_id not in taken.values() or self._slots[slot_id].busy:
                raise PolicyViolationError(
                    f"{self._policy.name} suspends the trial of slot {slot_id}, "
                    "which is empty, busy or about to be filled"
                )
        for slot_id, choice in sorted(decision.runs.items()):
            slot = self._slots[slot_id]
            if slot.trial is None or slot.trial.id != choice.trial:
                self._fill(slot, self._trials[choice.trial])
        for slot_id in sorted(decision.suspends):
            self._fill(self._slots[slot_id], None)
        if decision.wake_at_s is None:
            return math.inf
        if not decision.wake_at_s > self._now_s:
            raise PolicyViolationError(
                f"{self._policy.name} requests its next call at {decision.wake_at_s} s, "
                f"but it is already {self._now_s} s"
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

    def _fill(self, slot: SimulatedSlot, trial: SimulatedTrial | None) -> None:
        """Replaces the trial of a slot, by another or by none."""
        slot.leaving = slot.trial
        if slot.leaving is not None:
            self._preemptions += 1
            if slot.leaving.trained_s - slot.leaving.reported_s > self._rounding_s * slot.pace:
                slot.leaving.report(slot.leaving.trained_s, slot.kind)
        slot.trial, slot.busy, slot.since_s = trial, True, self._now_s
        slot.fills += 1
        ready_s = self._now_s + self._settings.overhead_s
        if trial is not None:
            if trial.slot not in (None, slot.id):
                ready_s += self._settings.move_s
            if trial.job is not None:
                slot.pace, slot.relative = trial.job.pace(slot.kind), trial.job.relative(slot.kind)
            trial.slot = slot.id
            trial.slices.append(len(trial.readings))
            self._update_trial_view(trial, runnable=False)
        self._update_slot_view(slot)
        self._push(ready_s, _Event.FILLED, slot.id, slot.fills)

    def _update_trial_view(self, trial: SimulatedTrial, *, runnable: bool) -> None:
        arrived_s = self._trial_views[trial.id].arrived_s
        self._trial_views[trial.id] = trial.view(arrived_s, runnable=runnable)

    def _update_slot_view(self, slot: SimulatedSlot) -> None:
        self._slot_views[slot.id] = slot.view()
