"""Dike's own policy: the greatest chance per second to beat the best loss so far."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from framework.policies.trials.asha import AshaPolicy
from framework.policies.trials.bound import Turn
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView
from framework.policies.trials.migration import Migration
from framework.policies.trials.progress import Progress

if TYPE_CHECKING:  # Its numpy takes longer to import than all that a command needs to print its help.
    from framework.policies.trials.earlier_trials import EarlierTrials

AHEAD = 0.03
"""So far below the best loss we expect the goal, as a share of what the best trial has come down."""
PATIENCE = 6
"""A trial that stands still is worth a quantum in so many times the time it has had, as much as one at the best loss
that comes down by s in a quantum is worth in one."""
MARGIN = 1.3
"""A trial must be worth so many times as much as the one it replaces."""
RUNGS_SHARE = 0.15
"""Of so many quanta the rungs name the trial."""

SLACK = 0.02
"""By this share of what is left a search may end later than it could, for the sake of better trials."""
LONGEST_WAIT = 40
"""A trial that has been passed over so many times for each trial of the search runs a quantum."""

_FARTHEST = 1e12
"""Distances are cut off here, so that no loss, however large, overflows."""


class DikePolicy:
    """Runs the trials with the greatest chance per second to come to the goal. docs/policies.md explains it.

    The goal is the loss that the search would be content with; nobody knows it. It is believed to lie an exponentially
    distributed distance below the best loss that any trial, ended ones included, has reported; the mean s of this
    distance is 3% of what the best trial has come down from the median first loss. A trial at a s above the best loss
    that falls v s a second goes down another y s in (a + y) / v seconds, and meets the goal on the way with the
    probability 1 - exp(-y). The greatest ratio of the two is v / (1 + a + z) (an index as in Gittins, 'Bandit
    Processes and Dynamic Allocation Indices', J. R. Stat. Soc. B 41, 1979, section 4). How fast a loss falls says much
    about a learning rate and little about how far the trial will come, so the speed counts with its square root:

        worth = sqrt(v) / (1 + a + z), where exp(z) = 1 + a + z

    v is the geometric mean of its speed since its beginning and in the second half of its time, by the quantum. sqrt(v)
    counts as (1 + a) quanta / (6 times the time it has had) at least. As this floor falls as 1 / time, trials that
    stand still share what is given to them by turns that become twice as long as those before, and one that starts late
    has its chance.

    * Trials are bound to no slot. At the end of a quantum the trial with the greatest worth takes the slot; one that
      replaces another has to be worth 1.3 times as much.
    * A trial whose process stands still in some slots goes on there at once; in any other it has to be started. So its
      worth there is divided by 1.3, and by 1 + the time of a start / the quantum.
    * On slots of several kinds a worth counts times the trial's relative speed in the slot, and running trials change
      places where that makes the sum over the slots greater (`Migration`).
    * A low loss early does not always say how low it ends. So once each trial has had a slice, the rungs of `asha` name
      the trial of 15% of the quanta; one that runs already is left where it runs.
    * A trial without a slice so far comes before all others. One that has run and reported nothing is taken to have
      trained for the quanta it was given, and to stand at the median first loss.
    * Losses count as the lowest so far, so noise and divergence look like standing still. A trial whose newest loss is
      NaN or infinite comes last and runs when nothing else can; what it has reached before counts for nobody.
    * Nobody else starves: a trial that has been passed over 40 times for each trial there is runs a quantum, which
      takes 2.5% of the slots at most.
    * One that cannot be suspended goes on.
    * No trial is to end alone, long after the others, if it is believed how long each has left: the search can end when
      the longest can, or when the slots together have done all that is left, whichever is later (McNaughton,
      'Scheduling with Deadlines and Loss Functions', Management Science 6(1), 1959). A trial that would end later than
      the former, and more than 2% later than the latter, if it waited for the next decision, runs now, and the rungs
      name nobody. Not on slots of several kinds; and trials that are lost do not count.
    * Where trials of an earlier search are known the worth is the geometric mean of that above and of the chance that
      these give to the trial (`EarlierTrials`).

    Args:
        settings: the length of a quantum.
        patience: with trials that stand still.
        rungs_share: of so many quanta the rungs name the trial.
        earlier: trials of an earlier search; None for none.
    """

    name = "dike"

    def __init__(
        self,
        settings: PolicySettings,
        patience: float = PATIENCE,
        rungs_share: float = RUNGS_SHARE,
        earlier: EarlierTrials | None = None,
    ) -> None:
        self.progress: dict[int, Progress] = {}
        """Of all trials there were."""
        self._quantum_s = settings.quantum_s
        self._away = 1 / (MARGIN * (1 + settings.switch_s / settings.quantum_s))
        """What a trial's worth is multiplied by in a slot where it has to be started, if its process stands still in
        others."""
        self._patience = patience
        self._earlier = earlier
        self._rungs = AshaPolicy(settings)
        self._rungs_share = rungs_share
        self._owed = 0.0
        """Quanta of which the rungs are to name the trial."""
        self._migration = Migration(settings)
        self._turns: dict[int, Turn] = {}
        self._passed_over: dict[int, int] = {}
        self._quanta: dict[int, int] = {}
        """Trial -> how many quanta it has been given."""

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        """See `framework.policies.trials.interface.Policy`."""
        by_id = {trial.id: trial for trial in trials}
        for trial in trials:
            self.progress.setdefault(trial.id, Progress()).update(trial)
        self._rungs.follow(trials)
        open_slots: dict[int, TrialView | None] = {}
        turns: dict[int, Turn] = {}
        for slot in slots:
            running = by_id.get(slot.trial) if slot.trial is not None else None
            if slot.busy or (running is None and slot.trial is not None):
                continue
            if running is None:
                open_slots[slot.id] = None
                continue
            turn = self._turns.get(slot.id)
            if turn is None or (turn.trial, turn.since_s) != (running.id, slot.since_s):
                turn = Turn(running.id, slot.since_s, now_s + self._quantum_s)
            if now_s >= turn.ends_s:
                turn = Turn(running.id, slot.since_s, now_s + self._quantum_s)
                if running.preemptible:
                    open_slots[slot.id] = running
            turns[slot.id] = turn
        self._turns = turns
        self._migration.update(by_id, slots)
        waiting = {trial.id: trial for trial in trials if trial.runnable}
        runs = self._migration.arrive(open_slots, waiting)
        if open_slots:
            runs |= self._fill(open_slots, list(waiting.values()), trials, self._urgent(trials, slots))
        is_due = (runs or open_slots) and self._migration.is_due
        suspends = self._migrate(now_s, by_id, slots, runs) if is_due else frozenset()
        runs = {slot: choice for slot, choice in runs.items() if slot not in suspends}
        return Decision(runs, min((turn.ends_s for turn in turns.values()), default=None), suspends)

    def _migrate(
        self, now_s: float, trials: Mapping[int, TrialView], slots: Sequence[SlotView], runs: Mapping[int, Choice]
    ) -> frozenset[int]:
        """The slots whose trials change places; each has run for a quantum at least."""
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
        """Gives out slots, the best trial first: the slot it has, else an empty one, else that of the worst.

        Args:
            slots: slot -> the trial that runs there and may be replaced, None if it is empty.
            waiting: the trials that can be given a slot.
            trials: all there are.
            urgent: trials that are to run now, in this order.
        """
        running = {trial.id: frozenset([slot]) for slot, trial in slots.items() if trial is not None}
        homes = running | {trial.id: trial.homes for trial in waiting}
        worths = self.worths([*(trial for trial in slots.values() if trial is not None), *waiting])
        kinds = {slot: self._migration.kind(slot) for slot in slots}
        # By the kind of a slot, and whether it is one that the trial need not be started in.
        ranks: dict[tuple[int, str, bool], tuple[float, bool, int]] = {}
        for trial, (worth, _) in worths.items():
            shares = [(True, MARGIN if trial in running else 1.0)] if homes[trial] else []
            if trial not in running:
                shares.append((False, self._away if homes[trial] else 1.0))
            for is_home, share in shares:
                for kind in dict.fromkeys(kinds[slot] for slot in slots if not is_home or slot in homes[trial]):
                    rank = worth * share * self._migration.relative_speed(trial, kind)
                    ranks[trial, kind, is_home] = (rank, is_home, -trial)
        refused = {trial.id: trial.refused for trial in waiting}
        # Those that are to lose their trial come last, so that the best trials run on.
        by_need = sorted(
            slots, key=lambda slot: (-math.inf,) if (held := slots[slot]) is None else ranks[held.id, kinds[slot], True]
        )
        for view in waiting:
            self._passed_over[view.id] = self._passed_over.get(view.id, 0) + 1
        longest = LONGEST_WAIT * len(worths)
        late = [trial.id for trial in waiting if self._passed_over[trial.id] > longest]
        named = dict.fromkeys(late, "has waited long") | ({} if urgent else self._named(trials, len(slots)))
        # Who is lost comes last, however long it has waited.
        named = {trial: why for trial, why in named.items() if worths.get(trial, (-math.inf, ""))[0] > -math.inf}
        next_ones = {trial: number for number, trial in enumerate(urgent) if trial in worths and trial not in named}
        for trial, reason in (named | dict.fromkeys(next_ones, "would end last")).items():
            worths[trial] = (worths[trial][0], reason)
        ranks |= {place: (math.inf, False, -place[0]) for place in ranks if place[0] in named}
        # They take the slots of the worst, and not that of a good one because their process stands still there.
        ranks |= {
            place: (sys.float_info.max, False, -2 * next_ones[place[0]] - place[2])
            for place in ranks
            if place[0] in next_ones
        }
        runs: dict[int, Choice] = {}
        placed: set[int] = set()
        for trial, kind, is_home in sorted(ranks, key=lambda place: ranks[place], reverse=True):
            if trial in placed:
                continue
            fitting = (slot for slot in by_need if kinds[slot] == kind and (not is_home or slot in homes[trial]))
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
        """The trials that would end last, and too late, if they waited for the next decision.

        Those that run come first, so that two do not change places again and again; then the longest.
        """
        sound = [trial for trial in trials if not self.progress[trial.id].is_lost]
        left_s = {trial.id: trial.left_s for trial in sound if trial.left_s is not None}
        kinds = {slot.kind for slot in slots}.union(*(trial.speeds for trial in sound))
        if len(left_s) < len(sound) or not 1 < len(slots) < len(sound) or len(kinds) > 1:
            return []
        held = {slot.trial for slot in slots}
        wait_s = min([self._quantum_s, *(left for trial, left in left_s.items() if trial in held and left)])
        end_s = max(*left_s.values(), sum(left_s.values()) / len(slots) * (1 + SLACK))
        urgent = [trial for trial, left in left_s.items() if left + wait_s > end_s]
        return sorted(urgent, key=lambda trial: (trial not in held, -left_s[trial]))

    def _named(self, trials: Sequence[TrialView], quanta: int) -> dict[int, str]:
        """Whom the rungs name in so many quanta, and why; nobody before each trial has had a slice."""
        sound = [trial for trial in trials if not self.progress[trial.id].is_lost]
        if not sound or not all(trial.slices or trial.readings for trial in trials):
            return {}
        self._owed += self._rungs_share * quanta
        named = {}
        while self._owed >= 1:
            self._owed -= 1
            choice = self._rungs.start(max(sound, key=self._rungs.rank))
            named[choice.trial] = choice.reason
        return named

    def worths(self, trials: Sequence[TrialView]) -> dict[int, tuple[float, str]]:
        """Trial -> what a second of it is worth, and why; inf for those that never ran, -inf for those that are lost.

        A worth is the chance to come to the goal, per second.
        """
        sound = [progress for progress in self.progress.values() if progress.first_loss is not None]
        first = median([progress.first_loss for progress in sound if progress.first_loss is not None] or [0.0])
        best = min((progress.loss for progress in sound if not progress.is_lost), default=first)
        mean_distance = AHEAD * (first - best)
        worths = {}
        for trial in trials:
            progress = self.progress[trial.id]
            if progress.is_lost:
                worths[trial.id] = (-math.inf, "no sound trial waits")
            elif not trial.slices and not trial.readings:
                worths[trial.id] = (math.inf, "first slice")
            else:
                worth, reason = self._worth(trial, first, best, mean_distance)
                if self._earlier is not None:
                    chance = self._earlier.chance(trial, self._quantum_s, self._had_s(trial))
                    worth, reason = math.sqrt(worth * chance), "best chance by earlier trials"
                worths[trial.id] = worth, reason
        return worths

    def _had_s(self, trial: TrialView) -> float:
        quanta = 1 if trial.readings else max(len(trial.slices), self._quanta.get(trial.id, 0))
        return max(self.progress[trial.id].train_s, self._quantum_s * quanta)

    def _worth(self, trial: TrialView, first: float, best: float, mean_distance: float) -> tuple[float, str]:
        progress, had_s = self.progress[trial.id], self._had_s(trial)
        if mean_distance <= 0:
            return 1 / (self._patience * had_s), "least trained"
        loss = first if progress.first_loss is None else progress.loss
        above = min((loss - best) / mean_distance, _FARTHEST)
        # Both by the quantum, so that they are numbers without a unit.
        speed = 0.0
        if loss < first and (fall := progress.recent_fall()) > 0:
            ever, lately = (first - loss) / mean_distance, fall / mean_distance / 0.5
            speed = math.sqrt(ever) * math.sqrt(lately) * self._quantum_s / had_s
        least = (1 + above) * self._quantum_s / (self._patience * had_s)
        reason = "best chance to beat the best" if math.sqrt(speed) > least else "retried: no progress yet"
        return max(math.sqrt(speed), least) / (1 + above + way_beyond(above)), reason


def way_beyond(above: float) -> float:
    """How far beyond the best loss so far the ratio of chance and time is greatest.

    Args:
        above: how far a trial is above the best loss; at least 0, in units of the goal's mean distance below it.

    Returns:
        The z of exp(z) = 1 + above + z, in the same units.
    """
    # Newton's method from above the root, where it converges from one side: the function is convex.
    way = math.log1p(above + math.sqrt(2 * above)) + math.sqrt(above) / (1 + above)
    for _ in range(6):
        slope = math.expm1(way)
        if slope <= 0:
            break
        way -= (slope - above - way) / slope
    return way
