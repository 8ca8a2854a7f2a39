"""A job's plan for what is on offer and what it launches, or the reason why it has to wait."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dike.exceptions import InfeasibleError
from framework.mesos.offers import NO_OFFER, NO_OFFER_S, AgentOffer, cluster_of, describe_free, describe_offers
from framework.scheduler.agents import AllAgents
from framework.scheduler.amounts import SCALARS, describe
from framework.scheduler.background import Background
from framework.scheduler.feasibility import Fit, Nodes, capacity, packed
from framework.scheduler.job import LOOK_AGAIN_S, Decline, Later
from framework.scheduler.records import TaskNeed
from framework.training.elastic.layout import Size, layout
from framework.training.launch import DoesNotFitError, cluster_spec, launch_operation, place
from framework.training.observer import JobObserver
from framework.training.spec import JobSpec, JobTask
from framework.training.state import JobRun
from solver import NodeClass, Plan, PlannedTask, PlanRequest, TaskResources, make_plan, smallest_job
from solver.deadline import plan_with_timeout
from solver.milp import SolverError

CACHE_SIZE = 16
"""Answers of a sizing remembered: the same agents are asked about again and again."""

logger = logging.getLogger(__name__)

QUICK_PLAN_S = 0.1
"""So long a plan is waited for; most take less, and the next job can look at what is left of the offers at once."""
FIT_TIME_LIMIT_S = 5.0
"""Nothing is launched by these plans: the first one found will do."""


@dataclass(frozen=True)
class PlannedLaunch:
    """What is to be launched.

    Attributes:
        plan: what is followed.
        tasks: all of the job, in the order of the plan.
        operations: agent's id -> the operation that launches its part.
        nodes: the machines that the plan was made for.
    """

    plan: Plan
    tasks: list[JobTask]
    operations: dict[str, dict[str, Any]]
    nodes: list[NodeClass]


@dataclass(frozen=True)
class _Inquiry:
    """What is being found out in the background.

    Attributes:
        answer: what to launch, or why the job has to wait.
        agents: the offers it is to be launched on; empty if it is only asked why none has come.
    """

    answer: Future[PlannedLaunch | str]
    agents: tuple[AgentOffer, ...] = ()


class Planner:
    """Plans a job on what is on offer, in the background: offers may go meanwhile, and others come.

    Args:
        spec: the job.
        run: what runs of it.
        observer: is notified why it waits.
        all_agents: lists every agent with all its resources; may be called by any thread.
        background: plans.
        now_s: the time.
        patient: whether a job that fits no agents there are waits for others, instead of being an error.

    Attributes:
        allotted: the most that an elastic job may start with, where somebody else decides on its size; None: it may
            start with as much as is best.
    """

    def __init__(
        self,
        spec: JobSpec,
        run: JobRun,
        observer: JobObserver,
        all_agents: AllAgents,
        background: Background,
        now_s: float,
        *,
        patient: bool,
    ) -> None:
        self._spec = spec
        self._run = run
        self._observer = observer
        self._all_agents = all_agents
        self._background = background
        self._patient = patient
        self._checked: tuple[Sequence[NodeClass], str] | None = None
        self._inquiry: _Inquiry | None = None
        self._waiting_since_s = now_s
        self._foreseeing: Future[tuple[Plan, list[NodeClass]] | str] | None = None
        self._foreseen: Plan | None = None
        self._foresee_again_s = -math.inf
        self.allotted: Size | None = None

    @property
    def demand_key(self) -> Hashable:
        """Equal for jobs that fit the same offers; None for one that follows a plan."""
        return None if self._kind is None else (self._kind, self.allotted)

    @functools.cached_property
    def _kind(self) -> Hashable:
        spec = self._spec
        if spec.plan is not None:
            return None
        bounds = (spec.min_workers, spec.max_workers, spec.elastic, spec.plain)
        return (spec.profile.dumps(), spec.planning, *bounds)

    @property
    def _is_planning(self) -> bool:
        return self._inquiry is not None and bool(self._inquiry.agents)

    def consider(self, agents: Sequence[AgentOffer], now_s: float) -> PlannedLaunch | Decline | Later:
        """Plans on what is on offer; notifies the user why the job has to wait.

        Args:
            agents: the offers; what is left of those before, if it plans.
            now_s: the time.

        Returns:
            What to launch now, all of it on offer.

        Raises:
            InfeasibleError: if it can never fit, and is not patient.
        """
        self._waiting_since_s = now_s
        if not agents:
            self.abandon()
            return Decline()
        if not self._is_planning:
            self._plan(agents)
        return self._answer(agents)

    def tick(self, now_s: float, *, connected: bool) -> None:
        """Finds out why no offer comes, and notifies the user.

        Args:
            now_s: the time.
            connected: whether offers can come.

        Raises:
            InfeasibleError: if the job can never fit, and is not patient.
        """
        if self._is_planning:
            return
        if self._inquiry is None and connected and now_s - self._waiting_since_s >= NO_OFFER_S:
            self._waiting_since_s = now_s
            self._inquiry = _Inquiry(self._background.start(self._why_no_offer))
        if self._inquiry is not None and self._inquiry.answer.done():
            answer = self._inquiry.answer.result()
            self._inquiry = None
            assert isinstance(answer, str)
            self._observer.waiting(answer)

    def foresee(self, now_s: float, sharing: int) -> tuple[Plan, list[NodeClass]] | None:
        """The plan that an elastic job would have on its part of the agents it may use, and all of these agents.

        Once it is there, `allotted` can be set: the job then starts with tasks shaped as in that plan. On all agents
        they would be so large that few jobs could share them.

        Args:
            now_s: the time.
            sharing: how many jobs share the agents.

        Returns:
            None as long as that is being found out, and if the job would not fit, of which the user is notified; then
            it is looked again now and then.
        """
        if self._foreseeing is None and now_s >= self._foresee_again_s:
            self._foreseeing = self._background.start(functools.partial(self._planned_alone, sharing))
        if self._foreseeing is None or not self._foreseeing.done():
            return None
        found = self._foreseeing.result()
        self._foreseeing, self._foresee_again_s = None, now_s + LOOK_AGAIN_S
        if isinstance(found, str):
            self._observer.waiting(found)
            return None
        self._foreseen = found[0]
        return found

    def wait(self, now_s: float) -> None:
        """Offers are wanted from now on: that none has come before means nothing."""
        self._waiting_since_s = now_s

    def abandon(self) -> None:
        """What is being found out is not wanted any more."""
        if self._foreseeing is not None:
            self._foreseeing.cancel()
            self._foreseeing = None
        if self._inquiry is not None:
            self._inquiry.answer.cancel()
            self._inquiry = None

    def _plan(self, agents: Sequence[AgentOffer]) -> None:
        self.abandon()
        work = functools.partial(self._planned_launch, agents, self.allotted)
        self._inquiry = _Inquiry(self._background.start(work, QUICK_PLAN_S), tuple(agents))

    def _answer(self, agents: Sequence[AgentOffer]) -> PlannedLaunch | Decline | Later:
        inquiry = self._inquiry
        if inquiry is None or not inquiry.answer.done():
            return Later()
        self._inquiry = None
        answer = inquiry.answer.result()
        if isinstance(answer, str):
            self._observer.waiting(answer)
            return Decline()
        offered = {agent.agent_id: set(agent.offer_ids) for agent in agents}
        used = [agent for agent in inquiry.agents if agent.agent_id in answer.operations]
        if all(set(agent.offer_ids) <= offered.get(agent.agent_id, set()) for agent in used):
            return answer
        self._plan(agents)
        return Later()

    # In the background: nothing that is read here changes while the job waits.

    def _planned_alone(self, sharing: int) -> tuple[Plan, list[NodeClass]] | str:
        nodes, unmet = self._agents()
        if nodes is None:
            return unmet or "The Mesos master does not say which agents there are."
        if not nodes:
            return "No agent is registered with the Mesos master."
        largest = sorted(nodes, key=lambda node: (-node.gpus, -node.cpus, -node.mem_bytes, node.name))
        part = largest[: max(1, len(nodes) // max(1, sharing))]
        try:
            with contextlib.suppress(InfeasibleError):
                return _make_plan(self._spec, part, nodes), nodes
            return _make_plan(self._spec, nodes, nodes), nodes
        except InfeasibleError as error:
            return f"This job can never start on the agents there are: {error}"

    def _planned_launch(self, offered: Sequence[AgentOffer], allotted: Size | None) -> PlannedLaunch | str:
        agents = [agent for agent in offered if agent.amounts["ports"]]
        try:
            plan = self._shaped(agents, allotted) if allotted else plan_for(self._spec, agents, self._whole_agents)
            tasks = place(self._spec, plan, agents, self._run.serial, self._run.used_ports)
            operations = self._operations(plan, tasks, agents)
        except (InfeasibleError, DoesNotFitError) as error:
            # Of a job that has run already, the agents that carried it may only be away for a while.
            never = "" if self._run.attempt else self._why_never(*self._agents(), error)
            return f"{never or error} On offer: {describe_offers(offered)}."
        return PlannedLaunch(plan, tasks, operations, [agent.node_class() for agent in agents])

    def _shaped(self, agents: Sequence[AgentOffer], allotted: Size) -> Plan:
        """The plan with tasks shaped as they were foreseen, as many of them as were allotted and there is room for.

        Raises:
            DoesNotFitError: if there is room for too few.
        """
        assert self._foreseen is not None
        assert self._spec.elastic is not None
        for workers in range(allotted.workers, self._spec.elastic[0] - 1, -1):
            for ps in range(allotted.ps, min(allotted.ps, self._foreseen.option.ps) - 1, -1):
                found = layout(self._spec, self._foreseen, (), Size(workers, ps), agents)
                if found is not None:
                    return found.plan
        raise DoesNotFitError(f"There is no room for {allotted}, nor for {self._spec.elastic[0]} of the workers.")

    def _why_no_offer(self) -> str:
        nodes, unmet = self._agents()
        if nodes == []:
            return "No agent is registered with the Mesos master."
        never = unmet if self._run.attempt else self._why_never(nodes, unmet)
        return never or NO_OFFER + describe_free(nodes or ())

    def _operations(
        self, plan: Plan, tasks: Sequence[JobTask], agents: Sequence[AgentOffer]
    ) -> dict[str, dict[str, Any]]:
        cluster = cluster_spec(tasks)
        operations = {}
        for agent in agents:
            here = [task for task in tasks if task.agent_id == agent.agent_id]
            if here:
                operations[agent.agent_id] = launch_operation(self._spec, plan, here, cluster, agent, self._run.attempt)
        return operations

    def _agents(self) -> tuple[list[NodeClass] | None, str]:
        """Those that the job may use, and why there are none if its constraints are to blame."""
        try:
            return self._all_agents(), ""
        except InfeasibleError as error:
            if not self._patient and not self._run.attempt:
                raise
            return None, str(error)

    def _whole_agents(self) -> list[NodeClass]:
        """Those that the job may use, as far as they are known, with all their resources."""
        try:
            return self._all_agents() or []
        except InfeasibleError:
            return []

    def _why_never(self, nodes: Sequence[NodeClass] | None, unmet: str, cause: Exception | None = None) -> str:
        """Why the job would not even fit on agents that are all free; empty if it would, or that is not known."""
        if unmet:
            return unmet
        # Planning takes its time, and on the same agents the answer stays the same.
        if nodes is not None and self._checked is not None and self._checked[0] == nodes:
            return self._checked[1]
        try:
            check_ever_fits(self._spec, nodes, cause)
            reason = ""
        except InfeasibleError as error:
            if not self._patient:
                raise
            reason = str(error)
        if nodes is not None:
            self._checked = (nodes, reason)
        return reason


def plan_for(
    spec: JobSpec, agents: Sequence[AgentOffer], whole_agents: Callable[[], Sequence[NodeClass]] = list
) -> Plan:
    """The plan to follow on these agents: the one the job came with, or the best there is.

    Args:
        spec: the job.
        agents: the offers.
        whole_agents: lists all agents with all their resources, as far as they are known.

    Raises:
        InfeasibleError: if the job does not fit what they offer.
    """
    if not agents:
        raise InfeasibleError(
            "None of the agents offers ports, and each TensorFlow server needs one; give the agents a 'ports' resource."
        )
    if spec.plan is not None:
        return spec.plan
    nodes = [agent.node_class() for agent in agents]
    # Only what was measured asks for more than what is on offer.
    return _make_plan(spec, nodes, whole_agents() if spec.planning.measurements else ())


def check_ever_fits(spec: JobSpec, nodes: Sequence[NodeClass] | None, cause: Exception | None = None) -> None:
    """Makes sure that the job would fit if the agents were all free.

    Args:
        spec: the job.
        nodes: all agents with all their resources; None where that is not known.
        cause: why it does not fit at the moment.

    Raises:
        InfeasibleError: if it would not.
    """
    if not nodes:
        return
    if spec.plan is not None:
        # A host name that several agents share is followed by a part of the agent's id.
        hostnames = {node.name.partition("/")[0] for node in nodes}
        missing = {task.node for task in spec.plan.tasks if task.node.partition("/")[0] not in hostnames}
        if missing:
            raise InfeasibleError(
                f"This plan can never start here: no agent is called {', '.join(sorted(missing))}; the agents are "
                f"{', '.join(sorted({node.name for node in nodes}))}."
            ) from cause
        if problem := _fit_plan(spec.plan, tuple(nodes)).problem:
            raise InfeasibleError(f"This plan can never start here: it {problem.removeprefix('Its plan ')}") from cause
        return
    try:
        _make_plan(spec, nodes, nodes)
    except InfeasibleError as error:
        raise InfeasibleError(f"This job can never start on the agents there are: {error}") from cause


def plan_request(spec: JobSpec, nodes: Sequence[NodeClass], all_nodes: Sequence[NodeClass] = ()) -> PlanRequest:
    """What the planner is asked for a job on these machines.

    Args:
        spec: the job.
        nodes: what is free of the machines.
        all_nodes: all machines with all they have, as far as they are known.
    """
    fewest, most = (spec.min_workers, spec.max_workers) if spec.elastic is None else spec.elastic
    planning = spec.planning
    if spec.elastic is not None and planning.rules == "default":
        # A worker that comes later is shaped as those that are there.
        planning = dataclasses.replace(planning, rules="default,identical_workers")
    return planning.request(
        spec.profile,
        cluster_of(nodes),
        min_workers=fewest,
        max_workers=most,
        plain=spec.plain,
        all_machines=all_nodes,
    )


def _make_plan(spec: JobSpec, nodes: Sequence[NodeClass], all_nodes: Sequence[NodeClass] = ()) -> Plan:
    request = plan_request(spec, nodes, all_nodes)
    limit_s = spec.planning.time_limit_s
    return planned(request) if limit_s is None else plan_with_timeout(request, limit_s)


@functools.lru_cache(CACHE_SIZE)
def planned(request: PlanRequest) -> Plan:
    """The plan of a request. It is kept: jobs that are alike, or start again on the same machines, are planned once."""
    return make_plan(request)


class TrainingSizing:
    """Of a training job.

    Args:
        spec: the job.
    """

    is_gang = True

    def __init__(self, spec: JobSpec) -> None:
        fewest = (spec.min_workers or 1) if spec.elastic is None else spec.elastic[0]
        self._spec = dataclasses.replace(
            spec,
            max_workers=fewest,
            elastic=None if spec.elastic is None else (fewest, fewest),
            # Whether a job has room is no matter of how fast it would be.
            planning=dataclasses.replace(spec.planning, measurements=()),
        )
        self._fewest = fewest
        self.needs = functools.lru_cache(CACHE_SIZE)(self._needs)
        self.fit = functools.lru_cache(CACHE_SIZE)(self._fit)

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
        if not any(need.gpus for need in needs) and (holders := packed(needs, nodes)):
            return Fit(holders)
        request = dataclasses.replace(plan_request(self._spec, nodes), time_limit_s=FIT_TIME_LIMIT_S)
        return Fit(frozenset(task.node for task in make_plan(request).tasks))


def _fit_plan(plan: Plan, nodes: Nodes) -> Fit:
    """Whether the agents of a plan have room for it."""
    room = {node.name: capacity(node) for node in nodes}
    wanted: dict[str, Counter[str]] = {}
    for task in plan.tasks:
        wanted.setdefault(task.node, Counter()).update(dict(zip(SCALARS, _amounts(task), strict=True)))
    used: set[str] = set()
    for name, amounts in wanted.items():
        need = TaskNeed("", 1, *(amounts[one] for one in SCALARS))
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
