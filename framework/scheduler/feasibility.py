"""The fit check: what a job takes at least, and where it would start, without disturbing the job itself."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from framework.mesos.offers import MIB
from framework.scheduler.agents import AgentFacts
from framework.scheduler.amounts import SCALARS, Amounts
from framework.scheduler.records import TaskNeed
from solver import NodeClass

logger = logging.getLogger(__name__)

CACHE_SIZE = 512
"""Answers remembered, for different jobs and agents: more than it takes to find the victims for one job."""
PLANNING_BUDGET_S = 0.5
"""Plans that have taken so long together are not followed by another one at once: the loop has other things to do."""
PLANNING_COOLDOWN_FACTOR = 10
"""So many times as long as plans take beyond that nothing is planned then."""

Nodes = tuple[NodeClass, ...]
"""Agents with what there is of them for the job, each with a name of its own."""


@dataclass(frozen=True)
class FitResult:
    """Whether a job has room.

    Attributes:
        nodes: names of the agents it would go to; empty if it has no room, or that is not known.
        problem: what is missing, in one sentence; empty if it has room, or that is not known.
    """

    nodes: frozenset[str] = frozenset()
    problem: str = ""


class Sizing(Protocol):
    """What is known of a job's size before it runs."""

    @property
    def is_gang(self) -> bool:
        """Whether it starts with several tasks at the same time, each of which needs a port."""

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        """The smallest tasks with which it would start on a cluster of these agents, the most demanding first."""

    def fit(self, nodes: Nodes) -> FitResult:
        """Where it would start with as few tasks as it can."""


def nodes_for(sizing: Sizing, agents: Iterable[tuple[AgentFacts, Amounts]]) -> Nodes:
    """Agents as a job's sizing wants them, from what there is of them for it."""
    return tuple(
        agent.node_class(amounts) for agent, amounts in agents if amounts.get("ports", 0.0) > 0 or not sizing.is_gang
    )


def first_fit(needs: Sequence[TaskNeed], nodes: Nodes) -> frozenset[str]:
    """Agents that hold these tasks, one if there is such; none if they are not found by taking what comes first."""
    tasks = [need for need in needs for _ in range(need.count)]
    for some in (*((node,) for node in nodes), nodes):
        room = {node.name: Counter(capacity(node)) for node in some}
        used = set()
        for task in tasks:
            alone = dataclasses.replace(task, ports=0)
            name = next((name for name, left in room.items() if not alone.missing(left)), None)
            if name is None:
                break
            room[name].subtract(alone.amounts)
            used.add(name)
        else:
            return frozenset(used)
    return frozenset()


def first_unplaced(needs: Sequence[TaskNeed], room: Mapping[str, dict[str, float]]) -> TaskNeed | None:
    """The first of these tasks that has no room any more; None if all have it, taking what comes first.

    Args:
        needs: the tasks.
        room: agent -> what is free there; what the tasks take is subtracted.
    """
    for task in (need for need in needs for _ in range(need.count)):
        free = next((free for free in room.values() if not task.missing(free)), None)
        if free is None:
            return task
        for name, amount in task.amounts.items():
            free[name] -= amount
    return None


def capacity(node: NodeClass) -> dict[str, float]:
    amounts = (node.cpus, node.mem_bytes / MIB, node.disk_bytes / MIB, float(node.gpus))
    return dict(zip(SCALARS, amounts, strict=True))


class FitCache:
    """Answers of jobs' sizings, one for jobs that are alike, within a budget of time: the loop waits for them.

    Args:
        clock: seconds, monotonic; tells how long planning took.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, FitResult] = OrderedDict()
        self._failed: set[str] = set()
        self._spent_s = 0.0
        self._counted_s = clock()

    def fit(self, job_id: str, sizing: Sizing, kind: Hashable, nodes: Nodes) -> FitResult | None:
        """Where a job would start on these agents.

        Args:
            job_id: which job.
            sizing: what it takes.
            kind: jobs of equal kinds have the same answer; None for one like no other.
            nodes: the agents.

        Returns:
            Nowhere if its sizing raises; None if there is no time now.
        """
        key = (job_id if kind is None else (kind,), nodes)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        began_s = self._clock()
        self._spent_s = max(0.0, self._spent_s - (began_s - self._counted_s) / PLANNING_COOLDOWN_FACTOR)
        self._counted_s = began_s
        if self._spent_s >= PLANNING_BUDGET_S:
            return None
        fit = self._known[key] = self._ask(job_id, sizing, nodes)
        self._counted_s = self._clock()
        self._spent_s += self._counted_s - began_s
        if len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)
        return fit

    def keep_only(self, job_ids: set[str]) -> None:
        """Only these jobs are left."""
        self._failed &= job_ids

    def _ask(self, job_id: str, sizing: Sizing, nodes: Nodes) -> FitResult:
        try:
            return sizing.fit(nodes)
        except Exception as error:
            # Whatever is wrong with one job is for itself to find out when it plans; the others go on.
            if job_id not in self._failed:
                self._failed.add(job_id)
                logger.warning("it cannot be said where job %s would start: %r", job_id, error, exc_info=True)
            return FitResult()
