"""What a job takes at least, and where it would go: asked without disturbing the job itself, from any thread."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dike.exceptions import InfeasibleError
from framework.job import JobSpec
from framework.job_plan import plan_request
from framework.offers import MIB
from framework.search.records import SearchSpec
from framework.service.agents import AgentFacts, Amounts
from framework.service.explanation import TaskNeed, describe
from framework.service.requests import SearchJobRequest, TrainingRequest
from solver import NodeClass, Plan, PlannedTask, TaskResources, make_plan, smallest_job
from solver.milp import SolverError

logger = logging.getLogger(__name__)

_RESOURCES = ("cpus", "mem", "disk", "gpus")
PLAN_TIME_LIMIT_S = 5.0
"""Nothing is launched by these plans: the first one found will do."""
KEPT = 16
"""Answers kept: the same agents are asked about again and again."""

Nodes = tuple[NodeClass, ...]
"""Agents with what there is of them for the job, each with a name of its own."""


@dataclass(frozen=True)
class Fit:
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

    def fit(self, nodes: Nodes) -> Fit:
        """Where it would start with as few tasks as it can."""


def nodes_for(sizing: Sizing, agents: Iterable[tuple[AgentFacts, Amounts]]) -> Nodes:
    """Agents as a job's sizing wants them, from what there is of them for it."""
    return tuple(
        agent.node_class(amounts) for agent, amounts in agents if amounts.get("ports", 0.0) > 0 or not sizing.is_gang
    )


class TrainingSizing:
    """Of a training job.

    Args:
        spec: the job.
    """

    is_gang = True

    def __init__(self, spec: JobSpec) -> None:
        fewest = 1 if spec.elastic is None else spec.elastic[0]
        self._spec = dataclasses.replace(
            spec, max_workers=fewest, elastic=None if spec.elastic is None else (fewest, fewest)
        )
        self._fewest = fewest
        self.needs = functools.lru_cache(KEPT)(self._needs)
        self.fit = functools.lru_cache(KEPT)(self._fit)

    def _needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        if self._spec.plan is not None:
            alike = Counter(TaskNeed(task.role, 1, *_amounts(task), ports=1) for task in self._spec.plan.tasks)
            needs = [dataclasses.replace(need, count=count) for need, count in alike.items()]
            return tuple(sorted(needs, key=lambda need: (-need.gpus, -need.cpus, -need.mem)))
        if not nodes:
            return ()
        job = smallest_job(plan_request(self._spec, nodes))
        return tuple(
            TaskNeed(name, self._fewest if name == "worker" else 1, *_amounts(task), ports=1) for name, task in job
        )

    def _fit(self, nodes: Nodes) -> Fit:
        if not nodes:
            return Fit(problem="No agent has ports, and each TensorFlow server needs one.")
        if self._spec.plan is not None:
            return _fit_plan(self._spec.plan, nodes)
        try:
            return self._planned(nodes)
        except InfeasibleError as error:
            return Fit(problem=str(error))
        except SolverError as error:
            logger.warning("it cannot be said where job %s would start: %s", self._spec.job_id, error)
            return Fit()

    def _planned(self, nodes: Nodes) -> Fit:
        needs = self._needs(nodes)
        # Whether a model fits a GPU's memory is for the planner to say.
        packed = frozenset() if any(need.gpus for need in needs) else _packed(needs, nodes)
        if packed:
            return Fit(packed)
        request = dataclasses.replace(plan_request(self._spec, nodes), time_limit_s=PLAN_TIME_LIMIT_S)
        return Fit(frozenset(task.node for task in make_plan(request).tasks))


class SearchSizing:
    """Of a search, which needs one slot to begin with.

    Args:
        spec: the search.
    """

    is_gang = False

    def __init__(self, spec: SearchSpec) -> None:
        self._spec = spec

    def needs(self, nodes: Nodes) -> tuple[TaskNeed, ...]:
        """One slot."""
        gpus = self._spec.slot_gpus
        if gpus is None:
            gpus = 1 if any(node.gpus for node in nodes) else 0
        return (TaskNeed("slot", 1, self._spec.slot_cpus, self._spec.slot_mem_mib, gpus=float(gpus)),)

    def fit(self, nodes: Nodes) -> Fit:
        """The first agent that holds a slot."""
        (slot,) = self.needs(nodes)
        short = {node.name: slot.missing(_capacity(node)) for node in nodes}
        for name, missing in short.items():
            if not missing:
                return Fit(frozenset([name]))
        if not short:
            return Fit(problem="There is no agent.")
        best = min(short, key=lambda name: max(short[name][one] / slot.amounts[one] for one in short[name]))
        lacks = describe(short[best])
        return Fit(problem=f"A slot needs {describe(slot.amounts)}, and {best}, the best agent, is {lacks} short.")


def sizing_of(request: TrainingRequest | SearchJobRequest) -> Sizing:
    """Of a job that has not been taken in yet.

    Raises:
        BadInputError: if the request contradicts itself.
    """
    if isinstance(request, SearchJobRequest):
        return SearchSizing(request.to_spec())
    return TrainingSizing(request.to_spec(job_id="job", checkpoint_dir="", bundle_url="", python=""))


def _packed(needs: Sequence[TaskNeed], nodes: Nodes) -> frozenset[str]:
    """Agents that hold these tasks, one if there is such; none if they are not found by taking what comes first."""
    tasks = [need for need in needs for _ in range(need.count)]
    for some in (*((node,) for node in nodes), nodes):
        room = {node.name: Counter(_capacity(node)) for node in some}
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


def _fit_plan(plan: Plan, nodes: Nodes) -> Fit:
    """Whether the agents of a plan have room for it."""
    room = {node.name: _capacity(node) for node in nodes}
    wanted: dict[str, Counter[str]] = {}
    for task in plan.tasks:
        wanted.setdefault(task.node, Counter()).update(dict(zip(_RESOURCES, _amounts(task), strict=True)))
    used: set[str] = set()
    for name, amounts in wanted.items():
        need = TaskNeed("", 1, *(amounts[one] for one in _RESOURCES))
        # A host name that several agents share may be followed by a part of the agent's id, here or in the plan.
        hostname = name.partition("/")[0]
        alike = [one for one in room if one.partition("/")[0] == hostname and one not in wanted.keys() - {name}]
        able = [one for one in ([name] if name in room else alike) if one not in used]
        if not able:
            return Fit(problem=f"Its plan wants agent {name}; the agents are {', '.join(sorted(room))}.")
        best = min(able, key=lambda one: len(need.missing(room[one])))
        if missing := need.missing(room[best]):
            return Fit(problem=f"Its plan wants {describe(amounts)} on {name}, which is {describe(missing)} short.")
        used.add(best)
    return Fit(frozenset(used))


def _amounts(task: PlannedTask | TaskResources) -> tuple[float, float, float, float]:
    return task.cpus, float(task.mem_mb), float(task.disk_mb), float(task.gpus)


def _capacity(node: NodeClass) -> dict[str, float]:
    amounts = (node.cpus, node.mem_bytes / MIB, node.disk_bytes / MIB, float(node.gpus))
    return dict(zip(_RESOURCES, amounts, strict=True))
