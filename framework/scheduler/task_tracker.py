"""Tracks the tasks of all jobs: owners, durable records, acknowledgements, kills of unwanted tasks."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from framework.mesos import events
from framework.mesos.driver import MesosCalls, try_call
from framework.mesos.offers import address_of
from framework.mesos.tasks import TaskState, executor_of
from framework.scheduler.job import JobEntry
from framework.scheduler.journal import Journal
from framework.scheduler.metrics import Metrics
from framework.scheduler.offer_pool import Offer
from framework.scheduler.reconciler import Reconciler
from framework.scheduler.records import INTENDED, TaskRecord

logger = logging.getLogger(__name__)

NOT_NEEDED = "its job no longer needs it"
"""Message of a task that its job ended without being asked to end itself."""
SAVE_S = 1.0
"""Interval at which jobs' states are checked for changes that no event caused."""
WITHHOLD_TIMEOUT_S = 30.0
"""Maximum wait for an agent's own update: it resends them when the framework reconnects, and lost ones 10 s later."""
KILL_RETRY_S = 5.0
MAX_LOST_TASKS = 10_000
"""Number of lost tasks that are remembered, because they may return with their agents."""


class TaskTracker:
    """Tracks the owner and the state of every task, and acknowledges its status updates."""

    def __init__(self, mesos: MesosCalls, journal: Journal, metrics: Metrics, now_s: float) -> None:
        self._mesos = mesos
        self._journal = journal
        self._metrics = metrics
        self._owners: dict[str, JobEntry] = {}
        self._executors: dict[str, JobEntry] = {}
        self._kills = KillService(mesos)
        self._orphans = Orphans(self._kills, journal)
        self._reconciler = Reconciler(mesos)
        self._filter = UpdateFilter()
        self._unsaved: dict[str, TaskRecord] = {}
        self._acknowledgements: list[dict[str, Any]] = []
        self._saved_s = now_s

    # Owners.

    def owner(self, executor_id: str) -> JobEntry | None:
        """Returns the job of an executor; None if it has no task left."""
        return self._executors.get(executor_id)

    def assign(self, entry: JobEntry, tasks: Iterable[TaskRecord]) -> None:
        """Assigns tasks to a job, which receives events about them."""
        for task in tasks:
            entry.tasks[task.task_id] = task
            self._owners[task.task_id] = entry
            self._executors[task.executor_id] = entry

    def disown(self, tasks: Sequence[TaskRecord]) -> None:
        """Kills tasks whose jobs have ended; stores their last states."""
        self._orphans.adopt(tasks)

    def remove(self, entry: JobEntry) -> None:
        """Removes a job that has ended, and kills its remaining tasks."""
        for task_id in [task_id for task_id, owner in self._owners.items() if owner is entry]:
            del self._owners[task_id]
        for executor_id in [executor_id for executor_id, owner in self._executors.items() if owner is entry]:
            del self._executors[executor_id]
        self.disown(list(entry.tasks.values()))

    # Events of tasks.

    def record_launch(
        self,
        entry: JobEntry,
        state: dict[str, Any],
        offers: Mapping[str, Sequence[Offer]],
        operations: Mapping[str, dict[str, Any]],
        now_s: float,
    ) -> list[TaskRecord]:
        """Stores the tasks that a job is about to launch."""
        tasks = _intended_tasks(entry, offers, operations)
        self._journal.record_intent(entry.job_id, tasks, state)
        entry.stored.state = state
        self.assign(entry, tasks)
        # Without an update about them, the master is asked.
        self._reconciler.mark_uncertain((task.task_id for task in tasks), now_s)
        return tasks

    def filter_update(self, event: events.StatusUpdate, now_s: float) -> list[events.StatusUpdate]:
        """Returns the updates to apply now; empty if a better one will follow (`UpdateFilter`)."""
        self._reconciler.apply_update(event.task_id, now_s)
        return self._filter.filter(event, now_s)

    def take_overdue(self, now_s: float) -> list[events.StatusUpdate]:
        """Returns withheld updates to apply now, because no better ones have arrived; the master is connected."""
        return self._filter.take_overdue(now_s)

    def apply_update(self, event: events.StatusUpdate) -> JobEntry | None:
        """Applies a status update; returns the job that has to handle it, if any."""
        entry = self._owners.get(event.task_id)
        state = TaskState.of(event.state)
        if state.is_terminal():
            self._kills.task_ended(event.task_id)
        if entry is None:
            changed = self._orphans.apply_update(event, state)
            if changed is not None:
                self._unsaved[event.task_id] = changed
            return None
        changed = entry.tasks[event.task_id] = _updated(entry.tasks[event.task_id], event, state)
        self._unsaved[event.task_id] = changed
        if state.is_terminal():
            del entry.tasks[event.task_id]
            del self._owners[event.task_id]
            if all(task.executor_id != changed.executor_id for task in entry.tasks.values()):
                del self._executors[changed.executor_id]
            if state not in (TaskState.FINISHED, TaskState.KILLED):
                self._metrics.task_failed()
            if state is TaskState.LOST:
                self._orphans.remember_lost(changed)
        entry.stored.must_save = True
        return entry

    def acknowledge(self, status: dict[str, Any]) -> None:
        """Acknowledges an update once its consequences have been stored."""
        self._acknowledgements.append(status)

    # Due by time.

    def subscribed(self, now_s: float, master_age_s: float | None) -> None:
        self._reconciler.begin([*self._owners, *self._kills.agents], now_s, master_age_s)
        self._filter.subscribed(now_s)

    def reconcile(self, now_s: float) -> None:
        """Sends reconciliation requests that are due; the master is connected."""
        self._reconciler.tick(now_s, self._agents)

    def kill_unwanted(self, jobs: Iterable[JobEntry], now_s: float) -> None:
        """Kills all tasks that their jobs do not want any more, and those that belong to no job."""
        for entry in jobs:
            if entry.tasks:
                wanted = entry.job.wanted_tasks()
                for task_id in [task_id for task_id in entry.tasks if task_id not in wanted]:
                    self._end(entry, task_id)
        self._kills.tick(now_s)

    def _agents(self) -> dict[str, str]:
        of_jobs = {task_id: entry.tasks[task_id].agent_id for task_id, entry in self._owners.items()}
        return {**self._kills.agents, **of_jobs}

    def _end(self, entry: JobEntry, task_id: str) -> None:
        if task_id in self._kills:
            return
        task = entry.tasks[task_id]
        if not entry.is_ending:
            entry.tasks[task_id] = dataclasses.replace(task, message=NOT_NEEDED)
        self._kills.end(task_id, task.agent_id)

    def must_save(self, entry: JobEntry) -> None:
        """Stores the job's state at the next `save`."""
        entry.stored.must_save = True

    def save(self, jobs: Collection[JobEntry], now_s: float, call_job: Callable[..., None]) -> None:
        """Stores changes, then acknowledges the status updates behind them."""
        check_all = now_s - self._saved_s >= SAVE_S
        if check_all:
            self._saved_s = now_s
        checked = [entry for entry in jobs if entry.stored.must_save or (check_all and entry.has_tasks)]
        states: dict[JobEntry, dict[str, Any]] = {}
        for entry in checked:
            call_job(entry, _collect_state, entry, states)
        if states or self._unsaved:
            tasks = list(self._unsaved.values())
            self._journal.record_changes(tasks, {entry.job_id: state for entry, state in states.items()})
            self._unsaved.clear()
        for entry, state in states.items():
            entry.stored.state = state
        for entry in checked:
            entry.stored.must_save = False
        for status in self._acknowledgements:
            # An agent resends updates that are not acknowledged.
            try_call(self._mesos.acknowledgeStatusUpdate, status)
        self._acknowledgements.clear()


class KillService:
    """Kills unwanted tasks, repeatedly until they have ended."""

    def __init__(self, mesos: MesosCalls) -> None:
        self._mesos = mesos
        self._agents: dict[str, str] = {}
        self._due_s: dict[str, float] = {}

    def __contains__(self, task_id: str) -> bool:
        """Whether a task is being killed."""
        return task_id in self._agents

    @property
    def agents(self) -> Mapping[str, str]:
        """Task -> its agent, of those being killed."""
        return self._agents

    def end(self, task_id: str, agent_id: str) -> None:
        """Starts killing a task. If it was never launched, the master reports that."""
        self._agents.setdefault(task_id, agent_id)
        self._due_s.setdefault(task_id, 0.0)

    def task_ended(self, task_id: str) -> None:
        """Stops killing a task."""
        self._agents.pop(task_id, None)
        self._due_s.pop(task_id, None)

    def tick(self, now_s: float) -> None:
        """Sends the kills that are due; the master is connected."""
        for task_id in [task_id for task_id, due_s in self._due_s.items() if now_s >= due_s]:
            self._due_s[task_id] = now_s + KILL_RETRY_S
            try_call(self._mesos.kill, task_id, self._agents[task_id])


class Orphans:
    """Tasks without a job, which are all killed."""

    def __init__(self, kills: KillService, journal: Journal) -> None:
        self._kills = kills
        self._journal = journal
        self._records: dict[str, TaskRecord] = {}
        self._lost: OrderedDict[str, TaskRecord] = OrderedDict()

    def adopt(self, tasks: Iterable[TaskRecord]) -> None:
        """Kills tasks whose job has ended."""
        for task in tasks:
            self._records[task.task_id] = task
            self._kills.end(task.task_id, task.agent_id)

    def remember_lost(self, task: TaskRecord) -> None:
        """Remembers a lost task, which will return if only its agent was disconnected."""
        self._lost[task.task_id] = task
        if len(self._lost) > MAX_LOST_TASKS:
            self._lost.popitem(last=False)

    def apply_update(self, event: events.StatusUpdate, state: TaskState) -> TaskRecord | None:
        """Applies an update about a task without a job; returns its changed record, None if it was never stored."""
        task_id = event.task_id
        known = self._records.get(task_id) or self._lost.get(task_id)
        if state.is_terminal():
            self._records.pop(task_id, None)
            known = None if known is None else _updated(known, event, state)
            if known is not None and state is TaskState.LOST:
                self.remember_lost(known)
            return known
        agent_id = event.status.get("agent_id", {}).get("value") or (known.agent_id if known is not None else "")
        if known is not None:
            self._lost.pop(task_id, None)
            known = self._records[task_id] = _updated(known, event, state)
        elif task_id not in self._kills:
            logger.warning("task %s on agent %s belongs to no job; killing it", task_id, agent_id)
            self._journal.record_unknown_task(task_id, agent_id)
        if agent_id:
            self._kills.end(task_id, agent_id)
        return known


class UpdateFilter:
    """Withholds terminal updates that the master reports before the agent has delivered them.

    An agent resends a task's last status update, including the executor's data, until it is acknowledged. The master's
    answer to a reconciliation may arrive earlier, without the task's outcome and the end of its output.
    """

    def __init__(self) -> None:
        self._withheld: dict[str, tuple[events.StatusUpdate, float]] = {}

    def subscribed(self, now_s: float) -> None:
        """Restarts the timeouts: agents could not deliver anything before."""
        self._withheld = {task_id: (event, now_s) for task_id, (event, _) in self._withheld.items()}

    def filter(self, event: events.StatusUpdate, now_s: float) -> list[events.StatusUpdate]:
        """Returns the updates to apply now; empty if a better one will follow."""
        state = TaskState.of(event.state)
        if _is_answer(event) and state in (TaskState.FINISHED, TaskState.FAILED, TaskState.KILLED):
            self._withheld.setdefault(event.task_id, (event, now_s))
            return []
        if not state.is_terminal() or event.task_id not in self._withheld:
            return [event]
        answer, _ = self._withheld.pop(event.task_id)
        # If the agent is lost with its update, the master's answer is still right about the end.
        return [answer if state is TaskState.LOST and "uuid" not in event.status else event]

    def take_overdue(self, now_s: float) -> list[events.StatusUpdate]:
        """Removes and returns updates whose timeout has elapsed."""
        due = [event for event, since_s in self._withheld.values() if now_s - since_s >= WITHHOLD_TIMEOUT_S]
        for event in due:
            del self._withheld[event.task_id]
        return due


def _collect_state(entry: JobEntry, states: dict[JobEntry, dict[str, Any]]) -> None:
    state = entry.job.to_state()
    if state != entry.stored.state:
        states[entry] = state


def _intended_tasks(
    entry: JobEntry, offers: Mapping[str, Sequence[Offer]], operations: Mapping[str, dict[str, Any]]
) -> list[TaskRecord]:
    """Returns records of the tasks that operations launch."""
    executors = {task.executor_id for task in entry.tasks.values()}
    tasks = []
    for agent, operation in operations.items():
        for info in operation["launch"]["task_infos"]:
            executor_id = executor_of(info)
            own = () if executor_id in executors else info.get("executor", {}).get("resources", ())
            executors.add(executor_id)
            tasks.append(
                TaskRecord(
                    task_id=info["task_id"]["value"],
                    job_id=entry.job_id,
                    agent_id=agent,
                    node=offers[agent][0]["hostname"],
                    address=address_of(offers[agent][0]),
                    name=info["name"].rpartition(f"{entry.job_id} ")[2],
                    state=INTENDED,
                    resources=_amounts([*info.get("resources", ()), *own]),
                    launched_s=time.time(),
                    executor_id=executor_id,
                )
            )
    return tasks


def _updated(task: TaskRecord, event: events.StatusUpdate, state: TaskState) -> TaskRecord:
    """Returns the record after a status update."""
    is_ours = task.message == NOT_NEEDED and state in (TaskState.KILLING, TaskState.KILLED)
    return dataclasses.replace(
        task,
        state=event.state.removeprefix("TASK_").lower(),
        message=NOT_NEEDED if is_ours else str(event.status.get("message", "")),
        ended_s=time.time() if state.is_terminal() else None,
    )


def _amounts(pieces: Iterable[dict[str, Any]]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    for piece in pieces:
        if "scalar" in piece:
            amounts[piece["name"]] = round(amounts.get(piece["name"], 0.0) + float(piece["scalar"]["value"]), 3)
        elif piece["name"] == "ports":
            count = sum(int(one["end"]) - int(one["begin"]) + 1 for one in piece["ranges"]["range"])
            amounts["ports"] = amounts.get("ports", 0.0) + count
    return amounts


def _is_answer(event: events.StatusUpdate) -> bool:
    return event.status.get("source") == "SOURCE_MASTER" and event.status.get("reason") == "REASON_RECONCILIATION"
