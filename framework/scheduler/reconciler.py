"""Reconciles task states with the master: all tasks after a subscription, uncertain ones later.

Explicit reconciliation names tasks; only then does the master report the unknown ones. Implicit reconciliation makes it
report all tasks of the framework, including those that no job knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from framework.mesos.driver import MesosCalls, try_call

RECONCILE_AFTER_S = 15.0
"""Minimum age of a leader: a new one does not know its agents yet, and would report their tasks as lost."""
INITIAL_RETRY_S = RECONCILE_AFTER_S + 5.0
"""Delay of the first request for an uncertain task, and of its first repetition; doubles each time up to
MAX_RETRY_INTERVAL_S.
"""
MAX_RETRY_INTERVAL_S = 120.0
IMPLICIT_DEADLINE_S = 60.0
"""Maximum delay of the implicit reconciliation after a subscription, if tasks are still unanswered."""
RECONCILE_INTERVAL_S = 900.0
"""Interval of periodic reconciliations of all tasks."""


@dataclass
class _Query:
    """A task whose state is uncertain.

    Attributes:
        due_s: time of the next request.
        interval_s: delay of the request after that.
    """

    due_s: float
    interval_s: float = INITIAL_RETRY_S


class Reconciler:
    """Sends reconciliation requests when they are due."""

    def __init__(self, mesos: MesosCalls) -> None:
        self._mesos = mesos
        self._uncertain: dict[str, _Query] = {}
        self._unanswered: set[str] = set()
        self._settled_s = 0.0
        self._implicit_due_s = 0.0
        self._full_due_s = 0.0

    def begin(self, task_ids: Iterable[str], now_s: float, master_age_s: float | None) -> None:
        """Schedules the reconciliation of all tasks after a subscription.

        Args:
            task_ids: tasks that may run.
            now_s: the time.
            master_age_s: seconds since the master was elected; None if unknown.
        """
        self._settled_s = now_s + max(0.0, RECONCILE_AFTER_S - (master_age_s or 0.0))
        self._uncertain = {task_id: _Query(self._settled_s) for task_id in task_ids}
        self._unanswered = set(self._uncertain)
        self._implicit_due_s = now_s + IMPLICIT_DEADLINE_S if self._unanswered else self._settled_s
        self._full_due_s = now_s + RECONCILE_INTERVAL_S

    def mark_uncertain(self, task_ids: Iterable[str], now_s: float) -> None:
        """Marks tasks whose launch was requested but not confirmed."""
        self._uncertain.update({task_id: _Query(now_s + INITIAL_RETRY_S) for task_id in task_ids})

    def apply_update(self, task_id: str, now_s: float) -> None:
        """Notes that an update of a task has arrived."""
        self._uncertain.pop(task_id, None)
        if task_id in self._unanswered:
            self._unanswered.discard(task_id)
            if not self._unanswered:
                self._implicit_due_s = min(self._implicit_due_s, max(now_s, self._settled_s))

    def tick(self, now_s: float, agents: Callable[[], Mapping[str, str]]) -> None:
        """Sends the requests that are due."""
        due = {task_id for task_id, query in self._uncertain.items() if now_s >= query.due_s}
        for task_id in due:
            query = self._uncertain[task_id]
            query.due_s = now_s + query.interval_s
            query.interval_s = min(2 * query.interval_s, MAX_RETRY_INTERVAL_S)
        is_full = now_s >= self._full_due_s
        if is_full:
            self._full_due_s = now_s + RECONCILE_INTERVAL_S
        if due or is_full:
            asked = {task_id: agent for task_id, agent in agents().items() if is_full or task_id in due}
            if asked:
                try_call(self._mesos.reconcile, asked)
        if now_s >= self._implicit_due_s:
            self._implicit_due_s = now_s + RECONCILE_INTERVAL_S
            try_call(self._mesos.reconcile, {})
