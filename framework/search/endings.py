"""How runs and slots end, and what is done about it: the next slice, another executor, another agent, giving up."""

from __future__ import annotations

from collections.abc import Callable

from dike.exceptions import BadInputError
from executor.trial_messages import RunEnd
from framework.job import TaskState
from framework.search.fleet import Fleet
from framework.search.observer import SearchObserver
from framework.search.records import SearchSpec, TrialRecord, TrialState
from framework.search.roster import Remedy, Roster
from framework.search.slice_log import SliceLog
from framework.search.slots import ActiveRun, Slot

MAX_BARREN = 3
"""Slots in a row that end by themselves before anything has trained in them: more would do no better."""


class Endings:
    """Takes the ends of runs and slots in.

    Args:
        spec: the search.
        roster: its trials.
        fleet: its slots.
        slices: their time slices.
        observer: who is told.
        wall_clock: seconds since the epoch.
        give_up: ends the search; gets the reason.
    """

    def __init__(
        self,
        spec: SearchSpec,
        roster: Roster,
        fleet: Fleet,
        slices: SliceLog,
        observer: SearchObserver,
        wall_clock: Callable[[], float],
        give_up: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._roster = roster
        self._fleet = fleet
        self._slices = slices
        self._observer = observer
        self._wall = wall_clock
        self._give_up = give_up
        self._barren = 0
        self._too_slow: set[int] = set()

    def is_too_slow(self, trial: int) -> bool:
        """Whether a trial would never get to a checkpoint in the time that it has to suspend."""
        return trial in self._too_slow

    def has_trained(self, run: ActiveRun) -> None:
        """A run has taken its first step, so slots here are good for something."""
        self._barren = 0
        self._slices.first_step(run)

    def run_ended(self, slot: Slot, end: RunEnd) -> bool:
        """A run has ended; whether that is news.

        Raises:
            BadInputError: if the script has refused its arguments before any trial has trained.
        """
        run = slot.run_ended(end)
        if run is None:
            return False
        self._slices.close(run, end.outcome, end)
        if end.outcome == "bad_input" and not self._roster.has_readings:
            if end.message not in end.tail:
                self._observer.output(end.tail)
            raise BadInputError(end.message)
        remedy = self._roster.ended(run.record, end, self._wall())
        self._tell_of(run.record, slot, end, run.slice.from_step if run.slice is not None else 0)
        if slot.current is not None and slot.current.since_s is None:
            self._slices.begin(slot, slot.current)
            self._observer.trial_started(slot.current.record, slot, slot.current.choice.reason)
        if remedy is not Remedy.NONE and not slot.leaving:
            slot.leave()
        if remedy is Remedy.AVOID_AGENT:
            self._fleet.leave_out(slot, f"trial {run.record.number} has failed again")
        return True

    def slot_ended(self, slot: Slot) -> None:
        """A slot is gone, and its runs with it."""
        if not (slot.leaving and slot.state is TaskState.FINISHED):
            self._observer.note(slot.failure())
        for run in slot.runs:
            self._slices.close(run, "lost")
            self._roster.lost(run.record, slot.failure(), self._wall())
            if run.record.state is TrialState.FAILED:
                self._has_failed(run.record, slot.failure())
        slot.current = slot.next = None
        if slot.state is not TaskState.FAILED or slot.has_trained:
            return
        self._barren += 1
        if self._barren >= MAX_BARREN and not self._fleet.slots and not self._fleet.is_leaving:
            self._give_up(f"{slot.failure()}, as {MAX_BARREN - 1} slots before it")
        elif not slot.executor_seen:
            self._fleet.leave_out(slot, "an executor could not be started there")

    def _tell_of(self, record: TrialRecord, slot: Slot, end: RunEnd, from_step: int) -> None:
        self._observer.trial_ended(record, slot, end.outcome)
        if end.outcome == "stopped" and end.exit_code is not None:
            self._tell_of_stopped(record, end, from_step)
        elif end.outcome in ("failed", "bad_input"):
            self._tell_of_failed(record, slot, end)

    def _tell_of_stopped(self, record: TrialRecord, end: RunEnd, from_step: int) -> None:
        if record.checkpoint_step <= from_step and not self._fleet.is_leaving:
            # Its steps, or its saves, take longer than a slice and the time to suspend: it would never get on.
            self._too_slow.add(record.number)
            self._observer.note(f"trial {record.number} did not get to a checkpoint; it will run to its end")
        why = f" ({end.message})" if end.message else ""
        self._observer.note(
            f"trial {record.number} was stopped{why}; it goes on from its last checkpoint, step "
            f"{record.checkpoint_step}"
        )

    def _tell_of_failed(self, record: TrialRecord, slot: Slot, end: RunEnd) -> None:
        where = f"trial {record.number} failed on {slot.node}: {end.message}; the end of its output is in {end.log}"
        if record.state is not TrialState.FAILED:
            self._observer.note(f"{where}; it will be tried again")
            return
        self._observer.output(end.tail)
        self._observer.note(f"{where}; it is given up")
        self._has_failed(record, end.message)

    def _has_failed(self, record: TrialRecord, message: str) -> None:
        if self._spec.on_failure == "abort":
            self._give_up(f"trial {record.number} failed: {message}")
