"""One change of a running job's size, from the launch of additional tasks to the first step of the new attempt.

Additional tasks warm up while the job trains. Then the chief saves and ends, then all other processes end, then every
remaining slot starts its process of the next attempt. Attempts are numbered and a slot starts each at most once, so
two attempts never run at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from framework.mesos.offers import AgentOffer
from framework.mesos.tasks import TaskState
from framework.training.elastic.layout import Layout, size_of
from framework.training.elastic.phases import Event, Phase, SizePhase
from framework.training.elastic.slots import ElasticSlots
from framework.training.launch import cluster_spec, launch_operation, place, task_spec
from framework.training.spec import JobSpec, JobTask, Resize
from framework.training.state import JobRun

WARM_UP_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0
"""Maximum time for a process to save and end; its slot kills it earlier."""


def additional_tasks(
    spec: JobSpec, run: JobRun, target: Layout, agents: Sequence[AgentOffer]
) -> tuple[list[JobTask], dict[str, dict[str, Any]]]:
    """Creates the tasks that a change of size adds, and by agent the operations that launch them.

    Raises:
        DoesNotFitError: there is no room for them.
    """
    wanted = dataclasses.replace(target.plan, tasks=target.new)
    new = place(spec, wanted, agents, run.serial, run.used_ports, run.members, run.executors)
    cluster = _next_cluster(run, target, new)
    for task in new:
        task.member = False
    operations = {}
    for agent in agents:
        here = [task for task in new if task.agent_id == agent.agent_id]
        if here:
            operations[agent.agent_id] = launch_operation(
                spec, target.plan, here, cluster, agent, run.attempt + 1, executors=run.executors, standby=True
            )
    return new, operations


def _next_cluster(run: JobRun, target: Layout, new: Sequence[JobTask]) -> dict[str, list[str]]:
    stay = [
        dataclasses.replace(task, planned=target.stays[task.task_id])
        for task in run.members
        if task.task_id in target.stays
    ]
    return cluster_spec([*stay, *new])


class RunningResize:
    """Carries out one change.

    Args:
        run: its current attempt; becomes the next one.
        size: the phase of the job's size.
        new: the additional tasks, already launched.
        reason: shown to the user.

    Attributes:
        stopped_s: when the chief was asked to stop.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: JobRun,
        slots: ElasticSlots,
        size: SizePhase,
        target: Layout,
        new: Sequence[JobTask],
        reason: str,
    ) -> None:
        self._spec = spec
        self._run = run
        self._slots = slots
        self._size = size
        self.target = target
        self.new = new
        self.reason = reason
        assert run.plan is not None
        self.before = size_of(run.plan)
        self.stopped_s = 0.0
        for task in new:
            slots.want(task, None)

    @property
    def has_begun(self) -> bool:
        """Whether processes of the job have been asked to stop."""
        return self._size.phase is not Phase.WARMING

    def failure(self, now_s: float) -> str:
        """What timed out, or which additional task ended too late to be left out; empty if nothing did."""
        phase, waited_s = self._size.phase, now_s - self._size.since_s
        is_stopping = phase in (Phase.SAVING, Phase.CLEARING)
        if is_stopping:
            dead = next((task for task in self.new if task.state.is_terminal()), None)
            if dead is not None:
                return f"{dead.failure}{dead.output_location}"
        if phase is Phase.CLEARING:
            ended = next((task for task in self._run.members if task.state.is_terminal()), None)
            if ended is not None:
                return f"{ended.name} ended while the job changed its size"
        if phase is Phase.WARMING and waited_s > WARM_UP_TIMEOUT_S:
            return f"the additional tasks were not ready within {WARM_UP_TIMEOUT_S:g} s"
        if is_stopping and waited_s > STOP_TIMEOUT_S:
            return f"the job's processes did not end within {STOP_TIMEOUT_S:g} s"
        return ""

    @property
    def late(self) -> list[JobTask]:
        return [task for task in self.new if not self._is_ready(task)]

    @property
    def script_has_ended(self) -> bool:
        """Whether the chief's script finished just when it was asked to stop."""
        chief = self.chief
        return self._size.phase is Phase.SAVING and self._slots.exit_code(chief, self._run.attempt) == 0

    def advance(self, now_s: float) -> None:
        """Enters the next phase if possible."""
        phase = self._size.phase
        if phase is Phase.WARMING and not self.late:
            self.stopped_s = now_s
            self._slots.want(self.chief, None)
            self._size.happened(Event.READY, now_s)
        elif phase is Phase.SAVING and self._slots.is_empty(self.chief):
            # Not before: a synchronous chief needs the others to end its step. Workers of a gang end by themselves.
            for task in self._run.members:
                if task is not self.chief:
                    self._slots.want(task, None)
            self._size.happened(Event.SAVED, now_s)
        elif phase is Phase.CLEARING and all(self._slots.is_empty(task) for task in self._run.members):
            self._start_next_attempt()
            self._size.happened(Event.CLEARED, now_s)

    def complete(self, saved_step: int, now_s: float) -> Resize:
        """Summarizes the change after the next attempt's first step."""
        before, after = self.before, self.target.size
        cost_s = round(now_s - self.stopped_s, 3)
        return Resize(before.workers, before.ps, after.workers, after.ps, self.reason, saved_step, cost_s)

    def abandon(self) -> None:
        for task in self.new:
            task.stop_requested = True

    @property
    def chief(self) -> JobTask:
        return next(task for task in self._run.members if self._spec.is_chief(task.planned))

    def _is_ready(self, task: JobTask) -> bool:
        return task.state is TaskState.RUNNING and self._slots.is_ready(task)

    def _start_next_attempt(self) -> None:
        run, target = self._run, self.target
        run.attempt += 1
        run.plan = target.plan
        for task in run.members:
            if task.task_id in target.surplus:
                task.member = False
                task.stop_requested = True
            else:
                task.planned = target.stays[task.task_id]
        for task in self.new:
            task.member = True
        run.sort()
        run.cluster = cluster_spec(run.members)
        for task in run.members:
            self._slots.want(task, task_spec(self._spec, target.plan, task.planned, run.cluster, run.attempt))
