"""Hermes on slots of different kinds (paper 'Hermes-v2')."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean

from framework.policies.trials.binding import Binding, Rank
from framework.policies.trials.exchange import Exchange, Mover, share_of_move
from framework.policies.trials.interface import Decision, PolicySettings, SlotView, TrialView
from framework.policies.trials.losses import LossHistory
from framework.policies.trials.scored import ScoredPolicy
from framework.policies.trials.speeds import SpeedEstimates


@dataclass(frozen=True)
class MetaRules:
    """How the meta scheduler compares and exchanges trials.

    Attributes:
        relative: whether performances count as multiples of the trial's mean over the kinds, or as samples/s.
        rings: whether any number of trials may change places at once, or two.
        explores: whether a kind that a trial has not run on counts as faster than estimated, by the estimate's doubt.
        by_ratio: whether a trial that has been measured somewhere is estimated elsewhere from that, or by Eq. 1.
        weighs_costs: whether a move of a trial that has started must pay what it costs, or only gain.
        takes_over: whether a slot that would stand idle takes over a trial that runs on a slower one.
    """

    relative: bool = True
    rings: bool = True
    explores: bool = True
    by_ratio: bool = True
    weighs_costs: bool = True
    takes_over: bool = True


PAPER = MetaRules(relative=False, rings=False, explores=False, by_ratio=False, weighs_costs=False, takes_over=False)
"""Eq. 1 and 2 and nothing else."""


class MetaScheduler(Binding):
    """Binds trials to slots, and exchanges them between slots of different kinds.

    Whatever the kinds are, no slot has two trials more than another. On an arrival, an end, a newly measured speed, or
    where slots are out of balance, trials change places (`Exchange`). A trial that waits moves at once, one that runs
    when it has been suspended.

    Args:
        settings: quantum, trials per slot, and what moves cost.
        rules: see there.
    """

    def __init__(self, settings: PolicySettings, rules: MetaRules) -> None:
        super().__init__(settings.trials_per_slot)
        self._rules = rules
        self._settings = settings
        self._speeds = SpeedEstimates(explores=rules.explores, by_ratio=rules.by_ratio)
        self._leaving: dict[int, int] = {}
        self._planned_for: tuple[object, ...] = ()

    @property
    def leaving(self) -> Mapping[int, int]:
        """Running trials that are to go on in another slot -> that slot."""
        return self._leaving

    def update(self, trials: Mapping[int, TrialView], slots: Sequence[SlotView], rank: Rank) -> None:
        """See `Binding.update`."""
        self._speeds.update(trials.values())
        kinds = {slot.id: slot.kind for slot in slots}
        running = {slot.trial for slot in slots if slot.trial is not None and not slot.busy}
        for trial_id, slot_id in list(self._leaving.items()):
            trial = trials.get(trial_id)
            stays = trial_id in running and trial is not None and not trial.preemptible
            if trial is None or slot_id not in kinds or slot_id in trial.refused or stays:
                del self._leaving[trial_id]
            elif trial.runnable:
                del self._leaving[trial_id]
                self._bind(trial_id, slot_id)
        super().update(trials, slots, rank)
        self._leaving = {trial: slot for trial, slot in self._leaving.items() if trial in self._slot_of}
        if len(set(kinds.values())) > 1 and self._slot_of:
            self._plan(trials, running, kinds)
            # A trial that was to start where nothing runs may have changed places with one that still runs.
            self._fill_idle(trials, slots, rank)

    def _plan(self, trials: Mapping[int, TrialView], running: Set[int], kinds: Mapping[int, str]) -> None:
        homes = self._slot_of | self._leaving
        able = {
            trial_id
            for trial_id in homes
            if trials[trial_id].runnable or (trial_id in running and trials[trial_id].preemptible)
        }
        if (homes, kinds, self._speeds.measured, able) == self._planned_for:
            return
        movers = {
            trial_id: self._mover(trials[trial_id], list(dict.fromkeys(kinds.values()))) for trial_id in sorted(able)
        }
        exchange = Exchange(kinds, homes, movers)
        exchange.balance()
        if self._rules.rings:
            exchange.exchange_rings()
        else:
            exchange.exchange_pairs()
        for trial_id, slot_id in exchange.homes.items():
            if trials[trial_id].runnable:
                if slot_id != self._slot_of[trial_id]:
                    self._bind(trial_id, slot_id)
            elif slot_id == self._slot_of[trial_id]:
                self._leaving.pop(trial_id, None)
            else:
                self._leaving[trial_id] = slot_id
        self._planned_for = (exchange.homes, kinds, self._speeds.measured, able)

    def _mover(self, trial: TrialView, kinds: Sequence[str]) -> Mover:
        if self._rules.relative:
            performance, mean = self._speeds.relative(trial.id, kinds), 1.0
        else:
            performance = self._speeds.performance(trial.id, kinds)
            mean = fmean(performance.values())
        cost = 0.0
        if trial.slices and self._rules.weighs_costs:
            cost = mean * share_of_move(self._settings, runs=not trial.runnable)
        return Mover(trial.id, performance, cost, trial.refused, trial.runnable)


class Hermes2Policy(ScoredPolicy):
    """Hermes in each slot; a meta scheduler that exchanges trials between slots of different kinds above them.

    In a slot the trial that converges fastest runs, quantum by quantum, as `HermesPolicy` has it. Where all slots are
    of one kind it is `HermesPolicy`. Decided here, where the paper leaves it open or something else is better:
        * Performances count as multiples of the trial's mean over the kinds. Samples/s compare trials of one model
          only; of others Eq. 2 would give the fast kind to whoever has the smallest samples.
        * More than two trials may change places at once, so that the sum of the performances is the greatest there is.
        * What nobody has measured counts as faster than estimated, by the doubt of the estimate (`SpeedEstimates`): so
          trials go round until every kind of trial has been measured on every kind of slot.
        * A move of a trial that has started must gain 2% of its mean speed, and what it costs within ten quanta.
        * A slot that would stand idle takes over a trial that runs on a slower one (`Decision.suspends`).

    Args:
        settings: what the search tells its policy.
        rules: others than these.
    """

    name = "hermes2"

    def __init__(self, settings: PolicySettings, rules: MetaRules | None = None) -> None:
        self._rules = rules or MetaRules()
        self._meta = MetaScheduler(settings, self._rules)
        super().__init__(settings, LossHistory, "fastest convergence", self._meta)

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """See `framework.policies.trials.interface.Policy`."""
        decision = super().decide(now_s, trials, slots)
        if not self._rules.takes_over:
            return decision
        idle = {slot.id for slot in slots if slot.trial is None and not slot.busy and slot.id not in decision.runs}
        suspends = frozenset(
            slot.id
            for slot in slots
            if not slot.busy and slot.trial is not None and self._meta.leaving.get(slot.trial) in idle
        )
        if not suspends:
            return decision
        runs = {slot: choice for slot, choice in decision.runs.items() if slot not in suspends}
        return replace(decision, runs=runs, suspends=suspends)
