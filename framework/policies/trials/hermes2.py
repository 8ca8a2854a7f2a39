"""Hermes for slots of different kinds (paper 'Hermes-v2')."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean

from framework.policies.trials.binding import Binding, Rank
from framework.policies.trials.exchange import Exchange, Mover, min_move_gain
from framework.policies.trials.interface import Decision, PolicySettings, SlotView, TrialView
from framework.policies.trials.losses import LossHistory
from framework.policies.trials.scored import ScoredPolicy
from framework.policies.trials.speeds import SpeedEstimates


@dataclass(frozen=True)
class MetaRules:
    """Rules of the meta scheduler for comparing and exchanging trials.

    Attributes:
        relative: performances are multiples of the trial's mean over the kinds, else samples/s.
        rings: any number of trials may change slots together, else two.
        explores: an unmeasured kind counts as faster than estimated, by the estimate's uncertainty.
        by_ratio: a trial measured somewhere is estimated elsewhere from that, else by Eq. 1.
        weighs_costs: a move of a started trial must pay its cost, else only gain.
        takes_over: an idle slot takes over a trial that runs on a slower one.
    """

    relative: bool = True
    rings: bool = True
    explores: bool = True
    by_ratio: bool = True
    weighs_costs: bool = True
    takes_over: bool = True


PAPER = MetaRules(relative=False, rings=False, explores=False, by_ratio=False, weighs_costs=False, takes_over=False)
"""Eq. 1 and 2 only."""


class MetaScheduler(Binding):
    """Binds trials to slots, and exchanges them between slots of different kinds.

    Slots differ by at most one trial. On an arrival, an end, a new measurement or an imbalance, waiting trials move
    immediately, running ones once suspended (`Exchange`).
    """

    def __init__(self, settings: PolicySettings, rules: MetaRules) -> None:
        super().__init__(settings.trials_per_slot)
        self._rules = rules
        self._settings = settings
        self._speeds = SpeedEstimates(explores=rules.explores, by_ratio=rules.by_ratio)
        self._migrating: dict[int, int] = {}
        self._planned_for: tuple[object, ...] = ()

    @property
    def migrating(self) -> Mapping[int, int]:
        """Running trials that are to move -> their new slot."""
        return self._migrating

    def update(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView], rank: Rank) -> None:
        self._speeds.update(trials.values())
        kinds = {slot.id: slot.kind for slot in slots}
        running = {slot.trial for slot in slots if slot.trial is not None and not slot.busy}
        for trial_id, slot_id in list(self._migrating.items()):
            trial = trials.get(trial_id)
            stays = trial_id in running and trial is not None and not trial.preemptible
            if trial is None or slot_id not in kinds or slot_id in trial.refused or stays:
                del self._migrating[trial_id]
            elif trial.runnable:
                del self._migrating[trial_id]
                self._bind(trial_id, slot_id)
        super().update(trials, slots, rank)
        self._migrating = {trial: slot for trial, slot in self._migrating.items() if trial in self._slot_of}
        if len(set(kinds.values())) > 1 and self._slot_of:
            self._plan(trials, running, kinds)
            # A trial that was to start in an idle slot may have been exchanged with one that still runs.
            self._fill_idle(trials, slots, rank)

    def _plan(self, trials: Mapping[int, TrialView], running: Set[int], kinds: Mapping[int, str]) -> None:
        assignment = self._slot_of | self._migrating
        able = {
            trial_id
            for trial_id in assignment
            if trials[trial_id].runnable or (trial_id in running and trials[trial_id].preemptible)
        }
        if (assignment, kinds, self._speeds.measured, able) == self._planned_for:
            return
        movers = {
            trial_id: self._mover(trials[trial_id], list(dict.fromkeys(kinds.values()))) for trial_id in sorted(able)
        }
        exchange = Exchange(kinds, assignment, movers)
        exchange.balance()
        if self._rules.rings:
            exchange.exchange_rings()
        else:
            exchange.exchange_pairs()
        for trial_id, slot_id in exchange.assignment.items():
            if trials[trial_id].runnable:
                if slot_id != self._slot_of[trial_id]:
                    self._bind(trial_id, slot_id)
            elif slot_id == self._slot_of[trial_id]:
                self._migrating.pop(trial_id, None)
            else:
                self._migrating[trial_id] = slot_id
        self._planned_for = (exchange.assignment, kinds, self._speeds.measured, able)

    def _mover(self, trial: TrialView, kinds: Sequence[str]) -> Mover:
        if self._rules.relative:
            performance, mean = self._speeds.relative(trial.id, kinds), 1.0
        else:
            performance = self._speeds.performance(trial.id, kinds)
            mean = fmean(performance.values())
        cost = 0.0
        if trial.slices and self._rules.weighs_costs:
            cost = mean * min_move_gain(self._settings, runs=not trial.runnable)
        return Mover(trial.id, performance, cost, trial.refused, trial.runnable)


class Hermes2Policy(ScoredPolicy):
    """`HermesPolicy` in each slot, with a meta scheduler that exchanges trials between slots of different kinds.

    With slots of one kind it equals `HermesPolicy`. Not specified by the paper, or improved (`MetaRules`):
        * Performances are relative to the trial's mean over the kinds: samples/s are comparable within one model only,
          and Eq. 2 would give the fast kind to the trial with the smallest samples.
        * Any number of trials may change slots together, so that the sum of the performances is maximal.
        * Unmeasured speeds count as faster than estimated, so that every kind of trial is measured on every kind of
          slot.
        * A move of a started trial must gain 2% of its mean speed, and pay its cost within ten quanta.
        * An idle slot takes over a trial that runs on a slower one (`Decision.suspends`).
    """

    name = "hermes2"

    def __init__(self, settings: PolicySettings, rules: MetaRules | None = None) -> None:
        self._rules = rules or MetaRules()
        self._meta = MetaScheduler(settings, self._rules)
        super().__init__(settings, LossHistory, "fastest convergence", self._meta)

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        decision = super().decide(now_s, trials, slots)
        if not self._rules.takes_over:
            return decision
        idle = {slot.id for slot in slots if slot.trial is None and not slot.busy and slot.id not in decision.runs}
        suspends = frozenset(
            slot.id
            for slot in slots
            if not slot.busy and slot.trial is not None and self._meta.migrating.get(slot.trial) in idle
        )
        if not suspends:
            return decision
        runs = {slot: choice for slot, choice in decision.runs.items() if slot not in suspends}
        return replace(decision, runs=runs, suspends=suspends)
