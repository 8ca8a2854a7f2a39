"""The trials of a search: who is there, what they reported, how their runs ended. Every change goes to the database."""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from executor.trial_messages import Losses, RunEnd
from framework.policies.interface import TrialView
from framework.search.objective import Objective, news_of
from framework.search.records import SearchSpec, TrialRecord, TrialState
from framework.search.speeds import Speeds, samples_per_step
from framework.search.store import Store
from framework.search.study import Study
from framework.search.tensorboard import TensorBoardLog

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Failures in a row, without a new checkpoint between them, after which a trial is given up (as in Hops)."""
ADMISSION_S = 0.2
"""How long the sampler may be asked for trials at a time: Optuna takes the longer the more trials are open."""
MAX_LOSSES = 10
"""How often in a row, without a new checkpoint, a trial may go down with its slot before it is taken for the cause."""


class Remedy(enum.Enum):
    """What is to be done about the place where a run ended."""

    NONE = enum.auto()
    REPLACE_SLOT = enum.auto()
    """A trial has failed for the first time: another executor gets it."""
    AVOID_AGENT = enum.auto()
    """It has failed again: another agent gets it."""


class Roster:
    """The trials of one search.

    Args:
        spec: the search.
        store: keeps the records.
        study: gives points of the space and is told the results.
        records: trials of an interrupted search that goes on.
        log: gets what TensorBoard shows; None for nothing.

    Attributes:
        records: the trials by number.
        speeds: how fast they train.
    """

    def __init__(
        self,
        spec: SearchSpec,
        store: Store,
        study: Study,
        records: Iterable[TrialRecord] = (),
        log: TensorBoardLog | None = None,
    ) -> None:
        self._spec = spec
        self._store = store
        self._study = study
        self._log = log
        self._objective = Objective(spec.metric, spec.mode)
        self.records: dict[int, TrialRecord] = {record.number: record for record in records}
        self.speeds = Speeds(store.load_slices(), self.records)
        self._stated: set[int] = set()
        self._arrived_s: dict[int, float] = {}
        # Trial -> how often it was lost at its checkpoint, and that checkpoint's step.
        self._lost: dict[int, tuple[int, int]] = {}
        self._failed_from: dict[int, int] = {}
        self._unsaved: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        self._received = {record.number: record.reports for record in self.records.values()}
        """Trial -> how many reports of its newest run have come, written down or not."""
        for record in self.records.values():
            if record.state.has_ended():
                # Its process may have been killed before the study heard of it.
                self._tell(record)

    @property
    def all(self) -> list[TrialRecord]:
        """All trials, by number."""
        return [self.records[number] for number in sorted(self.records)]

    @property
    def open(self) -> list[TrialRecord]:
        """The trials that have not ended, by number."""
        return [record for record in self.all if not record.state.has_ended()]

    @property
    def has_readings(self) -> bool:
        """Whether any trial has ever reported the objective."""
        return any(record.value is not None for record in self.records.values())

    @property
    def to_come(self) -> int:
        """How many trials the sampler has yet to give."""
        return self._study.remaining

    def admit(self, limit: int, now_s: float, wall_s: float) -> bool:
        """Asks the sampler for trials until `limit` are open; whether any came.

        Args:
            limit: how many may be open at a time.
            now_s: the time on the search's clock.
            wall_s: the time in seconds since the epoch.
        """
        open_count, came = len(self.open), False
        until_s = time.monotonic() + ADMISSION_S
        # One comes at any rate: a search without any would be taken for one that has ended.
        while open_count < limit and self._study.remaining > 0 and (not came or time.monotonic() < until_s):
            number, parameters = self._study.ask()
            record = TrialRecord(number, parameters, created_s=wall_s)
            self._store.save_trial(record)
            self.records[number] = record
            open_count += 1
            came = True
        for record in self.open:
            self._arrived_s.setdefault(record.number, now_s)
        return came

    def views(self, preemptible: dict[int, bool]) -> list[TrialView]:
        """What a policy sees of the open trials.

        Args:
            preemptible: trial that holds a slot -> whether it can be suspended.
        """
        return [
            TrialView(
                id=record.number,
                arrived_s=self._arrived_s.get(record.number, 0.0),
                readings=record.readings,
                slices=record.slices,
                runnable=record.state is not TrialState.RUNNING,
                preemptible=preemptible.get(record.number, True),
                batch_size=samples_per_step(record),
                speeds=self.speeds.of(record),
            )
            for record in self.open
        ]

    def starts(self, record: TrialRecord, slot: int, agent: str, score: float | None, kind: str = "") -> int:
        """Notes that a trial is about to be started, before anything happens; returns the number of its run.

        Args:
            record: the trial.
            slot: number of its slot.
            agent: name of the slot's agent.
            score: what the policy has compared the trial by; None without comparison.
            kind: what the slot computes on.
        """
        run = record.runs
        record.runs += 1
        record.reports = self._received[record.number] = 0
        record.state = TrialState.RUNNING
        record.slot, record.agent = slot, agent
        record.convergence = score if score is not None else record.convergence
        record.slices.append(len(record.readings))
        self.speeds.begins(record.number, run, kind)
        self._store.save_trial(record)
        return run

    def received(self, record: TrialRecord, losses: Losses) -> bool:
        """Takes in what a slot has sent of a trial's reports; each of them counts once, however often it is sent.

        Returns:
            False, with nothing taken in, if some before them are missing that the slot still has.
        """
        if losses.run != record.runs - 1:
            return True  # what was not taken in of a run that is over for us is trained again
        known = self._received.get(record.number, 0)
        if losses.first > max(known, losses.oldest):
            return False
        if losses.first > known:
            logger.warning("%d reports of trial %d are lost", losses.first - known, record.number)
        self.reported(record, losses.run, losses.reports[max(0, known - losses.first) :])
        self._received[record.number] = max(known, losses.first + len(losses.reports))
        return True

    def lacks(self, record: TrialRecord, end: RunEnd) -> bool:
        """Whether a run that has ended reported more than has come."""
        return end.run == record.runs - 1 and self._received.get(record.number, 0) < end.reports

    def reported(self, record: TrialRecord, run: int, reports: Sequence[dict[str, Any]]) -> None:
        """Takes `progress` reports in; malformed ones are logged and left out."""
        for report in reports:
            newest = record.readings[-1:]
            try:
                stated = self._objective.take(record, report, has_stated=record.number in self._stated)
            except ValueError as error:
                logger.warning("report of trial %d ignored: %s", record.number, error)
                continue
            self.speeds.reported(record, run, record.step, record.train_s)
            if stated:
                self._stated.add(record.number)
            self._unsaved.setdefault(record.number, []).append((run, report))
            if record.value is not None and record.readings[-1:] != newest:
                self._study.report(record.number, record.step, record.value)
            if self._log is not None:
                self._log.reported(record, [report])

    def save_losses(self) -> None:
        """Writes what was reported since the last time."""
        for number, reports in self._unsaved.items():
            record = self.records[number]
            record.reports = self._received.get(number, 0)
            self._store.save_progress(record, reports)
        self._unsaved.clear()

    def checkpointed(self, record: TrialRecord, path: str | None, step: int) -> None:
        """A trial's newest checkpoint is there."""
        if path is not None and path != record.checkpoint:
            record.checkpoint, record.checkpoint_step = path, step
            self._store.save_trial(record)

    def learned_batch_size(self, record: TrialRecord, samples: float | None) -> None:
        """What a trial's process says of its batch size; None if it cannot tell."""
        if samples is not None and samples != record.batch_size:
            record.batch_size = samples
            self._store.save_trial(record)

    def ended(self, record: TrialRecord, end: RunEnd, wall_s: float) -> Remedy:
        """A run has ended; the trial ends with it, or waits for another slot.

        Returns:
            What is to be done about the place.
        """
        # The checkpoint that this run went on from, if it wrote none itself.
        progressed = end.checkpoint is not None and end.step > self._failed_from.get(record.number, -1)
        self.checkpointed(record, end.checkpoint, end.step)
        news = news_of(record, end.last)
        if news.keys() - {"type", "step", "train_s"}:
            self.reported(record, end.run, [news])
        self.save_losses()
        remedy = Remedy.NONE
        if end.outcome == "finished":
            self._finish(record, wall_s)
        elif end.outcome in ("suspended", "stopped"):
            self._put_aside(record)
        elif end.outcome == "bad_input":
            self._fail(record, end, wall_s)
        else:
            record.failures = 1 if progressed else record.failures + 1
            self._failed_from[record.number] = record.checkpoint_step if record.checkpoint else 0
            if record.failures >= MAX_FAILURES:
                self._fail(record, end, wall_s)
            else:
                record.error = end.tail or end.message
                self._put_aside(record)
            if record.state is not TrialState.FAILED:
                remedy = Remedy.REPLACE_SLOT if record.failures == 1 else Remedy.AVOID_AGENT
        self._run_is_over(record)
        return remedy

    def lost(self, record: TrialRecord, reason: str, wall_s: float) -> None:
        """A trial's slot is gone, and its run with it."""
        times, at_step = self._lost.get(record.number, (0, 0))
        times = times + 1 if record.checkpoint_step <= at_step else 1
        self._lost[record.number] = times, record.checkpoint_step
        self.save_losses()
        if times >= MAX_LOSSES:
            end = RunEnd(record.number, record.runs - 1, "failed", message=f"{reason} ({MAX_LOSSES} times)")
            self._fail(record, end, wall_s)
        else:
            self._put_aside(record)
        self._run_is_over(record)

    def _run_is_over(self, record: TrialRecord) -> None:
        # Ours first: what only the study knows would be trained again by a search that goes on.
        self._store.save_trial(record)
        if record.state.has_ended():
            self._tell(record)
        else:
            self._study.annotate(record.number, _notes(record))
        if self._log is not None:
            self._log.run_ended(record)

    def _put_aside(self, record: TrialRecord) -> None:
        record.state = TrialState.SUSPENDED if record.checkpoint is not None else TrialState.WAITING
        record.slot = None

    def _finish(self, record: TrialRecord, wall_s: float) -> None:
        record.state, record.slot, record.ended_s, record.error = TrialState.FINISHED, None, wall_s, ""

    def _tell(self, record: TrialRecord) -> None:
        record.readings.clear()  # they are in the database; no policy looks at them any more
        value = None if record.state is TrialState.FAILED else record.value
        self._study.tell(record.number, value, failed=value is None or math.isnan(value), attributes=_notes(record))

    def _fail(self, record: TrialRecord, end: RunEnd, wall_s: float) -> None:
        record.state, record.slot, record.ended_s = TrialState.FAILED, None, wall_s
        record.error = f"{end.message}\n{end.tail}".strip()


def _notes(record: TrialRecord) -> dict[str, Any]:
    """What someone who looks at the study with Optuna's tools is told of a trial besides."""
    return {"state": str(record.state), "checkpoint": record.checkpoint}
