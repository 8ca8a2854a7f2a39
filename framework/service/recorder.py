"""Records the events, output and progress of jobs: buffered in memory, written in batches."""

from __future__ import annotations

import codecs
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from executor.messages import LogChunk, storable
from framework.scheduler.records import ProgressPoint
from framework.search.observer import SearchObserver
from framework.search.records import TrialRecord
from framework.search.slots import Slot
from framework.service.store import ServiceStore
from framework.training.elastic.layout import Size
from framework.training.observer import JobObserver
from framework.training.spec import JobTask, Resize
from solver import Plan, PlannedTask

WAITING_EVENT_INTERVAL_S = 600.0
"""Minimum time between two events about why a job waits; its record always has the current reason."""


def finite(value: float | None) -> float | None:
    """The number if it is finite, as JSON requires; else None."""
    return value if value is not None and math.isfinite(value) else None


class JobRecorder:
    """Buffers the events, output and progress of one job; `waiting` is why it does not run, empty if nothing prevents
    it.
    """

    def __init__(self, store: ServiceStore, job_id: str, waiting: str = "") -> None:
        self._store = store
        self._job_id = job_id
        self._events: list[tuple[str, str]] = []
        self._output: list[tuple[str, str, str]] = []
        self._received: dict[tuple[str, str], int] = {}
        self._progress: list[ProgressPoint] = []
        self._written_waiting = self.waiting = waiting
        self._waiting_event_s = -WAITING_EVENT_INTERVAL_S

    def event(self, kind: str, text: str) -> None:
        self._events.append((kind, text))

    def set_waiting(self, reason: str) -> None:
        now_s = time.monotonic()
        # The reason lists current offers, and so changes often.
        if reason != self.waiting and (not self.waiting or now_s - self._waiting_event_s >= WAITING_EVENT_INTERVAL_S):
            self._waiting_event_s = now_s
            self.event("waiting", reason)
        self.waiting = reason

    def output(self, task: str, stream: str, text: str) -> None:
        if text:
            self._output.append((task, stream, storable(text)))

    def received(self, task_id: str, stream: str, size: int) -> None:
        """Sets how many bytes of a task's output are in `output`; the next service continues from there."""
        self._received[task_id, stream] = size

    def progress(self, point: ProgressPoint) -> None:
        self._progress.append(point)

    def write(self) -> None:
        # Cleared only once written. If the database fails, the service ends and loses what is still buffered.
        self._store.history.add_events(self._job_id, self._events)
        self._events.clear()
        self._store.history.add_output(self._job_id, self._output, self._received)
        self._output.clear()
        self._received.clear()
        self._store.history.add_progress(self._job_id, self._progress)
        self._progress.clear()
        if self.waiting != self._written_waiting:
            self._store.change_job(self._job_id, waiting=self.waiting)
            self._written_waiting = self.waiting


class TrainingRecorder(JobObserver):
    """Records a training job; its progress is that of the chief."""

    def __init__(self, recorder: JobRecorder, is_chief: Callable[[PlannedTask], bool]) -> None:
        self._recorder = recorder
        self._is_chief = is_chief
        self._decoders: dict[tuple[str, str], codecs.IncrementalDecoder] = {}

    def waiting(self, reason: str) -> None:
        self._recorder.set_waiting(reason)

    def planned(self, plan: Plan) -> None:
        roles = Counter(task.role for task in plan.tasks)
        self._recorder.event("planned", ", ".join(f"{count} {role}" for role, count in roles.items()))

    def launched(self, tasks: Sequence[JobTask]) -> None:
        self._recorder.waiting = ""
        where = ", ".join(f"{task.name} on {task.node}" for task in tasks)
        self._recorder.event("launched", where)

    def task_changed(self, task: JobTask) -> None:
        message = f": {task.message}" if task.message and task.state.is_terminal() and not task.stop_requested else ""
        self._recorder.event("task", f"{task.name} {task.shown_verb} on {task.node}{message}")

    def progress(self, task: JobTask) -> None:
        if task.step is not None and self._is_chief(task.planned):
            self._recorder.progress(
                ProgressPoint(task.step, time.time(), finite(task.loss), finite(task.samples_per_s))
            )

    def log(self, task: JobTask, chunk: LogChunk) -> None:
        key = (task.task_id, chunk.stream)
        decoder = self._decoders.setdefault(key, codecs.getincrementaldecoder("utf-8")("replace"))
        self._recorder.output(task.name, chunk.stream, decoder.decode(chunk.data))
        # Counts whole characters only: the next service starts with a new decoder.
        incomplete, _ = decoder.getstate()
        self._recorder.received(task.task_id, chunk.stream, chunk.end - len(incomplete))

    def checkpoint(self, path: str, step: int) -> None:
        self._recorder.event("checkpoint", f"step {step}: {path}")

    def resizing(self, workers: int, ps: int, reason: str) -> None:
        self._recorder.event("note", f"changing to {Size(workers, ps)}: {reason}")

    def resized(self, resize: Resize) -> None:
        size = Size(resize.to_workers, resize.to_ps)
        self._recorder.event("resized", f"{size} after {resize.cost_s:.1f} s")

    def restarting(self, reason: str, restart: int, limit: int) -> None:
        self._recorder.event("restarting", f"{reason}; restart {restart} of {limit}")

    def notify(self, text: str) -> None:
        self._recorder.event("note", text)


class SearchRecorder(SearchObserver):
    is_public = True

    def __init__(self, recorder: JobRecorder) -> None:
        self._recorder = recorder

    def waiting(self, reason: str) -> None:
        self._recorder.set_waiting(reason)

    def slot_changed(self, slot: Slot) -> None:
        self._recorder.waiting = ""
        message = f": {slot.message}" if slot.message and slot.is_gone and not slot.leaving else ""
        self._recorder.event("task", f"slot {slot.id} {slot.state.verb} on {slot.node}{message}")

    def trial_started(self, trial: TrialRecord, slot: Slot, reason: str) -> None:
        why = f" ({reason})" if reason else ""
        self._recorder.event("trial", f"trial {trial.number} got slot {slot.id} on {slot.node}{why}")

    def trial_ended(self, trial: TrialRecord, slot: Slot, outcome: str) -> None:
        value = "" if trial.value is None else f", value {trial.value:.6g}"
        self._recorder.event("trial", f"trial {trial.number}, slot {slot.id}: {outcome} at step {trial.step}{value}")

    def output(self, text: str) -> None:
        self._recorder.output("trials", "stderr", text if text.endswith("\n") else f"{text}\n")

    def notify(self, text: str) -> None:
        self._recorder.event("note", text)
