"""The trials of a search: who is there, what they reported, how their runs ended. Every change goes to the database."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from dike.trial.spec import PARAMS_VARIABLE, TrialSpec
from executor.trial_messages import Losses, RunEnd, TrialOutput, TrialRun
from framework.policies.trials.interface import Reading, TrialView
from framework.project.failure_summary import error_summary, failure_summary, no_restart_reason
from framework.project.script_flags import script_arguments
from framework.search.objective import MAX_STEP, Objective
from framework.search.optuna_study import Study
from framework.search.records import MAX_FAILURES, SearchSpec, TrialRecord, TrialState
from framework.search.speeds import Speeds
from framework.search.store import Store
from framework.search.tensorboard import TensorBoardLog

logger = logging.getLogger(__name__)

ADMISSION_S = 0.2
"""How long the sampler may be asked for trials at a time: Optuna takes the longer the more trials are open."""
LEAST_LEFT_S = 1.0
"""A run of a trial may take this long, also where its trial has had all its time."""
SAME_LENGTH = 0.9
"""Trials are taken to be equally long if those that have finished have trained on at least this share of what any
trial has."""
MAX_LOSSES = 10
"""How often in a row, without a new checkpoint, a trial may go down with its slot before it is taken for the cause."""


class Remedy(enum.Enum):
    """What is to be done about the place where a run ended."""

    NONE = enum.auto()
    REPLACE_SLOT = enum.auto()
    """A trial has failed for the first time: a slot with another executor takes the place of its slot."""
    AVOID_AGENT = enum.auto()
    """It has failed again: another agent gets it."""


class TrialTracker:
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
        self._objective = Objective(spec.metric, spec.mode, spec.value)
        self.records: dict[int, TrialRecord] = {record.number: record for record in records}
        self.speeds = Speeds(store.load_slices(), self.records)
        self._arrived_s: dict[int, float] = {}
        # Trial -> how often it was lost at its checkpoint, and that checkpoint's step.
        self._lost: dict[int, tuple[int, int]] = {}
        # Trial -> the checkpoint's step and the agent that its last failure was at.
        self._failed_at: dict[int, tuple[int, str]] = {}
        self._unsaved: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        self._hopeless: list[TrialRecord] = []
        self._received = {record.number: record.reports for record in self.records.values()}
        """Trial -> how many reports of its newest run have come, written down or not."""
        self._output_received: dict[int, int] = {}
        """Trial -> up to where the output of its newest run has come, written down or not."""
        self._unsaved_output: list[TrialOutput] = []
        self._finished_samples: tuple[float, float] | None = None
        """On how many samples the trials that have finished have trained: the least and the most; None before any."""
        self._ended_before: list[TrialView] = []
        for record in self.records.values():
            if record.state is TrialState.FINISHED:
                self._count_finished(record)
            if record.state.has_ended():
                self._ended_before.append(self._view(record, readings=tuple(record.readings)))
                if not _is_leaving(record):
                    # Its process may have been killed before the study heard of it.
                    self._tell_study(record)

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
        of_losses = self._spec.metric == "loss"  # which are reported before the first value, an epoch's, is
        return any(
            record.value is not None or (of_losses and record.loss is not None) for record in self.records.values()
        )

    @property
    def unsampled(self) -> int:
        """How many trials the sampler has yet to give."""
        return self._study.remaining

    def admit(self, limit: int, now_s: float, wall_s: float) -> bool:
        """Asks the sampler for trials until `limit` are open; whether any came.

        Args:
            limit: how many may be open at a time.
            now_s: the time on the search's clock.
            wall_s: the time in seconds since the epoch.
        """
        # The sampler is told of a trial that has been stopped when its run has left the slot.
        leaving = sum(_is_leaving(record) for record in self.records.values())
        open_count, came = len(self.open) + leaving, False
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

    def views(
        self,
        preemptible: Mapping[int, bool],
        refused: Mapping[int, frozenset[int]],
        homes: Mapping[int, frozenset[int]],
    ) -> list[TrialView]:
        """What a policy sees of the open trials.

        Args:
            preemptible: trial that holds a slot -> whether it can be suspended.
            refused: trial -> slots it must not be given.
            homes: trial -> the slots in which its process stands still.
        """
        records = self.open
        views = [
            self._view(
                record,
                preemptible=preemptible.get(record.number, True),
                refused=refused.get(record.number, frozenset()),
                homes=homes.get(record.number, frozenset()),
            )
            for record in records
        ]
        length = self._length(records)
        if length is None:
            return views
        return [
            dataclasses.replace(view, left_s=_left_s(record, view, length))
            for record, view in zip(records, views, strict=True)
        ]

    def _length(self, unfinished: Iterable[TrialRecord]) -> float | None:
        """How many samples a trial trains on, by those that have finished; None if nothing tells.

        Nothing does if trials are still to come, or may be ended before their time, or if one has trained on more than
        one that has finished.
        """
        if self.unsampled or self._spec.stop or self._spec.timeout_s or not self._finished_samples:
            return None
        least, most = self._finished_samples
        most = max([most, *(record.samples for record in unfinished)])
        return most if least >= SAME_LENGTH * most else None

    def _count_finished(self, record: TrialRecord) -> None:
        samples = record.samples
        least, most = self._finished_samples or (samples, samples)
        self._finished_samples = (min(least, samples), max(most, samples))

    def take_ended_before(self) -> list[TrialView]:
        """What a policy would have seen of the trials that had ended when the search was taken up; only once."""
        ended, self._ended_before = self._ended_before, []
        return ended

    def _view(self, record: TrialRecord, readings: Sequence[Reading] | None = None, **more: Any) -> TrialView:
        return TrialView(
            id=record.number,
            arrived_s=self._arrived_s.get(record.number, 0.0),
            readings=record.readings if readings is None else readings,
            slices=record.slices,
            runnable=record.state is not TrialState.RUNNING and not record.state.has_ended(),
            batch_size=record.samples_per_step,
            speeds=self.speeds.of(record),
            **more,
        )

    def start(self, record: TrialRecord, slot: int, agent: str, score: float | None, kind: str = "") -> int:
        """Writes down that a trial is about to be started, before anything happens; returns the number of its run.

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
        self._output_received[record.number] = 0
        record.state = TrialState.RUNNING
        record.slot, record.agent = slot, agent
        record.convergence = score if score is not None else record.convergence
        record.slices.append(len(record.readings))
        self.speeds.begin_run(record.number, run, kind)
        self._store.save_trial(record)
        return run

    def receive(self, record: TrialRecord, losses: Losses) -> bool:
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
        new = losses.reports[max(0, known - losses.first) :]
        self.add_reports(record, losses.run, new)
        if self._spec.stop and self._is_hopeless(record, new):
            self._hopeless.append(record)
        self._received[record.number] = max(known, losses.first + len(losses.reports))
        return True

    def stop_hopeless(self, wall_s: float) -> list[TrialRecord]:
        """Ends the trials for good that have been found hopeless since the last time; returns them.

        The slot of each is noted until its run is out of it.

        Args:
            wall_s: the time in seconds since the epoch.
        """
        hopeless, self._hopeless = self._hopeless, []
        stopped = []
        for record in hopeless:
            if record.state.has_ended():
                continue  # it has finished meanwhile, or several messages have said so
            stopped.append(record)
            if record.state is not TrialState.RUNNING:
                record.slot = None
            record.state, record.ended_s = TrialState.STOPPED, wall_s
            self.save_progress()
            self._run_is_over(record)
        return stopped

    def receive_output(self, record: TrialRecord, piece: TrialOutput, *, is_last: bool = False) -> bool:
        """Takes in what a run of a trial has printed; each byte counts once, however often it is sent.

        Args:
            record: the trial; one that has been stopped may still print.
            piece: what has come.
            is_last: whether what is missing before it will not come any more.

        Returns:
            False, with nothing taken in, if something before it is missing that the slot still has.
        """
        if piece.run != record.runs - 1:
            return True
        known = self.output_received(record)
        if piece.offset - piece.skipped > known and not is_last:
            return False
        if piece.end > known:
            new = piece.data[max(0, known - piece.offset) :]
            offset = piece.end - len(new)
            self._unsaved_output.append(dataclasses.replace(piece, offset=offset, data=new, skipped=offset - known))
            self._output_received[record.number] = piece.end
        return True

    def output_received(self, record: TrialRecord) -> int:
        """Up to where the output of a trial's newest run has come."""
        if record.number not in self._output_received:
            self._output_received[record.number] = self._store.output_received(record.number, record.runs - 1)
        return self._output_received[record.number]

    def lacks_anything(self, record: TrialRecord, end: RunEnd) -> bool:
        """Whether a run that has ended reported or printed more than has come."""
        if end.run != record.runs - 1:
            return False
        return self._received.get(record.number, 0) < end.reports or self.output_received(record) < end.output

    def add_reports(self, record: TrialRecord, run: int, reports: Sequence[dict[str, Any]]) -> None:
        """Takes `progress` reports in; malformed ones are logged and left out."""
        for report in reports:
            try:
                self._objective.take(record, report)
            except ValueError as error:
                logger.warning("report of trial %d ignored: %s", record.number, error)
                continue
            self.speeds.add_report(record, run, record.step, record.train_s)
            self._unsaved.setdefault(record.number, []).append((run, report))
            if not self._spec.stop and "value" in report:
                self._study.report(record.number, record.step, float(report["value"]))
            if self._log is not None:
                self._log.reported(record, [report])

    def save_progress(self) -> None:
        """Writes what was reported and printed since the last time."""
        for number, reports in self._unsaved.items():
            record = self.records[number]
            record.reports = self._received.get(number, 0)
            self._store.save_progress(record, reports)
        self._unsaved.clear()
        if self._unsaved_output:
            self._store.add_output(self._unsaved_output)
            self._unsaved_output.clear()

    def set_checkpoint(self, record: TrialRecord, path: str | None, step: int) -> None:
        """A trial's newest checkpoint is there."""
        if path is not None and path != record.checkpoint:
            record.checkpoint, record.checkpoint_step = path, step
            self._store.save_trial(record)

    def stepped(self, record: TrialRecord) -> None:
        """A run of a trial has taken its first step."""
        if record.retries:
            record.retries = 0
            self._store.save_trial(record)

    def set_batch_size(self, record: TrialRecord, samples: float | None) -> None:
        """What a trial's process says of its batch size; None if it cannot tell."""
        if samples is not None and samples != record.batch_size:
            record.batch_size = samples
            self._store.save_trial(record)

    def why_hopeless(self, record: TrialRecord, end: RunEnd, is_only_agent: Callable[[], bool]) -> str:
        """Why a trial whose run has just failed need not be tried again; empty if it may succeed.

        Args:
            record: the trial; `run_ended` has not been called yet.
            end: of its run.
            is_only_agent: says whether it could be tried on no other agent.
        """
        if (end.exit_code or 0) <= 0:
            return ""
        _, failed_on = self._failed_at.get(record.number, (0, ""))
        is_same = record.failures > 0 and failure_summary(end.tail or end.message) == failure_summary(record.error)
        return no_restart_reason(
            end.tail,
            has_ever_trained=bool(record.step or end.reports or end.checkpoint),
            stepped=end.reports > 0,
            # What fails again on one agent may be that agent's fault.
            again=is_same and not self._got_on(record, end) and (record.agent != failed_on or is_only_agent()),
        )

    def _got_on(self, record: TrialRecord, end: RunEnd) -> bool:
        """Whether there is a newer checkpoint than at the trial's last failure."""
        # The end names the checkpoint that the run went on from, if it wrote none itself.
        failed_from, _ = self._failed_at.get(record.number, (-1, ""))
        return end.checkpoint is not None and end.step > failed_from

    def run_ended(self, record: TrialRecord, end: RunEnd, wall_s: float, *, is_hopeless: bool = False) -> Remedy:
        """A run has ended; the trial ends with it, or waits for another slot.

        Args:
            record: the trial.
            end: of its run.
            wall_s: the time in seconds since the epoch.
            is_hopeless: whether a trial that has failed is not to be tried again.

        Returns:
            What is to be done about the place.
        """
        progressed = self._got_on(record, end)
        self.set_checkpoint(record, end.checkpoint, end.step)
        news = self._objective.news_of(record, end.last)
        # The value of a trial that was stopped is the one by which it was judged.
        may_count = not record.state.has_ended() or (_is_leaving(record) and end.outcome == "finished")
        if news.keys() - {"type", "step", "train_s"} and may_count:
            self.add_reports(record, end.run, [news])
        self.save_progress()
        remedy = Remedy.NONE
        if record.state is TrialState.STOPPED and end.outcome != "finished":
            record.slot = None
        elif end.outcome == "finished":
            # One that was to be stopped may have trained to its end meanwhile.
            self._finish(record, wall_s)
        elif end.outcome in ("suspended", "stopped"):
            self._requeue(record, is_suspended=end.outcome == "suspended")
        elif end.outcome in ("bad_input", "timed_out"):
            self._fail(record, end, wall_s)
        else:
            record.failures = 1 if progressed else record.failures + 1
            self._failed_at[record.number] = (record.checkpoint_step if record.checkpoint else 0, record.agent)
            if is_hopeless or record.failures >= MAX_FAILURES:
                self._fail(record, end, wall_s)
            else:
                record.error, record.retries = end.tail or end.message, record.failures
                self._requeue(record)
            if record.state is not TrialState.FAILED:
                remedy = Remedy.REPLACE_SLOT if record.failures == 1 else Remedy.AVOID_AGENT
        self._run_is_over(record)
        return remedy

    def run_lost(self, record: TrialRecord, reason: str, wall_s: float, *, counts: bool) -> None:
        """A trial's slot is gone, and its run with it.

        Args:
            record: the trial.
            reason: why.
            wall_s: the time in seconds since the epoch.
            counts: whether that may be the trial's own doing; after `MAX_LOSSES` such times it has failed.
        """
        times, at_step = self._lost.get(record.number, (0, 0))
        times = (times if record.checkpoint_step <= at_step else 0) + (1 if counts else 0)
        self._lost[record.number] = times, record.checkpoint_step
        self.save_progress()
        if record.state is TrialState.STOPPED:
            record.slot = None
        elif times >= MAX_LOSSES:
            end = RunEnd(record.number, record.runs - 1, "failed", message=f"{reason} ({MAX_LOSSES} times)")
            self._fail(record, end, wall_s)
        else:
            self._requeue(record)
        self._run_is_over(record)

    def _run_is_over(self, record: TrialRecord) -> None:
        # Ours first: what only the study knows would be trained again by a search that goes on.
        self._store.save_trial(record)
        if _is_leaving(record):
            return
        if record.state.has_ended():
            self._tell_study(record)
        else:
            self._study.annotate(record.number, _study_attributes(record))
        if self._log is not None:
            self._log.run_ended(record)

    def _requeue(self, record: TrialRecord, *, is_suspended: bool = False) -> None:
        # One that is suspended without a checkpoint stands still in memory.
        has_state = is_suspended or record.checkpoint is not None
        record.state = TrialState.SUSPENDED if has_state else TrialState.WAITING
        record.slot = None

    def _finish(self, record: TrialRecord, wall_s: float) -> None:
        record.state, record.slot, record.ended_s, record.error = TrialState.FINISHED, None, wall_s, ""
        self._count_finished(record)

    def _is_hopeless(self, record: TrialRecord, reports: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a trial is to be stopped, by the values of its objective in reports that are new."""
        for report in reports:
            try:
                values = [(int(count), int(step), float(value)) for count, step, value in report.get("values", ())]
            except (TypeError, ValueError, OverflowError) as error:
                logger.warning("values of trial %d ignored: %s", record.number, error)
                continue
            for count, step, value in values:
                # What a run repeats after going back to a checkpoint has been judged.
                if record.stated < count < MAX_STEP and 0 <= step < MAX_STEP:
                    record.stated, record.stated_step = count, step
                    if self._study.judge(record.number, record.stated, value):
                        return True
        return False

    def _tell_study(self, record: TrialRecord) -> None:
        record.readings.clear()  # they are in the database; no policy looks at them any more
        value = None if record.state is TrialState.FAILED else record.value
        self._study.tell(
            record.number,
            value,
            failed=value is None or math.isnan(value),
            stopped=record.state is TrialState.STOPPED,
            attributes=_study_attributes(record),
        )

    def _fail(self, record: TrialRecord, end: RunEnd, wall_s: float) -> None:
        record.state, record.slot, record.ended_s = TrialState.FAILED, None, wall_s
        # The last line is what tables show. The output does not say why where the script was ended from outside, or has
        # ended itself without a word.
        is_from_outside = end.outcome == "timed_out" or (end.exit_code or 0) < 0
        says_why = not is_from_outside and bool(error_summary(end.tail))
        parts = (end.message, end.tail) if says_why else (end.tail, end.message)
        record.error = "\n".join(filter(None, (part.strip() for part in parts)))


def _is_leaving(record: TrialRecord) -> bool:
    """Whether a trial has been stopped and its run may still be in its slot: it may finish before it is out of it."""
    return record.state is TrialState.STOPPED and record.slot is not None


def _study_attributes(record: TrialRecord) -> dict[str, Any]:
    """What someone who looks at the study with Optuna's tools is told of a trial besides."""
    return {"state": str(record.state), "checkpoint": record.checkpoint}


def trial_arguments(spec: SearchSpec, trial: TrialRecord) -> tuple[str, ...]:
    """The script's arguments in a trial: those that all trials get, and its parameters."""
    before, after = script_arguments(spec.flags, trial.parameters)
    return (*before, *spec.arguments, *after)


def train_command(spec: SearchSpec, trial: TrialRecord) -> str | None:
    """The shell command that runs the script with a trial's parameters, without Dike.

    Parameters that the script reads by `dike.params` stand in the environment variable that `dike.params` takes them
    from outside of a search.

    Returns:
        None where trials call a function: it is called with its parameters.
    """
    if spec.call is not None:
        return None
    module = spec.entry.module
    program = ["-m", module] if module else [spec.script]
    command = shlex.join(["python", *program, *trial_arguments(spec, trial)])
    if spec.reads_params or not spec.flags.keys() >= trial.parameters.keys():
        return f"{PARAMS_VARIABLE}={shlex.quote(json.dumps(trial.parameters))} {command}"
    return command


def trial_run(spec: SearchSpec, trial: TrialRecord, run: int) -> TrialRun:
    """What an executor is sent of a run of a trial, which goes on from the trial's newest checkpoint."""
    order = TrialSpec(
        search=spec.name,
        number=trial.number,
        run=run,
        parameters=trial.parameters,
        folder=f"{spec.checkpoint_dir.rstrip('/')}/trial-{trial.number}",
        resume_from=trial.checkpoint,
        checkpoint_interval_s=spec.checkpoint_interval_s,
        metric=spec.metric,
        mode=spec.mode,
        call=spec.call,
        every_value=bool(spec.stop),
    )
    left_s = None if spec.trial_timeout_s is None else max(LEAST_LEFT_S, spec.trial_timeout_s - trial.slot_s)
    return TrialRun(order, trial_arguments(spec, trial), left_s)


def _left_s(record: TrialRecord, view: TrialView, length: float) -> float | None:
    """Seconds until a trial has trained on so many samples, from where it would go on; None if it has no speed yet."""
    if not view.speeds:
        return None
    trains = record.current is not None and record.current.first_step_s is not None
    step = record.step if trains or view.homes else record.checkpoint_step
    return max(length - step * view.batch_size, 0.0) / fmean(view.speeds.values())
