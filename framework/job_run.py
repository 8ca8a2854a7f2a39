"""What runs of a job at the moment."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from framework.job import JobSpec, JobTask, TaskState
from solver import Plan


class Phase(enum.StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    """Collecting offers."""
    RUNNING = "running"
    """All tasks launched."""
    STOPPING = "stopping"
    """Ending what still runs, to restart or to finish."""
    DONE = "done"


@dataclass
class JobRun:
    """The current attempt, shared by all that start and end tasks of the job.

    Attributes:
        attempt: how many times the job was started before, at any size.
        serial: number of the next launch, part of its tasks' ids.
        plan: what is followed; None before the first plan.
        tasks: id -> task, those that are not part of the attempt too (`JobTask.member`).
        cluster: role -> addresses, in the order of the index.
        used_ports: ports that failed before, to be taken only if there is no other.
    """

    attempt: int = 0
    serial: int = 0
    plan: Plan | None = None
    tasks: dict[str, JobTask] = field(default_factory=dict)
    cluster: dict[str, list[str]] = field(default_factory=dict)
    used_ports: set[int] = field(default_factory=set)

    @property
    def members(self) -> list[JobTask]:
        """The tasks of the attempt, in the order of the plan."""
        return [task for task in self.tasks.values() if task.member]

    def live(self) -> dict[str, str]:
        """Task -> agent of all that have not ended."""
        return {task.task_id: task.agent_id for task in self.tasks.values() if not task.state.is_terminal()}

    def forget_unlaunched(self, launched: Collection[str]) -> None:
        """Takes in that of the tasks that have not ended only these were ever launched."""
        for task_id in self.live().keys() - set(launched):
            task = self.tasks[task_id]
            task.state, task.message = TaskState.LOST, "it was never launched, or has ended while no service was there"
            if not task.member:
                del self.tasks[task_id]

    def script_has_ended(self, spec: JobSpec) -> bool:
        """Whether all who run the script have ended well."""
        return all(task.finished for task in self.members if spec.computes(task.planned))

    def clear(self) -> None:
        """The attempt is over, and another one will come."""
        self.attempt += 1
        for task in self.members:
            task.member = False
        self.tasks = {}

    def sort(self) -> None:
        """Brings the tasks of the attempt into the plan's order, the others behind them."""
        assert self.plan is not None
        place = {planned.name: number for number, planned in enumerate(self.plan.tasks)}
        self.tasks = dict(
            sorted(self.tasks.items(), key=lambda item: place[item[1].name] if item[1].member else len(place))
        )

    def add(self, tasks: Iterable[JobTask]) -> None:
        """Takes tasks in that one launch has started."""
        self.tasks.update({task.task_id: task for task in tasks})
        self.serial += 1
