"""The wanted and the reported states of an elastic job's slots."""

from __future__ import annotations

from dataclasses import dataclass

from dike.task import TaskSpec
from executor.elastic_messages import ElasticStatus, WantedProcess
from framework.mesos.tasks import TaskState
from framework.scheduler.job import Message
from framework.training.spec import JobTask

RESEND_INTERVAL_S = 1.0
"""Interval at which a slot is sent its wanted state until it acknowledges it."""
_STATUS_REQUEST = -1
"""A sequence number below any that was sent: requests a status only."""


@dataclass
class _Slot:
    task: JobTask
    wanted: WantedProcess
    status: ElasticStatus | None = None
    sent_s: float | None = None


class ElasticSlots:
    """Sends each slot its wanted state until it is acknowledged.

    Args:
        outbox: receives messages for executors; delivery is not guaranteed.
    """

    def __init__(self, outbox: list[Message]) -> None:
        self._outbox = outbox
        self._slots: dict[str, _Slot] = {}

    def want(self, task: JobTask, process: TaskSpec | None) -> None:
        """Sets the process that the task's slot should run; None for none."""
        slot = self._slots.get(task.task_id)
        if slot is None:
            self._slots[task.task_id] = _Slot(task, WantedProcess(1, process))
            return
        ends = () if slot.status is None else tuple(end.attempt for end in slot.status.ends)
        known = _STATUS_REQUEST if slot.status is None else slot.status.number
        slot.wanted = WantedProcess(max(slot.wanted.number, known, 0) + 1, process, ends)
        slot.sent_s = None

    def adopt(self, task: JobTask, process: TaskSpec) -> None:
        """Requests the status of a slot that should already run this process."""
        self._slots[task.task_id] = _Slot(task, WantedProcess(_STATUS_REQUEST, process))

    def update(self, status: ElasticStatus) -> None:
        slot = self._slots.get(status.task_id)
        if slot is not None and (slot.status is None or status.number >= slot.status.number):
            slot.status = status

    def send(self, now_s: float) -> None:
        for task_id, slot in list(self._slots.items()):
            if slot.task.state.is_terminal():
                del self._slots[task_id]
            elif self._is_due(slot, now_s):
                slot.sent_s = now_s
                self._outbox.append(Message(task_id, slot.wanted.encode()))

    def has_reported(self, task: JobTask) -> bool:
        slot = self._slots.get(task.task_id)
        return slot is not None and slot.status is not None

    def runs(self, task: JobTask, attempt: int) -> bool:
        """Whether the slot reports that it runs its process of this attempt."""
        slot = self._slots.get(task.task_id)
        return slot is not None and slot.status is not None and slot.status.attempt == attempt

    def is_ready(self, task: JobTask) -> bool:
        """Whether the slot can start a process immediately."""
        slot = self._slots.get(task.task_id)
        return slot is not None and slot.status is not None and slot.status.ready

    def is_empty(self, task: JobTask) -> bool:
        """Whether the slot should run nothing and has confirmed that it does not."""
        slot = self._slots.get(task.task_id)
        if slot is None or slot.wanted.task is not None or not self._has_confirmed(slot):
            return False
        return slot.status is not None and slot.status.attempt is None

    def exit_code(self, task: JobTask, attempt: int) -> int | None:
        """Exit code of the process of an attempt that was asked to end; None if unknown or still running."""
        slot = self._slots.get(task.task_id)
        ends = () if slot is None or slot.status is None else slot.status.ends
        return next((end.outcome.exit_code for end in ends if end.attempt == attempt), None)

    def clear(self) -> None:
        self._slots.clear()

    def _is_due(self, slot: _Slot, now_s: float) -> bool:
        if slot.task.state is not TaskState.RUNNING or self._has_confirmed(slot):
            return False
        return slot.sent_s is None or now_s - slot.sent_s >= RESEND_INTERVAL_S

    @staticmethod
    def _has_confirmed(slot: _Slot) -> bool:
        return slot.status is not None and slot.status.number >= slot.wanted.number
