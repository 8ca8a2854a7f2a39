"""The limit on GPUs of different types: the optimal assignment of trials to slots at every event, with known speeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import highspy
import numpy as np

from benchmarks.simulation.bins import Bin
from framework.policies.trials.interface import Choice, Decision, PolicySettings, SlotView, TrialView

STAY_BONUS = 0.02
"""Bonus for keeping a trial in its slot, as a share of its mean speed: smaller gains are not worth a move."""


class AssignmentPolicy:
    """Runs the trials, in the slots, with the greatest sum of speeds at every event.

    Speeds are the true ones, relative to the trial's mean over the types. Losses are ignored.
    """

    name = "assignment"

    def __init__(self, trials: Bin, settings: PolicySettings) -> None:
        self._jobs = trials.jobs

    def decide(self, now_s: float, trials: Sequence[TrialView], slots: Sequence[SlotView]) -> Decision:
        open_slots = [slot for slot in slots if not slot.busy]
        running_in = {slot.trial: slot for slot in open_slots if slot.trial is not None}
        candidates = [trial for trial in trials if trial.runnable or trial.id in running_in]
        places = Counter(slot.kind for slot in open_slots)
        if not candidates or not places:
            return Decision()
        worths = np.array([[self._worth(trial, kind, running_in) for kind in places] for trial in candidates])
        chosen = best_assignment(worths, list(places.values()))
        kinds = list(places)
        kind_of = {trial.id: kinds[place] for trial, place in zip(candidates, chosen, strict=True) if place is not None}
        staying = {slot.id for trial, slot in running_in.items() if kind_of.get(trial) == slot.kind}
        runs: dict[int, Choice] = {}
        suspends = set()
        for kind in kinds:
            coming = [trial for trial, its in kind_of.items() if its == kind and trial not in running_in]
            free = [slot for slot in open_slots if slot.kind == kind and slot.id not in staying]
            # Empty slots first; trials in the others are preempted.
            free.sort(key=lambda slot: (slot.trial is not None, slot.id))
            for slot, trial in zip(free, coming, strict=False):
                runs[slot.id] = Choice(trial, "best assignment")
            suspends |= {slot.id for slot in free if slot.id not in runs and slot.trial in kind_of}
        return Decision(runs, suspends=frozenset(suspends))

    def _worth(self, trial: TrialView, kind: str, running_in: Mapping[int, SlotView]) -> float:
        stays = trial.id in running_in and running_in[trial.id].kind == kind
        return self._jobs[trial.id].relative(kind) + (STAY_BONUS if stays else 0.0)


def best_assignment(worths: np.ndarray, places: Sequence[int]) -> list[int | None]:
    """Assigns each row to at most one column, with the maximum sum of worths.

    Solves the linear program of the assignment problem, whose vertices are integral, by HiGHS.

    Args:
        worths: rows x columns; not negative.
        places: maximum number of rows of each column.

    Returns:
        The column of each row, or None.
    """
    rows, columns = worths.shape
    count = rows * columns
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, rows + columns
    model.sense_ = highspy.ObjSense.kMaximize
    model.col_cost_ = worths.ravel()
    model.col_lower_, model.col_upper_ = np.zeros(count), np.ones(count)
    model.row_lower_ = np.zeros(rows + columns)
    model.row_upper_ = np.concatenate([np.ones(rows), np.asarray(places, dtype=float)])
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.arange(0, 2 * count + 1, 2)
    row, column = np.divmod(np.arange(count), columns)
    model.a_matrix_.index_ = np.column_stack([row, rows + column]).ravel()
    model.a_matrix_.value_ = np.ones(2 * count)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.passModel(model)
    solver.run()
    shares = np.asarray(solver.getSolution().col_value).reshape(rows, columns)
    return [int(place) if share > 0.5 else None for place, share in zip(shares.argmax(1), shares.max(1), strict=True)]
