"""What the slots of an elastic job are to run, and what they say they do."""

from __future__ import annotations

from dataclasses import dataclass

from dike.task import TaskSpec
from executor.elastic_messages import ElasticStatus, WantedProcess
from framework.mesos.tasks import TaskState
from framework.scheduler.job import Message
from framework.training.spec import JobTask

REPEAT_S = 1.0
"""How often a slot is sent what it is to run until it has answered."""
_UNKNOWN = -1
"""Older than all that a slot was ever sent: it answers and does not obey."""


@dataclass
class _Slot:
    task: JobTask
    wanted: WantedProcess
    status: ElasticStatus | None = None
    sent_s: float | None = None


class ElasticSlots:
    """Sends slots what they are to run until they confirm it; one entry for each that was ever sent anything.

    Args:
        outbox: gets the messages for executors, which are delivered or not.
    """

    def __init__(self, outbox: list[Message]) -> None:
        self._outbox = outbox
        self._slots: dict[str, _Slot] = {}

    def want(self, task: JobTask, process: TaskSpec | None) -> None:
        """Wants this process in the task's slot; None: none at all."""
        slot = self._slots.get(task.task_id)
        if slot is None:
            self._slots[task.task_id] = _Slot(task, WantedProcess(1, process))
            return
        ends = () if slot.status is None else tuple(end.attempt for end in slot.status.ends)
        known = _UNKNOWN if slot.status is None else slot.status.number
        slot.wanted = WantedProcess(max(slot.wanted.number, known, 0) + 1, process, ends)
        slot.sent_s = None

    def adopt(self, task: JobTask, process: TaskSpec) -> None:
        """The task's slot should run this process already, and is to say so."""
        self._slots[task.task_id] = _Slot(task, WantedProcess(_UNKNOWN, process))

    def update(self, status: ElasticStatus) -> None:
        """A slot has reported its status."""
        slot = self._slots.get(status.task_id)
        if slot is not None and (slot.status is None or status.number >= slot.status.number):
            slot.status = status

    def send(self, now_s: float) -> None:
        """Sends what slots do not know yet."""
        for task_id, slot in list(self._slots.items()):
            if slot.task.state.is_terminal():
                del self._slots[task_id]
            elif self._is_due(slot, now_s):
                slot.sent_s = now_s
                self._outbox.append(Message(task_id, slot.wanted.encode()))

    def has_reported(self, task: JobTask) -> bool:
        """Whether the slot has reported its status."""
        slot = self._slots.get(task.task_id)
        return slot is not None and slot.status is not None

    def runs(self, task: JobTask, attempt: int) -> bool:
        """Whether the slot says that it runs its process of an attempt."""
        slot = self._slots.get(task.task_id)
        return slot is not None and slot.status is not None and slot.status.attempt == attempt

    def is_ready(self, task: JobTask) -> bool:
        """Whether the slot can start a process at once."""
        slot = self._slots.get(task.task_id)
        return slot is not None and slot.status is not None and slot.status.ready

    def is_empty(self, task: JobTask) -> bool:
        """Whether the slot is to run nothing, and runs nothing."""
        slot = self._slots.get(task.task_id)
        if slot is None or slot.wanted.task is not None or not self._has_confirmed(slot):
            return False
        return slot.status is not None and slot.status.attempt is None

    def exit_code(self, task: JobTask, attempt: int) -> int | None:
        """How the process of an attempt ended that was told to; None if it has not, or nobody could tell."""
        slot = self._slots.get(task.task_id)
        ends = () if slot is None or slot.status is None else slot.status.ends
        return next((end.outcome.exit_code for end in ends if end.attempt == attempt), None)

    def clear(self) -> None:
        """The tasks are being killed."""
        self._slots.clear()

    def _is_due(self, slot: _Slot, now_s: float) -> bool:
        if slot.task.state is not TaskState.RUNNING or self._has_confirmed(slot):
            return False
        return slot.sent_s is None or now_s - slot.sent_s >= REPEAT_S

    @staticmethod
    def _has_confirmed(slot: _Slot) -> bool:
        return slot.status is not None and slot.status.number >= slot.wanted.number
