"""The trials of a search: their reports, and how their runs end. Every change is stored in the database."""

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
from typing import Any, Protocol

from dike.trial.spec import PARAMS_VARIABLE, TrialSpec
from executor.trial_messages import Losses, RunEnd, TrialOutput, TrialRun
from framework.policies.trials.interface import Reading, TrialView
from framework.project.failure_summary import error_summary, failure_summary, no_restart_reason
from framework.project.script_flags import script_arguments
from framework.search.limits import FailureRule
from framework.search.objective import MAX_STEP, Objective
from framework.search.optuna_study import Study
from framework.search.records import SearchSpec, TrialRecord, TrialState, describe_parameters
from framework.search.samplers import vary
from framework.search.speeds import SpeedTracker
from framework.search.store import Store

logger = logging.getLogger(__name__)

MAX_ADMISSION_S = 0.2
"""Maximum time per call for asking the sampler; Optuna gets slower with the number of open trials."""
MIN_RUN_TIME_S = 1.0
"""Minimum time limit of a run, even if its trial has used up all its time."""
SAME_LENGTH_SHARE = 0.9
"""Trials count as equally long if finished ones have trained on at least this share of any trial's samples."""
MAX_LOST_RUNS = 10
"""Maximum consecutive losses of a trial's slot, without a new checkpoint, before the trial counts as their cause."""


class TrialLog(Protocol):
    """Receives what trials report, such as files for TensorBoard."""

    def reported(self, trial: TrialRecord, reports: Sequence[Mapping[str, Any]]) -> None:
        """Called with contents of `progress` reports (`dike.trial.reports`)."""

    def run_ended(self, trial: TrialRecord) -> None:
        """Called when a run of the trial has ended, and maybe the trial."""


class RetryAction(enum.Enum):
    """What happens to the slot after a failed run."""

    NONE = enum.auto()
    REPLACE_SLOT = enum.auto()
    """First failure of the trial: a slot with another executor replaces the slot."""
    AVOID_AGENT = enum.auto()
    """Repeated failure: the trial gets another agent."""


class TrialTracker:
    """The trials of one search.

    Args:
        spec: the search.
        store: stores the records.
        study: samples points and receives results.
        records: trials of a resumed search.
        logs: what else receives the reports.

    Attributes:
        records: the trials by number.
        speeds: their speeds.
    """

    def __init__(
        self,
        spec: SearchSpec,
        store: Store,
        study: Study,
        records: Iterable[TrialRecord] = (),
        logs: Sequence[TrialLog] = (),
    ) -> None:
        self._spec = spec
        self._store = store
        self._study = study
        self._logs = logs
        self._objective = Objective(spec.metric, spec.mode, spec.value)
        self._failure_rule = FailureRule.parse(spec.on_failure)
        self.records: dict[int, TrialRecord] = {record.number: record for record in records}
        self._open = {record.number: record for record in self.all if not record.state.has_ended()}
        """Trials that have not ended, so that each decision does not take longer with the number of all."""
        self.speeds = SpeedTracker(store.load_slices(), self.records)
        self._arrived_s: dict[int, float] = {}
        # Trial -> number of lost runs since its checkpoint, and that checkpoint's step.
        self._lost: dict[int, tuple[int, int]] = {}
        # Trial -> checkpoint's step and agent of its last failure.
        self._failed_at: dict[int, tuple[int, str]] = {}
        self._unsaved: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        self._hopeless: list[TrialRecord] = []
        self._received = {record.number: record.reports for record in self.records.values()}
        """Trial -> number of received reports of its newest run, stored or not."""
        self._output_received: dict[int, int] = {}
        """Trial -> received bytes of output of its newest run, stored or not."""
        self._unsaved_output: list[TrialOutput] = []
        self._finished_samples: tuple[float, float] | None = None
        """Minimum and maximum number of samples of the finished trials; None before any."""
        self._ended_before: list[TrialView] = []
        for record in self.records.values():
            if record.state is TrialState.FINISHED:
                self._count_finished(record)
            if record.state.has_ended():
                self._ended_before.append(self._view(record, readings=tuple(record.readings)))
                if not _is_leaving(record):
                    # The process may have been killed before it updated the study.
                    self._report_to_study(record)

    @property
    def all(self) -> list[TrialRecord]:
        return [self.records[number] for number in sorted(self.records)]

    @property
    def open(self) -> list[TrialRecord]:
        """The trials that have not ended, by number."""
        return [record for record in self._open.values() if not record.state.has_ended()]

    @property
    def has_readings(self) -> bool:
        is_training_loss = self._spec.metric == "loss"  # losses precede the first value, reported after an epoch
        return any(
            record.value is not None or (is_training_loss and record.loss is not None)
            for record in self.records.values()
        )

    @property
    def unsampled(self) -> int:
        return self._study.remaining

    def admit(self, limit: int, now_s: float, wall_s: float) -> bool:
        """Asks the sampler for trials until `limit` are open. Returns whether it gave any."""
        # The sampler gets the result of a stopped trial once its run has left the slot.
        leaving = sum(_is_leaving(record) for record in self.records.values())
        open_count, admitted = len(self.open) + leaving, False
        until_s = time.monotonic() + MAX_ADMISSION_S
        # At least one, as a search without open trials counts as ended.
        while open_count < limit and self._study.remaining > 0 and (not admitted or time.monotonic() < until_s):
            number, parameters = self._study.ask()
            record = TrialRecord(number, parameters, created_s=wall_s)
            self._store.save_trial(record)
            self.records[number] = self._open[number] = record
            open_count += 1
            admitted = True
        for record in self.open:
            self._arrived_s.setdefault(record.number, now_s)
        return admitted

    def views(
        self,
        preemptible: Mapping[int, bool],
        refused: Mapping[int, frozenset[int]],
        paused_in: Mapping[int, frozenset[int]],
    ) -> list[TrialView]:
        """Returns the policy's views of the open trials; the arguments map trials to what differs from the defaults."""
        records = self.open
        views = [
            self._view(
                record,
                preemptible=preemptible.get(record.number, True),
                refused=refused.get(record.number, frozenset()),
                paused_in=paused_in.get(record.number, frozenset()),
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
        """Returns how many samples a trial trains on, from the finished ones; None if unknown.

        It is unknown if trials are still to come or may end early, or if one has trained on more than a finished one.
        """
        if self.unsampled or self._spec.stop or self._spec.timeout_s or not self._finished_samples:
            return None
        least, most = self._finished_samples
        most = max([most, *(record.samples for record in unfinished)])
        return most if least >= SAME_LENGTH_SHARE * most else None

    def _count_finished(self, record: TrialRecord) -> None:
        samples = record.samples
        least, most = self._finished_samples or (samples, samples)
        self._finished_samples = (min(least, samples), max(most, samples))

    def take_ended_before(self) -> list[TrialView]:
        """Returns the views of trials that ended before the search was resumed; only on the first call."""
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
            has_checkpoint=record.checkpoint is not None,
            **more,
        )

    def copy(self, record: TrialRecord, other: TrialRecord) -> str:
        """Makes a trial a copy of another at its newest checkpoint, with varied parameters; `start` stores it.

        Returns:
            The varied parameters, as text.
        """
        # Above the numbers in the names of the checkpoints that the trial gets.
        record.runs = max(record.runs, other.runs)
        record.parameters = vary(self._spec, other.parameters, f"{record.number} {record.runs}")
        record.readings = [one for one in other.readings if one.step <= other.checkpoint_step]
        record.slices = [min(before, len(record.readings)) for before in record.slices]
        record.step = other.checkpoint_step
        record.train_s = record.readings[-1].train_s if record.readings else 0.0
        for name in ("checkpoint", "checkpoint_step", "loss", "value", "best_value", "best_step", "stated"):
            setattr(record, name, getattr(other, name))
        record.metrics = dict(other.metrics)
        return describe_parameters(
            {name: record.parameters[name] for name in self._spec.mutate if name in record.parameters}
        )

    def start(self, record: TrialRecord, slot: int, agent: str, score: float | None, kind: str = "") -> int:
        """Stores that a run is about to start, before anything happens; returns its number."""
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
        """Applies reports of a run; each counts once, however often it is sent.

        Returns:
            False, with nothing applied, if reports before them are missing that the slot still has.
        """
        if losses.run != record.runs - 1:
            return True  # the run is over here; its missing steps are trained again
        known = self._received.get(record.number, 0)
        if losses.first > max(known, losses.oldest):
            return False
        if losses.first > known:
            logger.warning("%d reports of trial %d are lost", losses.first - known, record.number)
        new = losses.reports[max(0, known - losses.first) :]
        self.add_reports(record, losses.run, new)
        if self._spec.stop and self._judge_values(record, new):
            self._hopeless.append(record)
        self._received[record.number] = max(known, losses.first + len(losses.reports))
        return True

    def stop_hopeless(self, wall_s: float) -> list[TrialRecord]:
        """Stops the trials found hopeless since the last call, and returns them.

        Each keeps its slot until its run has left it. `wall_s` is in seconds since the epoch.
        """
        hopeless, self._hopeless = self._hopeless, []
        stopped = []
        for record in hopeless:
            if record.state.has_ended():
                continue  # it has ended meanwhile
            stopped.append(record)
            if record.state is not TrialState.RUNNING:
                record.slot = None
            record.state, record.ended_s = TrialState.STOPPED, wall_s
            self.save_progress()
            self._run_is_over(record)
        return stopped

    def receive_output(self, record: TrialRecord, piece: TrialOutput, *, is_last: bool = False) -> bool:
        """Applies output of a run; each byte counts once, however often it is sent. Stopped trials may still print.

        If `is_last`, missing output before it will never arrive.

        Returns:
            False, with nothing applied, if output before it is missing that the slot still has.
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
        if record.number not in self._output_received:
            self._output_received[record.number] = self._store.output_received(record.number, record.runs - 1)
        return self._output_received[record.number]

    def lacks_data(self, record: TrialRecord, end: RunEnd) -> bool:
        """Returns whether reports or output of an ended run have not been received yet."""
        if end.run != record.runs - 1:
            return False
        return self._received.get(record.number, 0) < end.reports or self.output_received(record) < end.output

    def add_reports(self, record: TrialRecord, run: int, reports: Sequence[dict[str, Any]]) -> None:
        """Applies `progress` reports; malformed ones are logged and skipped."""
        for report in reports:
            try:
                self._objective.apply(record, report)
            except ValueError as error:
                logger.warning("report of trial %d ignored: %s", record.number, error)
                continue
            self.speeds.add_report(record, run, record.step, record.train_s)
            self._unsaved.setdefault(record.number, []).append((run, report))
            if not self._spec.stop and "value" in report:
                self._study.report(record.number, record.step, float(report["value"]))
            for log in self._logs:
                log.reported(record, [report])

    def save_progress(self) -> None:
        """Stores received reports and output."""
        for number, reports in self._unsaved.items():
            record = self.records[number]
            record.reports = self._received.get(number, 0)
            self._store.save_progress(record, reports)
        self._unsaved.clear()
        if self._unsaved_output:
            self._store.add_output(self._unsaved_output)
            self._unsaved_output.clear()

    def set_checkpoint(self, record: TrialRecord, path: str | None, step: int) -> None:
        if path is not None and path != record.checkpoint:
            record.checkpoint, record.checkpoint_step = path, step
            self._store.save_trial(record)

    def first_step_taken(self, record: TrialRecord) -> None:
        """Resets the retries of a trial whose run has taken its first step."""
        if record.retries:
            record.retries = 0
            self._store.save_trial(record)

    def set_batch_size(self, record: TrialRecord, samples: float | None) -> None:
        if samples is not None and samples != record.batch_size:
            record.batch_size = samples
            self._store.save_trial(record)

    def why_hopeless(self, record: TrialRecord, end: RunEnd, is_only_agent: Callable[[], bool]) -> str:
        """Returns why a trial need not be retried after a failed run; empty if it may succeed.

        Call it before `run_ended`; `is_only_agent` returns whether no other agent could run the trial.
        """
        if (end.exit_code or 0) <= 0 or self._failure_rule.retries is not None:
            return ""
        _, failed_on = self._failed_at.get(record.number, (0, ""))
        is_same = record.failures > 0 and failure_summary(end.tail or end.message) == failure_summary(record.error)
        return no_restart_reason(
            end.tail,
            has_ever_trained=bool(record.step or end.reports or end.checkpoint),
            stepped=end.reports > 0,
            # Repeated failure on one agent may be caused by that agent.
            again=is_same and not self._has_progressed(record, end) and (record.agent != failed_on or is_only_agent()),
        )

    def _has_progressed(self, record: TrialRecord, end: RunEnd) -> bool:
        """Returns whether there is a newer checkpoint than at the trial's last failure."""
        # If the run wrote no checkpoint, the end names the one it resumed from.
        failed_from, _ = self._failed_at.get(record.number, (-1, ""))
        return end.checkpoint is not None and end.step > failed_from

    def run_ended(self, record: TrialRecord, end: RunEnd, wall_s: float, *, is_hopeless: bool = False) -> RetryAction:
        """Ends a run; its trial ends too, or waits for a slot. If `is_hopeless`, a failed trial is not retried."""
        progressed = self._has_progressed(record, end)
        self.set_checkpoint(record, end.checkpoint, end.step)
        news = self._objective.unapplied(record, end.last)
        # A stopped trial keeps the value by which it was judged.
        may_count = not record.state.has_ended() or (_is_leaving(record) and end.outcome == "finished")
        if news.keys() - {"type", "step", "train_s"} and may_count:
            self.add_reports(record, end.run, [news])
        self.save_progress()
        action = RetryAction.NONE
        if record.state is TrialState.STOPPED and end.outcome != "finished":
            record.slot = None
        elif end.outcome == "finished":
            # A trial being stopped may have finished meanwhile.
            self._finish(record, wall_s)
        elif end.outcome in ("suspended", "killed"):
            self._requeue(record, is_suspended=end.outcome == "suspended")
        elif end.outcome in ("bad_input", "timed_out"):
            self._fail(record, end, wall_s)
        else:
            record.failures = 1 if progressed else record.failures + 1
            self._failed_at[record.number] = (record.checkpoint_step if record.checkpoint else 0, record.agent)
            if is_hopeless or record.failures >= self._failure_rule.max_failures:
                self._fail(record, end, wall_s)
            else:
                record.error, record.retries = end.tail or end.message, record.failures
                self._requeue(record)
            if record.state is not TrialState.FAILED:
                action = RetryAction.REPLACE_SLOT if record.failures == 1 else RetryAction.AVOID_AGENT
        self._run_is_over(record)
        return action

    def run_lost(self, record: TrialRecord, reason: str, wall_s: float, *, counts: bool) -> None:
        """Ends a run whose slot has ended.

        Args:
            record: the trial.
            reason: why.
            wall_s: seconds since the epoch.
            counts: whether the trial may be the cause; after `MAX_LOST_RUNS` such losses it fails.
        """
        times, at_step = self._lost.get(record.number, (0, 0))
        times = (times if record.checkpoint_step <= at_step else 0) + (1 if counts else 0)
        self._lost[record.number] = times, record.checkpoint_step
        self.save_progress()
        if record.state is TrialState.STOPPED:
            record.slot = None
        elif times >= MAX_LOST_RUNS:
            end = RunEnd(record.number, record.runs - 1, "failed", message=f"{reason} ({MAX_LOST_RUNS} times)")
            self._fail(record, end, wall_s)
        else:
            self._requeue(record)
        self._run_is_over(record)

    def _run_is_over(self, record: TrialRecord) -> None:
        # Own database first: a trial that ended only in the study would be trained again after a resume.
        self._store.save_trial(record)
        if record.state.has_ended():
            self._open.pop(record.number, None)
        if _is_leaving(record):
            return
        if record.state.has_ended():
            self._report_to_study(record)
        else:
            self._study.annotate(record.number, self._study_attributes(record))
        for log in self._logs:
            log.run_ended(record)

    def _requeue(self, record: TrialRecord, *, is_suspended: bool = False) -> None:
        # A trial suspended without a checkpoint is paused in memory.
        has_state = is_suspended or record.checkpoint is not None
        record.state = TrialState.SUSPENDED if has_state else TrialState.WAITING
        record.slot = None

    def _finish(self, record: TrialRecord, wall_s: float) -> None:
        record.state, record.slot, record.ended_s, record.error = TrialState.FINISHED, None, wall_s, ""
        self._count_finished(record)

    def _judge_values(self, record: TrialRecord, reports: Sequence[Mapping[str, Any]]) -> bool:
        """Judges new values of the objective, and returns whether to stop the trial."""
        for report in reports:
            try:
                values = [(int(count), int(step), float(value)) for count, step, value in report.get("values", ())]
            except (TypeError, ValueError, OverflowError) as error:
                logger.warning("values of trial %d ignored: %s", record.number, error)
                continue
            for count, step, value in values:
                # Skips values repeated after a return to a checkpoint.
                if record.stated < count < MAX_STEP and 0 <= step < MAX_STEP:
                    record.stated, record.stated_step = count, step
                    if self._study.judge(record.number, record.stated, value):
                        return True
        return False

    def _report_to_study(self, record: TrialRecord) -> None:
        record.readings.clear()  # frees memory: no policy needs them any more
        value = None if record.state is TrialState.FAILED else record.value
        self._study.tell(
            record.number,
            value,
            failed=value is None or math.isnan(value),
            stopped=record.state is TrialState.STOPPED,
            attributes=self._study_attributes(record),
        )

    def _study_attributes(self, record: TrialRecord) -> dict[str, Any]:
        changed = {"parameters": record.parameters} if self._spec.mutate else {}
        return {"state": str(record.state), "checkpoint": record.checkpoint, **changed}

    def _fail(self, record: TrialRecord, end: RunEnd, wall_s: float) -> None:
        record.state, record.slot, record.ended_s = TrialState.FAILED, None, wall_s
        # Tables show the last line. The output lacks the reason if the script was killed, or exited silently.
        is_from_outside = end.outcome == "timed_out" or (end.exit_code or 0) < 0
        says_why = not is_from_outside and bool(error_summary(end.tail))
        parts = (end.message, end.tail) if says_why else (end.tail, end.message)
        record.error = "\n".join(filter(None, (part.strip() for part in parts)))


def _is_leaving(record: TrialRecord) -> bool:
    """Returns whether a stopped trial's run may still be in its slot; it may finish before it leaves."""
    return record.state is TrialState.STOPPED and record.slot is not None


def trial_arguments(spec: SearchSpec, trial: TrialRecord) -> tuple[str, ...]:
    before, after = script_arguments(spec.flags, trial.parameters)
    return (*before, *spec.arguments, *after)


def train_command(spec: SearchSpec, trial: TrialRecord) -> str | None:
    """Returns the shell command that trains with a trial's parameters without Dike.

    Parameters read by `dike.params` are set in its environment variable. None if trials call a function.
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
    """Returns the message to an executor for a run of a trial, which resumes from the trial's newest checkpoint."""
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
        processes=(spec.slot_gpus or 1) if spec.distributes_itself else 1,
        max_steps=spec.max_steps,
        max_epochs=spec.max_epochs,
    )
    left_s = None if spec.trial_timeout_s is None else max(MIN_RUN_TIME_S, spec.trial_timeout_s - trial.slot_s)
    return TrialRun(order, trial_arguments(spec, trial), left_s)


def _left_s(record: TrialRecord, view: TrialView, length: float) -> float | None:
    """Estimates the seconds until a trial has trained on `length` samples; None without a measured speed."""
    if not view.speeds:
        return None
    trains = record.current is not None and record.current.first_step_s is not None
    step = record.step if trains or view.paused_in else record.checkpoint_step
    return max(length - step * view.batch_size, 0.0) / fmean(view.speeds.values())
