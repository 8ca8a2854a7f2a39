"""A small stage in virtual time that holds a policy to its contract: trials come and end, slots come and go."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from framework.policies.trials.interface import Decision, Policy, Reading, SlotView, TrialView

STEPS_PER_S = 4


@dataclass(frozen=True)
class FakeTrial:
    """A trial to come: its loss by training time; `report_s` apart are its reports, infinity for a silent one.

    `speeds`: what is measured of it on which kind of slot, samples a second; it trains equally fast on all.
    """

    loss: Callable[[float], float]
    length_s: float
    arrives_s: float = 0.0
    report_s: float = 2.5
    preemptible: bool = True
    refused: frozenset[int] = frozenset()
    speeds: Mapping[str, float] = field(default_factory=dict)
    batch_size: float = 1.0


@dataclass(frozen=True)
class FakeSlot:
    """A slot that is there for a time."""

    comes_s: float = 0.0
    goes_s: float = math.inf
    kind: str = ""


@dataclass(frozen=True)
class Start:
    """A slot was given to a trial."""

    at_s: float
    slot: int
    trial: int
    reason: str


def violations(decision: Decision, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> list[str]:
    """What a decision does that `framework.policies.trials.interface.Policy` forbids, and the work it leaves undone."""
    trial_by_id = {trial.id: trial for trial in trials}
    slot_by_id = {slot.id: slot for slot in slots}
    found = []
    for slot_id, choice in decision.runs.items():
        slot, trial = slot_by_id.get(slot_id), trial_by_id.get(choice.trial)
        if slot is None:
            found.append(f"slot {slot_id} does not exist")
        elif trial is None:
            found.append(f"trial {choice.trial} has not arrived or has ended")
        elif slot.busy:
            found.append(f"slot {slot_id} is busy")
        elif slot.trial != trial.id:
            if not trial.runnable:
                found.append(f"trial {trial.id} cannot be given a slot")
            if slot_id in trial.refused:
                found.append(f"trial {trial.id} refuses slot {slot_id}")
            if slot.trial in trial_by_id and not trial_by_id[slot.trial].preemptible:
                found.append(f"trial {slot.trial} cannot be suspended")
        if choice.copies is not None and (
            choice.copies == choice.trial
            or choice.copies not in trial_by_id
            or not trial_by_id[choice.copies].has_checkpoint
        ):
            found.append(f"trial {choice.trial} cannot copy trial {choice.copies}")
        if choice.score is not None and math.isnan(choice.score):
            found.append(f"the score of trial {choice.trial} is NaN")
    for slot_id in decision.suspends:
        slot = slot_by_id.get(slot_id)
        if slot is None or slot.busy or slot.trial not in trial_by_id or slot_id in decision.runs:
            found.append(f"slot {slot_id} cannot be vacated")
        elif not trial_by_id[slot.trial].preemptible:
            found.append(f"trial {slot.trial} cannot be suspended")
    named = [choice.trial for choice in decision.runs.values()]
    found += [f"trial {trial} has two slots" for trial in sorted(set(named)) if named.count(trial) > 1]
    if decision.wake_at_s is not None and not now_s < decision.wake_at_s < math.inf:
        found.append(f"asks at {now_s} to be woken at {decision.wake_at_s}")
    running = {slot.trial for slot in slots if not slot.busy}
    reserved = 0
    if len({slot.kind for slot in slots}) > 1:
        # Between slots of several kinds trials may change places: a slot waits for one that is on its way.
        reserved = sum(not trial.runnable and trial.id not in running for trial in trials)
    empty = [slot for slot in slots if slot.trial is None and not slot.busy and slot.id not in decision.runs]
    if len(empty) > reserved:
        for slot in empty:
            idle = [t.id for t in trials if t.runnable and t.id not in named and slot.id not in t.refused]
            found += [f"slot {slot.id} stays empty, though trial {trial} waits" for trial in idle]
    return found


@dataclass
class _Trial:
    plan: FakeTrial
    train_s: float = 0.0
    training_since_s: float | None = None
    ready: bool = True
    ended_s: float | None = None
    kind: str = ""
    readings: list[Reading] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)
    speeds: dict[str, float] = field(default_factory=dict)

    def copy(self, other: _Trial) -> None:
        """Continues from the other's newest report."""
        self.plan = replace(self.plan, loss=other.plan.loss)
        self.readings[:] = other.readings
        self.train_s = min(other.readings[-1].train_s, self.plan.length_s)

    def stop(self, now_s: float) -> None:
        if self.training_since_s is not None:
            self.train_s += now_s - self.training_since_s
            self.training_since_s = None
            if math.isfinite(self.plan.report_s):
                self.report(self.train_s)

    def report(self, train_s: float) -> None:
        before_s = self.readings[-1].train_s if self.readings else 0.0
        count = int(train_s * STEPS_PER_S) - int(before_s * STEPS_PER_S)
        if count < 1:
            return
        if self.kind in self.plan.speeds:
            self.speeds[self.kind] = self.plan.speeds[self.kind]
        losses = [self.plan.loss(before_s + (train_s - before_s) * part / 4) for part in range(1, 5)]
        is_nan = any(map(math.isnan, losses))
        low, high = (math.nan, math.nan) if is_nan else (min(losses), max(losses))
        self.readings.append(Reading(train_s, int(train_s * STEPS_PER_S), sum(losses) / 4, low, high, count))


@dataclass
class _Slot:
    kind: str = ""
    trial: int | None = None
    following: int | None = None
    since_s: float = 0.0
    busy: bool = False
    term: int = 0
    """Events of an earlier term no longer concern the slot."""


class PolicyStage:
    """Runs a policy on planned trials and slots, numbered in their order.

    Every decision is checked by `violations`; a slot takes `switch_s` to be emptied and again to be filled. With
    `tells_left` the policy knows how long each trial trains.
    """

    def __init__(
        self,
        policy: Policy,
        trials: Sequence[FakeTrial],
        slots: Sequence[FakeSlot],
        switch_s: float = 1.0,
        *,
        tells_left: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.starts: list[Start] = []
        self.trials: dict[int, _Trial] = {}
        self.policy = policy
        self._plans = sorted(trials, key=lambda plan: plan.arrives_s)
        self._slots: dict[int, _Slot] = {}
        self._switch_s = switch_s
        self._tells_left = tells_left
        self._events: list[tuple[float, int, Callable[[], bool]]] = []
        self._counter = itertools.count()
        self._wake_at_s: float | None = None
        for number, plan in enumerate(self._plans):
            self._at(plan.arrives_s, lambda number=number, plan=plan: self._arrive(number, plan))
        for number, slot in enumerate(slots):
            self._at(slot.comes_s, lambda number=number, kind=slot.kind: self._come(number, kind))
            if math.isfinite(slot.goes_s):
                self._at(slot.goes_s, lambda number=number: self._go(number))

    def train_s(self, trial: int) -> float:
        """Training time of a trial, until now."""
        state = self.trials[trial]
        return state.train_s + (0.0 if state.training_since_s is None else self.now_s - state.training_since_s)

    def has_ended(self, trial: int) -> bool:
        return trial in self.trials and self.trials[trial].ended_s is not None

    def run(self, until_s: float) -> PolicyStage:
        """Simulates until that time, or until all trials have ended.

        Raises:
            AssertionError: at a decision that breaks the contract, or if nothing can happen any more.
        """
        while not all(map(self.has_ended, range(len(self._plans)))):
            times_s = [self._events[0][0]] if self._events else []
            times_s += [] if self._wake_at_s is None else [self._wake_at_s]
            assert times_s, f"at {self.now_s} s nothing can happen, and trials are left"
            if min(times_s) > until_s:
                self.now_s = until_s
                break
            self.now_s = min(times_s)
            must_decide = self._wake_at_s is not None and self._wake_at_s <= self.now_s
            while self._events and self._events[0][0] <= self.now_s:
                must_decide |= heapq.heappop(self._events)[2]()
            if must_decide:
                self._decide()
        return self

    def _at(self, time_s: float, event: Callable[[], bool]) -> None:
        """An event says whether the policy is to be asked."""
        heapq.heappush(self._events, (time_s, next(self._counter), event))

    def _decide(self) -> None:
        trials, slots = self._views()
        decision = self.policy.decide(self.now_s, trials, slots)
        found = violations(decision, self.now_s, trials, slots)
        assert not found, f"at {self.now_s} s: {'; '.join(found)}"
        self._wake_at_s = decision.wake_at_s
        for slot_id, choice in decision.runs.items():
            if self._slots[slot_id].trial != choice.trial:
                self.starts.append(Start(self.now_s, slot_id, choice.trial, choice.reason))
                if choice.copies is not None:
                    self.trials[choice.trial].copy(self.trials[choice.copies])
                self._give(self._slots[slot_id], choice.trial)
        for slot_id in decision.suspends:
            self._vacate(self._slots[slot_id])

    def _views(self) -> tuple[list[TrialView], list[SlotView]]:
        held = {slot.trial for slot in self._slots.values()} | {slot.following for slot in self._slots.values()}
        trials = [
            TrialView(
                id=number,
                arrived_s=trial.plan.arrives_s,
                readings=trial.readings,
                slices=trial.slices,
                runnable=trial.ready and number not in held,
                preemptible=trial.plan.preemptible,
                refused=trial.plan.refused,
                batch_size=trial.plan.batch_size,
                speeds=dict(trial.speeds),
                left_s=trial.plan.length_s - self.train_s(number) if self._tells_left else None,
                has_checkpoint=bool(trial.readings),
            )
            for number, trial in sorted(self.trials.items())
            if trial.ended_s is None
        ]
        slots = [
            SlotView(number, slot.trial, slot.since_s, slot.busy, slot.kind)
            for number, slot in sorted(self._slots.items())
        ]
        return trials, slots

    def _give(self, slot: _Slot, trial: int) -> None:
        slot.term += 1
        slot.busy = True
        self.trials[trial].slices.append(len(self.trials[trial].readings))
        if slot.trial is None:
            self._fill(slot, trial)
            return
        self.trials[slot.trial].stop(self.now_s)
        slot.following = trial
        self._later(slot, self._switch_s, lambda: self._fill(slot, trial))

    def _vacate(self, slot: _Slot) -> None:
        assert slot.trial is not None
        slot.term += 1
        slot.busy = True
        self.trials[slot.trial].stop(self.now_s)
        self._later(slot, self._switch_s, lambda: self._is_empty(slot))

    def _is_empty(self, slot: _Slot) -> bool:
        slot.trial, slot.busy = None, False
        return True

    def _fill(self, slot: _Slot, trial: int) -> bool:
        slot.trial, slot.following, slot.since_s = trial, None, self.now_s
        self._later(slot, self._switch_s, lambda: self._train(slot, trial))
        return True

    def _train(self, slot: _Slot, number: int) -> bool:
        trial = self.trials[number]
        slot.busy = False
        trial.training_since_s = self.now_s
        trial.kind = slot.kind
        self._later(slot, trial.plan.length_s - trial.train_s, lambda: self._end(slot, number))
        self._report_later(slot, trial)
        return True

    def _report_later(self, slot: _Slot, trial: _Trial) -> None:
        def report() -> bool:
            trial.report(trial.train_s + self.now_s - (trial.training_since_s or 0.0))
            self._report_later(slot, trial)
            return False

        if math.isfinite(trial.plan.report_s):
            self._later(slot, trial.plan.report_s, report)

    def _later(self, slot: _Slot, delay_s: float, event: Callable[[], bool]) -> None:
        """An event that only happens if the slot has not been given away or gone by then."""
        term = slot.term
        self._at(self.now_s + delay_s, lambda: slot.term == term and event())

    def _arrive(self, number: int, plan: FakeTrial) -> bool:
        self.trials[number] = _Trial(plan)
        return True

    def _end(self, slot: _Slot, number: int) -> bool:
        self.trials[number].stop(self.now_s)
        self.trials[number].ended_s = self.now_s
        slot.term += 1
        slot.trial = None
        return True

    def _come(self, number: int, kind: str) -> bool:
        self._slots[number] = _Slot(kind)
        return True

    def _go(self, number: int) -> bool:
        slot = self._slots.pop(number)
        slot.term += 1
        if slot.trial is not None:
            trial = self.trials[slot.trial]
            trial.stop(self.now_s)
            trial.ready = False
            self._at(self.now_s + self._switch_s, lambda: self._is_ready(trial))
        return True

    def _is_ready(self, trial: _Trial) -> bool:
        trial.ready = True
        return True
