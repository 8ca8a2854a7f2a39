"""Asks the master how tasks stand: all after a subscription until each has answered, later those that are in mark_uncertain.

Explicit reconciliation names tasks; only so the master tells which it does not know. Implicit reconciliation makes it
name all tasks of ours, and so those that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from framework.mesos.driver import MesosCalls, try_call

RECONCILE_AFTER_S = 15.0
"""How old a master has to be: one that has just started knows no agents yet, and would call their tasks lost."""
INITIAL_RETRY_S = RECONCILE_AFTER_S + 5.0
"""How long a task's state may stay unknown, and how soon it is asked for again; then twice as long each time, up to"""
MAX_RETRY_INTERVAL_S = 120.0
IMPLICIT_DEADLINE_S = 60.0
"""After so long the rest is asked for, answers or not."""
RECONCILE_INTERVAL_S = 900.0
"""How often all tasks are asked for when nothing happens."""


@dataclass
class _Query:
    """A task of which nothing has been heard.

    Attributes:
        due_s: when the master is asked next.
        interval_s: how long until it is asked once more.
    """

    due_s: float
    interval_s: float = INITIAL_RETRY_S


class Reconciler:
    """Puts the questions to the master that are due.

    Args:
        mesos: the master.
    """

    def __init__(self, mesos: MesosCalls) -> None:
        self._mesos = mesos
        self._uncertain: dict[str, _Query] = {}
        self._unanswered: set[str] = set()
        self._settled_s = 0.0
        self._implicit_due_s = 0.0
        self._full_due_s = 0.0

    def begin(self, task_ids: Iterable[str], now_s: float, master_age_s: float | None) -> None:
        """The master has taken us in.

        Args:
            task_ids: tasks that may run.
            now_s: the time.
            master_age_s: for how long it has been the leading one; None where that is not known.
        """
        self._settled_s = now_s + max(0.0, RECONCILE_AFTER_S - (master_age_s or 0.0))
        self._uncertain = {task_id: _Query(self._settled_s) for task_id in task_ids}
        self._unanswered = set(self._uncertain)
        self._implicit_due_s = now_s + IMPLICIT_DEADLINE_S if self._unanswered else self._settled_s
        self._full_due_s = now_s + RECONCILE_INTERVAL_S

    def mark_uncertain(self, task_ids: Iterable[str], now_s: float) -> None:
        """The master has been asked to launch these; it is not known whether it has."""
        self._uncertain.update({task_id: _Query(now_s + INITIAL_RETRY_S) for task_id in task_ids})

    def apply_update(self, task_id: str, now_s: float) -> None:
        """A task's state has come."""
        self._uncertain.pop(task_id, None)
        if task_id in self._unanswered:
            self._unanswered.discard(task_id)
            if not self._unanswered:
                self._implicit_due_s = min(self._implicit_due_s, max(now_s, self._settled_s))

    def tick(self, now_s: float, agents: Callable[[], Mapping[str, str]]) -> None:
        """Asks what is to be asked now.

        Args:
            now_s: the time; there is a connection to the master.
            agents: says of all tasks that may run on which agent each is.
        """
        due = {task_id for task_id, question in self._uncertain.items() if now_s >= question.due_s}
        for task_id in due:
            question = self._uncertain[task_id]
            question.due_s = now_s + question.interval_s
            question.interval_s = min(2 * question.interval_s, MAX_RETRY_INTERVAL_S)
        is_everything = now_s >= self._full_due_s
        if is_everything:
            self._full_due_s = now_s + RECONCILE_INTERVAL_S
        if due or is_everything:
            asked = {task_id: agent for task_id, agent in agents().items() if is_everything or task_id in due}
            if asked:
                try_call(self._mesos.reconcile, asked)
        if now_s >= self._implicit_due_s:
            self._implicit_due_s = now_s + RECONCILE_INTERVAL_S
            try_call(self._mesos.reconcile, {})
