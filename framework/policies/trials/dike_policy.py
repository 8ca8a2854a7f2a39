"""Dike's own policy: runs the trials with the greatest chance per second of beating the best loss so far."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from framework.policies.trials.asha import AshaPolicy
from framework.policies.trials.bound import CurrentQuantum
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView
from framework.policies.trials.migration import Migration
from framework.policies.trials.progress import Progress

if TYPE_CHECKING:  # numpy is slow to import, and commands that only print help do not need it
    from framework.policies.trials.earlier_trials import EarlierTrials

GOAL_DISTANCE_SHARE = 0.03
"""Expected distance of the goal below the best loss, as a share of the best trial's decrease so far."""
STALLED_PATIENCE = 6
"""The lower bound of a trial's sqrt(v) is (1 + a) quanta / (this x training time); see `DikePolicy`."""
REPLACEMENT_MARGIN = 1.3
"""Minimum ratio of a trial's worth to that of the trial it preempts."""
RUNGS_SHARE = 0.15
"""Share of quanta for which the rungs choose the trial."""

END_SLACK_SHARE = 0.02
"""Tolerated delay of the search's end for the sake of better trials, as a share of the remaining time."""
MAX_PASSED_OVER_PER_TRIAL = 40
"""A trial that was passed over this many times the number of trials runs for a quantum."""

_MAX_DISTANCE = 1e12
"""Upper bound of distances, so that no loss overflows."""


class DikePolicy:
    """Runs the trials with the greatest chance per second of reaching the goal; docs/policies.md derives it.

    The goal is an unknown loss below the best one that any trial, ended ones included, has reported. Its distance is
    exponentially distributed with mean s = 3% of the best trial's decrease from the median first loss. A trial's index
    (Gittins, J. R. Stat. Soc. B 41, 1979, section 4) at a s above the best loss, with speed v (geometric mean since its
    start and over the second half of its time, per quantum), is

        worth = sqrt(v) / (1 + a + z), where exp(z) = 1 + a + z

    The square root is there because speed depends on the learning rate more than it predicts the final loss. sqrt(v) is
    at least (1 + a) quanta / (6 x training time), so that stalled trials share slots in slices of doubling length.

    * Trials are bound to no slot. Preempting another trial takes 1.3 times its worth.
    * A trial that is paused in some slots must be started in others: its worth there is divided by 1.3 and by 1 +
      start time / quantum.
    * With several kinds of slots, worth is multiplied by relative speed, and running trials move (`Migration`).
    * Once each trial has had a slice, the rungs of `asha` choose the trial of 15% of the quanta; a running one stays in
      its slot.
    * Trials without a slice come first. One that ran without reporting is assumed to be at the median first loss.
    * The lowest loss so far counts. Diverged trials rank last, and their earlier losses are ignored. Any other trial
      that was passed over 40 times the number of trials runs for a quantum, which takes at most 2.5% of the slots.
    * If all remaining times are known and slots are equal, a trial that would delay the end of the search by more than
      2% of the optimum (McNaughton, Management Science 6(1), 1959) runs now. Diverged trials do not count.
    * With trials of an earlier search, worth is the geometric mean of the above and the chance by `EarlierTrials`.

    Args:
        rungs_share: share of quanta for which the rungs choose the trial.
        earlier: trials of an earlier search; None for none.
    """

    name = "dike"

    def __init__(
        self,
        settings: PolicySettings,
        patience: float = STALLED_PATIENCE,
        rungs_share: float = RUNGS_SHARE,
        earlier: EarlierTrials | None = None,
    ) -> None:
        self.progress: dict[int, Progress] = {}
        """Progress of all trials, ended ones included."""
        self._quantum_s = settings.quantum_s
        self._restart_factor = 1 / (REPLACEMENT_MARGIN * (1 + settings.switch_s / settings.quantum_s))
        """Factor of a trial's worth in slots where it must be started, if it is paused in others."""
        self._patience = patience
        self._earlier = earlier
        self._rungs = AshaPolicy(settings)
        self._rungs_share = rungs_share
        self._owed_quanta = 0.0
        """Quanta for which the rungs have yet to choose the trial."""
        self._migration = Migration(settings)
        self._current: dict[int, CurrentQuantum] = {}
        self._passed_over: dict[int, int] = {}
        self._quanta: dict[int, int] = {}
        """Trial -> number of quanta given to it."""

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        by_id = {trial.id: trial for trial in trials}
        for trial in trials:
            self.progress.setdefault(trial.id, Progress()).update(trial)
        self._rungs.follow(trials)
        open_slots: dict[int, TrialView | None] = {}
        current: dict[int, CurrentQuantum] = {}
        for slot in slots:
            running = by_id.get(slot.trial) if slot.trial is not None else None
            if slot.busy or (running is None and slot.trial is not None):
                continue
            if running is None:
                open_slots[slot.id] = None
                continue
            quantum = self._current.get(slot.id)
            if quantum is None or (quantum.trial, quantum.since_s) != (running.id, slot.since_s):
                quantum = CurrentQuantum(running.id, slot.since_s, now_s + self._quantum_s)
            if now_s >= quantum.ends_s:
                quantum = CurrentQuantum(running.id, slot.since_s, now_s + self._quantum_s)
                if running.preemptible:
                    open_slots[slot.id] = running
            current[slot.id] = quantum
        self._current = current
        self._migration.update(by_id, slots)
        waiting = {trial.id: trial for trial in trials if trial.runnable}
        runs = self._migration.place_moving(open_slots, waiting)
        if open_slots:
            runs |= self._fill(open_slots, list(waiting.values()), trials, self._urgent(trials, slots))
        is_due = (runs or open_slots) and self._migration.is_due
        suspends = self._migrate(now_s, by_id, slots, runs) if is_due else frozenset()
        runs = {slot: choice for slot, choice in runs.items() if slot not in suspends}
        return Decision(runs, min((quantum.ends_s for quantum in current.values()), default=None), suspends)

    def _migrate(
        self, now_s: float, trials: Mapping[int, TrialView], slots: Sequence[SlotView], runs: Mapping[int, Choice]
    ) -> frozenset[int]:
        """Returns the slots whose trials move; each has run for at least a quantum."""
        held = {slot.id: slot.trial for slot in slots if slot.trial is not None and slot.trial in trials}
        held |= {slot: choice.trial for slot, choice in runs.items()}
        movable = [
            trials[held[slot.id]]
            for slot in slots
            if not slot.busy and slot.trial == held.get(slot.id, -1) and now_s >= slot.since_s + self._quantum_s
        ]
        movable = [trial for trial in movable if trial.preemptible]
        worths = {trial: worth for trial, (worth, _) in self.worths(movable).items()}
        return self._migration.plan({trial: slot for slot, trial in held.items()}, movable, worths)

    def _fill(
        self,
        slots: Mapping[int, TrialView | None],
        waiting: Sequence[TrialView],
        trials: Sequence[TrialView],
        urgent: Sequence[int],
    ) -> dict[int, Choice]:
        """Assigns trials to slots, best first: to their own slot, else an empty one, else that of the worst trial.

        `slots` maps to the running trial that may be replaced, or None. `urgent` trials run now, in this order.
        """
        running = {trial.id: frozenset([slot]) for slot, trial in slots.items() if trial is not None}
        paused_in = running | {trial.id: trial.paused_in for trial in waiting}
        worths = self.worths([*(trial for trial in slots.values() if trial is not None), *waiting])
        kinds = {slot: self._migration.kind(slot) for slot in slots}
        # Trial, kind of slot, whether the trial is paused or runs there -> rank.
        ranks: dict[tuple[int, str, bool], tuple[float, bool, int]] = {}
        for trial, (worth, _) in worths.items():
            shares = [(True, REPLACEMENT_MARGIN if trial in running else 1.0)] if paused_in[trial] else []
            if trial not in running:
                shares.append((False, self._restart_factor if paused_in[trial] else 1.0))
            for is_paused_there, share in shares:
                for kind in dict.fromkeys(
                    kinds[slot] for slot in slots if not is_paused_there or slot in paused_in[trial]
                ):
                    rank = worth * share * self._migration.relative_speed(trial, kind)
                    ranks[trial, kind, is_paused_there] = (rank, is_paused_there, -trial)
        refused = {trial.id: trial.refused for trial in waiting}
        # Slots of the worst trials come first, so that the best trials continue.
        by_need = sorted(
            slots, key=lambda slot: (-math.inf,) if (held := slots[slot]) is None else ranks[held.id, kinds[slot], True]
        )
        for view in waiting:
            self._passed_over[view.id] = self._passed_over.get(view.id, 0) + 1
        longest = MAX_PASSED_OVER_PER_TRIAL * len(worths)
        late = [trial.id for trial in waiting if self._passed_over[trial.id] > longest]
        forced = dict.fromkeys(late, "passed over too often") | (
            {} if urgent else self._choose_by_rungs(trials, len(slots))
        )
        # Diverged trials rank last, regardless of waiting time.
        forced = {trial: why for trial, why in forced.items() if worths.get(trial, (-math.inf, ""))[0] > -math.inf}
        urgent_order = {trial: number for number, trial in enumerate(urgent) if trial in worths and trial not in forced}
        for trial, reason in (forced | dict.fromkeys(urgent_order, "would end last")).items():
            worths[trial] = (worths[trial][0], reason)
        ranks |= {place: (math.inf, False, -place[0]) for place in ranks if place[0] in forced}
        # Forced trials take the slots of the worst, rather than that of a good one in which they are paused.
        ranks |= {
            place: (sys.float_info.max, False, -2 * urgent_order[place[0]] - place[2])
            for place in ranks
            if place[0] in urgent_order
        }
        runs: dict[int, Choice] = {}
        placed: set[int] = set()
        for trial, kind, is_paused_there in sorted(ranks, key=lambda place: ranks[place], reverse=True):
            if trial in placed:
                continue
            fitting = (
                slot for slot in by_need if kinds[slot] == kind and (not is_paused_there or slot in paused_in[trial])
            )
            slot = next((slot for slot in fitting if slot not in runs and slot not in refused.get(trial, ())), None)
            if slot is not None:
                worth, reason = worths[trial]
                placed.add(trial)
                runs[slot] = Choice(trial, reason, worth if math.isfinite(worth) else None)
                self._passed_over[trial] = 0
                self._quanta[trial] = self._quanta.get(trial, 0) + 1
                if len(runs) == len(slots):
                    break
        return runs

    def _urgent(self, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> list[int]:
        """Returns trials that would end last, and too late, if they waited for the next decision.

        Running ones come first, so that two trials do not alternate; then the longest.
        """
        sound = [trial for trial in trials if not self.progress[trial.id].is_diverged]
        left_s = {trial.id: trial.left_s for trial in sound if trial.left_s is not None}
        kinds = {slot.kind for slot in slots}.union(*(trial.speeds for trial in sound))
        if len(left_s) < len(sound) or not 1 < len(slots) < len(sound) or len(kinds) > 1:
            return []
        held = {slot.trial for slot in slots}
        wait_s = min([self._quantum_s, *(left for trial, left in left_s.items() if trial in held and left)])
        end_s = max(*left_s.values(), sum(left_s.values()) / len(slots) * (1 + END_SLACK_SHARE))
        urgent = [trial for trial, left in left_s.items() if left + wait_s > end_s]
        return sorted(urgent, key=lambda trial: (trial not in held, -left_s[trial]))

    def _choose_by_rungs(self, trials: Sequence[TrialView], quanta: int) -> dict[int, str]:
        """Returns the rungs' share of that many quanta: trials with reasons; none before each trial has had a slice."""
        sound = [trial for trial in trials if not self.progress[trial.id].is_diverged]
        if not sound or not all(trial.slices or trial.readings for trial in trials):
            return {}
        self._owed_quanta += self._rungs_share * quanta
        forced = {}
        while self._owed_quanta >= 1:
            self._owed_quanta -= 1
            choice = self._rungs.start(max(sound, key=self._rungs.rank))
            forced[choice.trial] = choice.reason
        return forced

    def worths(self, trials: Sequence[TrialView]) -> dict[int, tuple[float, str]]:
        """Returns trial -> worth (chance per second) and reason; inf for trials that never ran, -inf if diverged."""
        sound = [progress for progress in self.progress.values() if progress.first_loss is not None]
        first = median([progress.first_loss for progress in sound if progress.first_loss is not None] or [0.0])
        best = min((progress.loss for progress in sound if not progress.is_diverged), default=first)
        mean_distance = GOAL_DISTANCE_SHARE * (first - best)
        worths = {}
        for trial in trials:
            progress = self.progress[trial.id]
            if progress.is_diverged:
                worths[trial.id] = (-math.inf, "only diverged trials wait")
            elif not trial.slices and not trial.readings:
                worths[trial.id] = (math.inf, "first slice")
            else:
                worth, reason = self._worth(trial, first, best, mean_distance)
                if self._earlier is not None:
                    chance = self._earlier.chance(trial, self._quantum_s, self._given_s(trial))
                    worth, reason = math.sqrt(worth * chance), "best chance by earlier trials"
                worths[trial.id] = worth, reason
        return worths

    def _given_s(self, trial: TrialView) -> float:
        quanta = 1 if trial.readings else max(len(trial.slices), self._quanta.get(trial.id, 0))
        return max(self.progress[trial.id].train_s, self._quantum_s * quanta)

    def _worth(self, trial: TrialView, first: float, best: float, mean_distance: float) -> tuple[float, str]:
        progress, given_s = self.progress[trial.id], self._given_s(trial)
        if mean_distance <= 0:
            return 1 / (self._patience * given_s), "least trained"
        loss = first if progress.first_loss is None else progress.loss
        above = min((loss - best) / mean_distance, _MAX_DISTANCE)
        # Both per quantum, so that they are dimensionless.
        speed = 0.0
        if loss < first and (fall := progress.recent_fall()) > 0:
            ever, lately = (first - loss) / mean_distance, fall / mean_distance / 0.5
            speed = math.sqrt(ever) * math.sqrt(lately) * self._quantum_s / given_s
        least = (1 + above) * self._quantum_s / (self._patience * given_s)
        reason = "best chance to beat the best" if math.sqrt(speed) > least else "retried: no progress yet"
        return max(math.sqrt(speed), least) / (1 + above + gittins_offset(above)), reason


def gittins_offset(above: float) -> float:
    """Returns how far below the best loss the ratio of chance to time is greatest: the z of exp(z) = 1 + above + z.

    Args:
        above: distance of a trial above the best loss, at least 0; both in units of the goal's mean distance.
    """
    # Newton's method from above the root of a convex function converges monotonically.
    way = math.log1p(above + math.sqrt(2 * above)) + math.sqrt(above) / (1 + above)
    for _ in range(6):
        slope = math.expm1(way)
        if slope <= 0:
            break
        way -= (slope - above - way) / slope
    return way
