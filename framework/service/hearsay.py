"""Ends of tasks that only the master has told of yet, whose agents still have to deliver them.

An agent sends the last status update of a task, with what the executor put into it, until it is acknowledged. The
master knows from it how the task stands; asked for that, it may answer before the update itself is here, and that
answer has neither the task's outcome nor the end of its output.
"""

from __future__ import annotations

from framework import events
from framework.job import TaskState

BELIEVED_AFTER_S = 30.0
"""An agent sends what it holds as soon as the framework is back, and what gets lost on its way 10 s later."""


class Hearsay:
    """Keeps them until the agents' own updates come, or do not come."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[events.StatusUpdate, float]] = {}

    def subscribed(self, now_s: float) -> None:
        """Agents could not deliver anything before."""
        self._kept = {task_id: (event, now_s) for task_id, (event, _) in self._kept.items()}

    def sift(self, event: events.StatusUpdate, now_s: float) -> list[events.StatusUpdate]:
        """What of a status update is to be taken in now; nothing if a better one is to come."""
        state = TaskState.of(event.state)
        if _is_answer(event) and state in (TaskState.FINISHED, TaskState.FAILED, TaskState.KILLED):
            self._kept.setdefault(event.task_id, (event, now_s))
            return []
        if not state.is_terminal() or event.task_id not in self._kept:
            return [event]
        told, _ = self._kept.pop(event.task_id)
        # Where the agent is gone with its update, it is still known how the task had ended.
        return [told if state is TaskState.LOST and "uuid" not in event.status else event]

    def believed(self, now_s: float) -> list[events.StatusUpdate]:
        """Those that have waited long enough; they are not kept any more."""
        due = [event for event, since_s in self._kept.values() if now_s - since_s >= BELIEVED_AFTER_S]
        for event in due:
            del self._kept[event.task_id]
        return due


def _is_answer(event: events.StatusUpdate) -> bool:
    return event.status.get("source") == "SOURCE_MASTER" and event.status.get("reason") == "REASON_RECONCILIATION"
