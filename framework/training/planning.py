"""Plans a job on the offers and says what to launch, or why the job has to wait."""

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
from framework.mesos.offers import NO_OFFER, NO_OFFER_TIMEOUT_S, AgentOffer, cluster_of, describe_free, describe_offers
from framework.scheduler.agents import AllAgents
from framework.scheduler.amounts import SCALARS, describe
from framework.scheduler.background import Background
from framework.scheduler.feasibility import FitResult, Nodes, capacity, first_fit
from framework.scheduler.job import RETRY_OFFERS_S, Decline, Planning
from framework.scheduler.records import TaskNeed
from framework.training.elastic.layout import Size, layout
from framework.training.launch import DoesNotFitError, cluster_spec, launch_operation, place
from framework.training.observer import JobObserver
from framework.training.spec import JobSpec, JobTask
from framework.training.state import JobRun
from solver import NodeClass, Plan, PlannedTask, PlanRequest, TaskResources, make_plan, smallest_job
from solver.deadline import plan_with_timeout
from solver.milp import SolverError
from solver.options import parse_rules

CACHE_SIZE = 16
"""Number of cached answers of a sizing: the same agents are checked repeatedly."""

logger = logging.getLogger(__name__)

PLAN_WAIT_S = 0.1
"""Maximum time to wait for a plan before the scheduler serves the next job; most plans take less."""
FIT_TIME_LIMIT_S = 5.0
"""Nothing is launched by these plans: the first one found is good enough."""


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch of the whole job.

    Attributes:
        tasks: its tasks, in the order of the plan.
        operations: agent id -> its launch operation.
        nodes: the machines that the plan was made for.
    """

    plan: Plan
    tasks: list[JobTask]
    operations: dict[str, dict[str, Any]]
    nodes: list[NodeClass]


@dataclass(frozen=True)
class _PendingPlan:
    """Planning in the background.

    Attributes:
        answer: what to launch, or why the job has to wait.
        agents: the offers for the launch; empty if it explains why no offer arrives.
    """

    answer: Future[PlannedLaunch | str]
    agents: tuple[AgentOffer, ...] = ()


class Planner:
    """Plans a job on the offers, in the background, while offers may be withdrawn and others arrive.

    Args:
        observer: receives the reasons to wait.
        all_agents: lists every agent with its total resources; called from any thread.
        patient: whether a job that fits none of the existing agents waits for others; else that is an error.

    Attributes:
        allotted: maximum initial size of an elastic job in central allocation; None: the planner chooses.
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
        self._checked: list[_Checked] = []
        self._pending: _PendingPlan | None = None
        self._waiting_since_s = now_s
        self._planning_ahead: Future[tuple[Plan, list[NodeClass]] | str] | None = None
        self._plan_made_ahead: Plan | None = None
        self._next_plan_ahead_s = -math.inf
        self.allotted: Size | None = None

    @property
    def equivalence_class(self) -> Hashable:
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
        return self._pending is not None and bool(self._pending.agents)

    def consider(self, agents: Sequence[AgentOffer], now_s: float) -> PlannedLaunch | Decline | Planning:
        """Plans on the offers; notifies the user why the job has to wait.

        While planning, `agents` are the remaining ones of the offers before.

        Raises:
            InfeasibleError: the job can never fit, and is not patient.
        """
        self._waiting_since_s = now_s
        if not agents:
            self.abandon()
            return Decline()
        if not self._is_planning:
            self._plan(agents)
        return self._answer(agents)

    def tick(self, now_s: float, *, connected: bool) -> None:
        """Notifies the user why no offer arrives.

        Raises:
            InfeasibleError: the job can never fit, and is not patient.
        """
        if self._is_planning:
            return
        if self._pending is None and connected and now_s - self._waiting_since_s >= NO_OFFER_TIMEOUT_S:
            self._waiting_since_s = now_s
            self._pending = _PendingPlan(self._background.start(self._work().why_no_offer))
        if self._pending is not None and self._pending.answer.done():
            answer = self._pending.answer.result()
            self._pending = None
            assert isinstance(answer, str)
            self._observer.waiting(answer)

    def plan_ahead(self, now_s: float, competing_jobs: int) -> tuple[Plan, list[NodeClass]] | None:
        """Plans an elastic job on its share of the agents it may use; returns the plan and all of these agents.

        Afterwards `allotted` can be set: the job then starts with tasks of this plan's shape. Planned on all agents,
        its tasks would be so large that few jobs could share the agents.

        Returns:
            None while planning, and if the job does not fit: the user is notified and planning is repeated later.
        """
        if self._planning_ahead is None and now_s >= self._next_plan_ahead_s:
            self._planning_ahead = self._background.start(functools.partial(self._work().plan_on_share, competing_jobs))
        if self._planning_ahead is None or not self._planning_ahead.done():
            return None
        found = self._planning_ahead.result()
        self._planning_ahead, self._next_plan_ahead_s = None, now_s + RETRY_OFFERS_S
        if isinstance(found, str):
            self._observer.waiting(found)
            return None
        self._plan_made_ahead = found[0]
        return found

    def wait(self, now_s: float) -> None:
        """Restarts the timer after which missing offers are explained."""
        self._waiting_since_s = now_s

    def abandon(self) -> None:
        if self._planning_ahead is not None:
            self._planning_ahead.cancel()
            self._planning_ahead = None
        if self._pending is not None:
            self._pending.answer.cancel()
            self._pending = None

    def _plan(self, agents: Sequence[AgentOffer]) -> None:
        self.abandon()
        work = functools.partial(self._work().plan_launch, tuple(agents), self.allotted)
        self._pending = _PendingPlan(self._background.start(work, PLAN_WAIT_S), tuple(agents))

    def _work(self) -> _Work:
        run = self._run
        ports = frozenset(run.used_ports)
        return _Work(
            self._spec,
            self._all_agents,
            self._patient,
            run.serial,
            run.attempt,
            ports,
            self._plan_made_ahead,
            self._checked,
        )

    def _answer(self, agents: Sequence[AgentOffer]) -> PlannedLaunch | Decline | Planning:
        pending = self._pending
        if pending is None or not pending.answer.done():
            return Planning()
        self._pending = None
        answer = pending.answer.result()
        if isinstance(answer, str):
            self._observer.waiting(answer)
            return Decline()
        offered = {agent.agent_id: set(agent.offer_ids) for agent in agents}
        used = [agent for agent in pending.agents if agent.agent_id in answer.operations]
        if all(set(agent.offer_ids) <= offered.get(agent.agent_id, set()) for agent in used):
            return answer
        self._plan(agents)
        return Planning()


@dataclass(frozen=True)
class _Checked:
    """Why a job never fits on these agents; empty if it does."""

    nodes: Sequence[NodeClass]
    reason: str


@dataclass(frozen=True)
class _Work:
    """What threads do for a planner, with copies of what the loop may change meanwhile.

    Attributes:
        spec, all_agents, patient: as of the planner.
        serial, attempt, used_ports: of the run.
        plan_made_ahead: the plan for tasks of an allotted size; None before it is made.
        checked: the last check, as planning is slow; shared by all work of a planner.
    """

    spec: JobSpec
    all_agents: AllAgents
    patient: bool
    serial: int
    attempt: int
    used_ports: frozenset[int]
    plan_made_ahead: Plan | None
    checked: list[_Checked]

    def plan_on_share(self, competing_jobs: int) -> tuple[Plan, list[NodeClass]] | str:
        nodes, unmet = self._agents()
        if nodes is None:
            return unmet or "The Mesos master does not list its agents."
        if not nodes:
            return "No agent is registered with the Mesos master."
        largest = sorted(nodes, key=lambda node: (-node.gpus, -node.cpus, -node.mem_bytes, node.name))
        part = largest[: max(1, len(nodes) // max(1, competing_jobs))]
        try:
            with contextlib.suppress(InfeasibleError):
                return _make_plan_on(self.spec, part, nodes), nodes
            return _make_plan_on(self.spec, nodes, nodes), nodes
        except InfeasibleError as error:
            return f"This job can never start on the agents there are: {error}"

    def plan_launch(self, offered: Sequence[AgentOffer], allotted: Size | None) -> PlannedLaunch | str:
        agents = [agent for agent in offered if agent.amounts["ports"]]
        try:
            plan = self._plan_of_size(agents, allotted) if allotted else plan_for(self.spec, agents, self._whole_agents)
            tasks = place(self.spec, plan, agents, self.serial, self.used_ports)
            operations = self._operations(plan, tasks, agents)
        except (InfeasibleError, DoesNotFitError) as error:
            # The agents of a job that has run before may be absent only temporarily.
            never = "" if self.attempt else self._why_never(*self._agents(), error)
            return f"{never or error} On offer: {describe_offers(offered)}."
        return PlannedLaunch(plan, tasks, operations, [agent.node_class() for agent in agents])

    def _plan_of_size(self, agents: Sequence[AgentOffer], allotted: Size) -> Plan:
        """Makes a plan with the shapes planned in advance and at most the allotted counts, as far as there is room.

        Raises:
            DoesNotFitError: there is room for too few.
        """
        assert self.plan_made_ahead is not None
        assert self.spec.elastic is not None
        for workers in range(allotted.workers, self.spec.elastic[0] - 1, -1):
            for ps in range(allotted.ps, min(allotted.ps, self.plan_made_ahead.option.ps) - 1, -1):
                found = layout(self.spec, self.plan_made_ahead, (), Size(workers, ps), agents)
                if found is not None:
                    return found.plan
        raise DoesNotFitError(f"There is no room for {allotted}, nor for {self.spec.elastic[0]} of the workers.")

    def why_no_offer(self) -> str:
        nodes, unmet = self._agents()
        if nodes == []:
            return "No agent is registered with the Mesos master."
        never = unmet if self.attempt else self._why_never(nodes, unmet)
        return never or NO_OFFER + describe_free(nodes or ())

    def _operations(
        self, plan: Plan, tasks: Sequence[JobTask], agents: Sequence[AgentOffer]
    ) -> dict[str, dict[str, Any]]:
        cluster = cluster_spec(tasks)
        operations = {}
        for agent in agents:
            here = [task for task in tasks if task.agent_id == agent.agent_id]
            if here:
                operations[agent.agent_id] = launch_operation(self.spec, plan, here, cluster, agent, self.attempt)
        return operations

    def _agents(self) -> tuple[list[NodeClass] | None, str]:
        """The agents that the job may use; if there are none because of its constraints, None and the reason."""
        try:
            return self.all_agents(), ""
        except InfeasibleError as error:
            if not self.patient and not self.attempt:
                raise
            return None, str(error)

    def _whole_agents(self) -> list[NodeClass]:
        try:
            return self.all_agents() or []
        except InfeasibleError:
            return []

    def _why_never(self, nodes: Sequence[NodeClass] | None, unmet: str, cause: Exception | None = None) -> str:
        """Why the job does not fit even if all agents are idle; empty if it fits, or that is not known."""
        if unmet:
            return unmet
        for last in self.checked:
            if nodes == last.nodes:
                return last.reason
        try:
            check_ever_fits(self.spec, nodes, cause)
            reason = ""
        except InfeasibleError as error:
            if not self.patient:
                raise
            reason = str(error)
        if nodes is not None:
            self.checked[:] = [_Checked(nodes, reason)]
        return reason


def plan_for(
    spec: JobSpec, agents: Sequence[AgentOffer], whole_agents: Callable[[], Sequence[NodeClass]] = list
) -> Plan:
    """The plan to follow on these agents: the submitted one, or the best found.

    Raises:
        InfeasibleError: the job does not fit the offers.
    """
    if not agents:
        raise InfeasibleError(
            "None of the agents offers ports, and each TensorFlow server needs one; give the agents a 'ports' resource."
        )
    if spec.plan is not None:
        return spec.plan
    nodes = [agent.node_class() for agent in agents]
    # Only measurements need machines beyond those on offer.
    return _make_plan_on(spec, nodes, whole_agents() if spec.planning.measurements else ())


def check_ever_fits(spec: JobSpec, nodes: Sequence[NodeClass] | None, cause: Exception | None = None) -> None:
    """Checks that the job would fit if all agents, given with their total resources, were idle.

    Raises:
        InfeasibleError: it would not; chained to `cause`, why it does not fit the current offers.
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
        _make_plan_on(spec, nodes, nodes)
    except InfeasibleError as error:
        raise InfeasibleError(f"This job can never start on the agents there are: {error}") from cause


def plan_request(spec: JobSpec, nodes: Sequence[NodeClass], all_nodes: Sequence[NodeClass] = ()) -> PlanRequest:
    """The planner's request for a job on the free resources of machines.

    `all_nodes` are all known machines with their total resources.
    """
    fewest, most = spec.worker_bounds
    request = spec.planning.request(
        spec.profile,
        cluster_of(nodes),
        min_workers=fewest,
        max_workers=most,
        plain=spec.plain,
        elastic=spec.elastic is not None,
        all_machines=all_nodes,
    )
    if spec.elastic is not None and spec.planning.rules == "default":
        # Workers added later have the same shape.
        rules = parse_rules("default,identical_workers", request.objective)
        request = dataclasses.replace(request, rules=rules)
    return request


def _make_plan_on(spec: JobSpec, nodes: Sequence[NodeClass], all_nodes: Sequence[NodeClass] = ()) -> Plan:
    request = plan_request(spec, nodes, all_nodes)
    limit_s = spec.planning.plan_timeout_s
    return planned(request) if limit_s is None else plan_with_timeout(request, limit_s)


@functools.lru_cache(CACHE_SIZE)
def planned(request: PlanRequest) -> Plan:
    """Makes a plan; cached, so that equal jobs, and restarts on the same machines, are planned once."""
    return make_plan(request)


class TrainingSizing:
    """The smallest size of a training job: what it needs and where it fits."""

    is_gang = True

    def __init__(self, spec: JobSpec) -> None:
        fewest = spec.planning.fewest_workers(spec.min_workers) if spec.elastic is None else spec.elastic[0]
        self._spec = dataclasses.replace(
            spec,
            max_workers=fewest,
            elastic=None if spec.elastic is None else (fewest, fewest),
            # Whether a job fits does not depend on its speed.
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

    def _fit(self, nodes: Nodes) -> FitResult:
        if not nodes:
            return FitResult(problem="No agent has ports, and each TensorFlow server needs one.")
        if self._spec.plan is not None:
            return _fit_plan(self._spec.plan, nodes)
        try:
            return self._planned(nodes)
        except InfeasibleError as error:
            return FitResult(problem=str(error))
        except SolverError as error:
            logger.warning("cannot predict where job %s would start: %s", self._spec.job_id, error)
            return FitResult()

    def _planned(self, nodes: Nodes) -> FitResult:
        needs = self._needs(nodes)
        # Only the planner checks whether a model fits a GPU's memory.
        if not any(need.gpus for need in needs) and (holders := first_fit(needs, nodes)):
            return FitResult(holders)
        request = plan_request(self._spec, nodes)
        request = dataclasses.replace(request, time_limit_s=FIT_TIME_LIMIT_S, shown=frozenset())
        return FitResult(frozenset(task.node for task in make_plan(request).tasks))


def _fit_plan(plan: Plan, nodes: Nodes) -> FitResult:
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
            return FitResult(problem=f"Its plan needs agent {name}; the agents are {', '.join(sorted(room))}.")
        best = min(able, key=lambda one: len(need.missing(room[one])))
        if missing := need.missing(room[best]):
            return FitResult(
                problem=f"Its plan needs {describe(amounts)} on {name}, which is {describe(missing)} short."
            )
        used.add(best)
    return FitResult(frozenset(used))


def _amounts(task: PlannedTask | TaskResources) -> tuple[float, float, float, float]:
    return task.cpus, float(task.mem_mb), float(task.disk_mb), float(task.gpus)
