"""Placement of a job's tasks at another size: existing tasks stay, new ones go where there is room.

As in Optimus (EuroSys 2018, section 4.3), the fewest machines are used: new tasks prefer machines that the job already
uses, then those with most free CPUs; removed tasks come from the machines with the fewest tasks of the job.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dike.task import Role
from framework.mesos.offers import AgentOffer
from framework.training.launch import try_take
from framework.training.spec import JobSpec, JobTask
from solver import Plan, PlannedTask
from solver.shards import shard


@dataclass(frozen=True, order=True)
class Size:
    """A job's numbers of workers and parameter servers; without parameter servers it is one task, or a gang."""

    workers: int
    ps: int

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return f"{workers} and {self.ps} ps" if self.ps else workers


@dataclass(frozen=True)
class Layout:
    """A job at another size.

    Attributes:
        stays: id of each remaining task -> its line in the plan.
        new: lines of the plan without a task.
        surplus: ids of tasks to remove.
    """

    plan: Plan
    stays: dict[str, PlannedTask]
    new: tuple[PlannedTask, ...]
    surplus: frozenset[str]

    @property
    def size(self) -> Size:
        return Size(self.plan.option.workers, self.plan.option.ps)


def size_of(plan: Plan) -> Size:
    return Size(plan.option.workers, plan.option.ps)


def layout(
    spec: JobSpec, plan: Plan, tasks: Sequence[JobTask], size: Size, agents: Sequence[AgentOffer]
) -> Layout | None:
    """Lays the job out at another size, with tasks of the same shape; None if there is no room."""
    return _Layouter(spec, plan, tasks, agents).to(size)


def replacement(
    spec: JobSpec, plan: Plan, tasks: Sequence[JobTask], lost: JobTask, agents: Sequence[AgentOffer]
) -> Layout | None:
    """Lays the job out at the same size with another task in the place of `lost`; None if there is no room."""
    return _Layouter(spec, plan, [task for task in tasks if task is not lost], agents).to(size_of(plan), lost)


def without(spec: JobSpec, plan: Plan, tasks: Sequence[JobTask], surplus: frozenset[str]) -> Layout:
    """Lays the job out less the workers with the ids `surplus`."""
    size = dataclasses.replace(size_of(plan), workers=size_of(plan).workers - len(surplus))
    target = _Layouter(spec, plan, [task for task in tasks if task.task_id not in surplus], ()).to(size)
    # Shrinking always fits.
    assert target is not None
    return dataclasses.replace(target, surplus=surplus)


class _Layouter:
    def __init__(self, spec: JobSpec, plan: Plan, tasks: Sequence[JobTask], agents: Sequence[AgentOffer]) -> None:
        self._spec = spec
        self._plan = plan
        self._tasks = tasks
        self._here = Counter(task.agent_id for task in tasks)
        self._pools = {agent.agent_id: agent.pool for agent in agents}
        self._agents = sorted(agents, key=lambda agent: (-self._here[agent.agent_id], -agent.pool.scalar("cpus")))

    def to(self, size: Size, lost: JobTask | None = None) -> Layout | None:
        stays: dict[str, PlannedTask] = {}
        new: list[PlannedTask] = []
        chiefs = sum(task.role == Role.CHIEF for task in self._plan.tasks)
        for role, count in ((Role.PS, size.ps), (Role.WORKER, size.workers), (Role.CHIEF, chiefs)):
            staying = self._staying(role, count)
            free = [lost.planned.index] if lost is not None and lost.planned.role == role else []
            # Remaining tasks keep their order and close the gaps.
            indices = [index for index in range(len(staying) + len(free)) if index not in free]
            numbers = zip(staying, indices, strict=True)
            stays |= {task.task_id: dataclasses.replace(task.planned, index=index) for task, index in numbers}
            wanted = [*free, *range(len(staying) + len(free), count)]
            placed = self._placed(role, wanted)
            if placed is None:
                return None
            new += placed
        return Layout(
            plan=self._plan_of(size, [*stays.values(), *new]),
            stays=stays,
            new=tuple(new),
            surplus=frozenset(
                {task.task_id for task in self._tasks} - stays.keys() | ({lost.task_id} if lost else set())
            ),
        )

    def _staying(self, role: Role, count: int) -> list[JobTask]:
        tasks = sorted((t for t in self._tasks if t.planned.role == role), key=lambda task: task.planned.index)
        while len(tasks) > count:
            spare = [task for task in tasks if not self._spec.is_chief(task.planned)]
            last = min(spare, key=lambda task: (self._here[task.agent_id], -task.planned.index))
            self._here[last.agent_id] -= 1
            tasks.remove(last)
        return tasks

    def _placed(self, role: Role, indices: Collection[int]) -> list[PlannedTask] | None:
        """Places new tasks with these indices, each as large as the largest existing one; None if there is no room."""
        there = [task for task in self._plan.tasks if task.role == role]
        shape = max(there, key=lambda task: (task.gpus, task.mem_mb), default=None)
        placed: list[PlannedTask] = []
        for index in indices:
            assert shape is not None
            agent = next((agent for agent in self._agents if try_take(self._pools[agent.agent_id], shape)), None)
            if agent is None:
                return None
            placed.append(dataclasses.replace(shape, index=index, node=agent.node))
        return placed

    def _shards(self, ps: int) -> dict[str, int]:
        return shard(self._plan.profile, ps, self._spec.planning.sharding).variables

    def _plan_of(self, size: Size, tasks: Sequence[PlannedTask]) -> Plan:
        order = [Role.PS, Role.WORKER, Role.CHIEF]
        plan = self._plan
        variables = plan.variables if size.ps == plan.option.ps else self._shards(size.ps)
        return dataclasses.replace(
            plan,
            option=dataclasses.replace(plan.option, workers=size.workers, ps=size.ps),
            tasks=tuple(sorted(tasks, key=lambda task: (order.index(Role(task.role)), task.index))),
            variables=variables,
            # No bound was proven for this plan.
            optimal=False,
            gap=1.0,
        )
