"""Predicts what a job needs at least and where it would start, without calling the job itself."""

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

FIT_CACHE_SIZE = 512
"""Number of cached answers: more than are needed to find the victims for one job."""
PLANNING_BUDGET_S = 0.5
"""Planning time after which no further plan is computed until the loop has caught up."""
PLANNING_COOLDOWN_FACTOR = 10
"""Planning pauses for this multiple of the time that plans took beyond the budget."""

Nodes = tuple[NodeClass, ...]
"""Agents with the resources that the job may use; each name is unique."""


@dataclass(frozen=True)
class FitResult:
    """Whether and where a job fits.

    Attributes:
        nodes: names of the agents that it would use; empty if it does not fit, or that is unknown.
        problem: missing resources, in one sentence; empty if it fits, or that is unknown.
    """

    nodes: frozenset[str] = frozenset()
    problem: str = ""


class Sizing(Protocol):
    """Minimum size of a job, known before it runs."""

    @property
    def is_gang(self) -> bool:
        """Whether it starts with several tasks at the same time, each of which needs a port."""

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        """Returns the smallest tasks with which it would start on these agents, the most demanding first."""

    def fit(self, nodes: Nodes) -> FitResult:
        """Returns where it would start with its minimum number of tasks."""


def nodes_for(sizing: Sizing, agents: Iterable[tuple[AgentFacts, Amounts]]) -> Nodes:
    """Converts agents with these amounts to nodes; skips agents without ports if the job needs ports."""
    return tuple(
        agent.node_class(amounts) for agent, amounts in agents if amounts.get("ports", 0.0) > 0 or not sizing.is_gang
    )


def first_fit(needs: Sequence[TaskNeed], nodes: Nodes) -> frozenset[str]:
    """Returns agents for these tasks by first fit, one agent if possible; empty if there are none. Ignores ports."""
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
    """Returns the first of these tasks that first fit cannot place; None if it places all.

    Args:
        needs: the tasks.
        room: agent -> free amounts; the tasks' amounts are subtracted.
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
    """Caches the answers of jobs' sizings by equivalence class. Limits planning time, because the loop waits for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, FitResult] = OrderedDict()
        self._failed: set[str] = set()
        self._spent_s = 0.0
        self._counted_s = clock()

    def fit(self, job_id: str, sizing: Sizing, kind: Hashable, nodes: Nodes) -> FitResult | None:
        """Returns where a job would start on these agents.

        Args:
            job_id: the job.
            sizing: its sizing.
            kind: its `Job.equivalence_class`; None if unique.
            nodes: the agents.

        Returns:
            An empty result if its sizing raises; None if the time budget is exhausted.
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
        fit = self._known[key] = self._compute(job_id, sizing, nodes)
        self._counted_s = self._clock()
        self._spent_s += self._counted_s - began_s
        if len(self._known) > FIT_CACHE_SIZE:
            self._known.popitem(last=False)
        return fit

    def keep_only(self, job_ids: set[str]) -> None:
        """Drops what is stored about other jobs."""
        self._failed &= job_ids

    def _compute(self, job_id: str, sizing: Sizing, nodes: Nodes) -> FitResult:
        try:
            return sizing.fit(nodes)
        except Exception as error:
            # The job itself will raise the error when it plans; other jobs are not affected.
            if job_id not in self._failed:
                self._failed.add(job_id)
                logger.warning("cannot predict where job %s would start: %r", job_id, error, exc_info=True)
            return FitResult()
