"""Tasks that run and belong to no job any more: each is killed until it has ended, and its end is written down."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from framework import events
from framework.job import TaskState
from framework.mesos_calls import MesosCalls, try_now
from framework.service.journal import Journal
from framework.service.records import TaskRecord
from framework.service.seat import updated

logger = logging.getLogger(__name__)

KILL_AGAIN_S = 10.0
REMEMBERED = 10_000
"""How many lost tasks are remembered that may come back with their agents."""


class Orphans:
    """Ends them.

    Args:
        mesos: the master.
        journal: is told of tasks that nobody has ever heard of.

    Attributes:
        agents: task -> its agent, of those to be ended.
    """

    def __init__(self, mesos: MesosCalls, journal: Journal) -> None:
        self._mesos = mesos
        self._journal = journal
        self._records: dict[str, TaskRecord] = {}
        self._lost: OrderedDict[str, TaskRecord] = OrderedDict()
        self._agents: dict[str, str] = {}
        self._new: set[str] = set()
        self._killed_s = 0.0

    @property
    def agents(self) -> Mapping[str, str]:
        return self._agents

    def take_in(self, tasks: Sequence[TaskRecord]) -> None:
        """Ends tasks whose job has ended, or failed."""
        for task in tasks:
            self._records[task.task_id] = task
            self._end(task.task_id, task.agent_id)

    def may_come_back(self, task: TaskRecord) -> None:
        """A task is lost; if only its agent was cut off, it will be there again one day."""
        self._lost[task.task_id] = task
        if len(self._lost) > REMEMBERED:
            self._lost.popitem(last=False)

    def heard(self, event: events.StatusUpdate, state: TaskState) -> TaskRecord | None:
        """Takes in what Mesos says of a task that is no job's.

        Returns:
            What to write down of it; None for a task that was never written down.
        """
        task_id = event.task_id
        known = self._records.get(task_id) or self._lost.get(task_id)
        if state.is_terminal():
            self._agents.pop(task_id, None)
            self._records.pop(task_id, None)
            known = None if known is None else updated(known, event, state)
            if known is not None and state is TaskState.LOST:
                self.may_come_back(known)
            return known
        agent_id = event.status.get("agent_id", {}).get("value") or (known.agent_id if known is not None else "")
        if known is None:
            if task_id not in self._agents:
                logger.warning("task %s on agent %s is not ours: ending it", task_id, agent_id)
                self._journal.unknown(task_id, agent_id)
        else:
            self._lost.pop(task_id, None)
            known = self._records[task_id] = updated(known, event, state)
        self._end(task_id, agent_id)
        return known

    def kill(self, now_s: float) -> None:
        """Kills what is to end, and again what has not ended; there is a connection to the master."""
        again = now_s - self._killed_s >= KILL_AGAIN_S
        if again:
            self._killed_s = now_s
        for task_id in list(self._agents if again else self._new):
            if task_id in self._agents:
                try_now(self._mesos.kill, task_id, self._agents[task_id])
        self._new.clear()

    def _end(self, task_id: str, agent_id: str) -> None:
        if agent_id and task_id not in self._agents:
            self._agents[task_id] = agent_id
            self._new.add(task_id)
