"""From the offers in hand to what a training job launches on them, or the reason why it has to wait."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from dike.exceptions import InfeasibleError
from framework.background import Background
from framework.driver import CallRefusedError, MasterUnavailableError, OffersGoneError
from framework.gathering import NO_OFFER_S, describe_offers
from framework.job import JobSpec, JobTask
from framework.job_plan import AllAgents, check_ever_fits, plan_for
from framework.job_state import JobMemory
from framework.launching import DoesNotFitError, cluster_spec, launch_operation, place
from framework.mesos_calls import MesosCalls, try_now
from framework.observer import JobObserver
from framework.offer_desk import OfferDesk
from framework.offers import AgentOffer
from framework.running import Turn
from solver import NodeClass, Plan

QUICK_PLAN_S = 0.1
"""So long a plan is waited for; most take less, and the next job can look at what is left of the offers at once."""


@dataclass(frozen=True)
class Start:
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
class _Asked:
    """What is being found out in the background.

    Attributes:
        answer: what to launch, or why the job has to wait.
        agents: the offers it is to be launched on; empty if it is only asked why none has come.
    """

    answer: Future[Start | str]
    agents: tuple[AgentOffer, ...] = ()


class Starter:
    """Plans a job on what is on offer, in the background: offers may go meanwhile, and others come.

    Args:
        spec: the job.
        memory: what is known of it.
        mesos: where offers come from.
        desk: offers in hand.
        observer: is told why it waits.
        all_agents: lists every agent with all its resources; may be called by any thread.
        background: plans.
        patient: whether a job that fits no agents there are waits for others, instead of being an error.
    """

    def __init__(
        self,
        spec: JobSpec,
        memory: JobMemory,
        mesos: MesosCalls,
        desk: OfferDesk,
        observer: JobObserver,
        all_agents: AllAgents,
        background: Background,
        *,
        patient: bool,
    ) -> None:
        self._spec = spec
        self._run = memory.run
        self._result = memory.result
        self._mesos = mesos
        self._desk = desk
        self._observer = observer
        self._all_agents = all_agents
        self._background = background
        self._patient = patient
        self._checked: tuple[Sequence[NodeClass], str] | None = None
        self._asked: _Asked | None = None

    @functools.cached_property
    def kind(self) -> Hashable:
        """Equal for jobs that fit the same offers; None for one that follows a plan."""
        spec = self._spec
        return None if spec.plan is not None else (spec.profile.dumps(), spec.objective, spec.max_workers, spec.elastic)

    @property
    def is_planning(self) -> bool:
        """Whether it plans, and keeps the offers for that."""
        return self._asked is not None and bool(self._asked.agents)

    def tick(self, now_s: float, *, connected: bool) -> Start | None:
        """Plans as soon as there are offers; tells the user why the job has to wait.

        Args:
            now_s: the time.
            connected: whether offers can come.

        Returns:
            What to launch now, all of it on offer; None if the job waits, or is being planned.

        Raises:
            InfeasibleError: if it can never fit, and is not patient.
        """
        gathering = self._desk.gathering
        if self.is_planning and not gathering.agents:
            self.abandon()
        if not self.is_planning:
            if gathering.settled(now_s):
                self._plan()
            elif gathering.is_overdue(now_s) and connected:
                # In case the master never heard that offers are wanted again.
                try_now(self._mesos.reviveOffers)
                self._ask_why_no_offer()
        return self._answer(now_s)

    def abandon(self) -> None:
        """What is being found out is not wanted any more."""
        if self._asked is not None:
            self._asked.answer.cancel()
            self._asked = None

    def begin(self, start: Start) -> None:
        """Makes it the job's next attempt."""
        run, tasks = self._run, start.tasks
        self._result.plan = run.plan = start.plan
        self._result.addresses = {task.name: task.address for task in tasks}
        run.tasks = {}
        run.add(tasks)
        run.cluster = cluster_spec(tasks)
        run.used_ports = {task.port for task in tasks}
        self._observer.planned(start.plan)

    def launch(self, start: Start) -> Turn | None:
        """Launches it, and gives back what is left of the offers; returns why the job has to start again, if it has."""
        try:
            for agent_id, operation in start.operations.items():
                agent = self._desk.gathering.agent(agent_id)
                if agent is None:
                    raise OffersGoneError(f"the offers of agent {agent_id} were withdrawn")
                self._desk.accept(agent, operation)
        except CallRefusedError as error:
            return Turn(f"the launch was refused: {error}", counts=not isinstance(error, OffersGoneError))
        except MasterUnavailableError as error:
            # What the master did take is ended; of the rest it says that it knows nothing.
            return Turn(f"the launch was interrupted: {error}", counts=False)
        self._desk.decline_rest()
        self._observer.launched(start.tasks)
        return None

    def _plan(self) -> None:
        self.abandon()
        # Further offers of an agent are added to those in hand.
        offered = tuple(
            dataclasses.replace(agent, offer_ids=list(agent.offer_ids), resources=list(agent.resources))
            for agent in self._desk.gathering.agents
        )
        work = functools.partial(self._start_on, offered)
        self._asked = _Asked(self._background.start(work, QUICK_PLAN_S), offered)

    def _ask_why_no_offer(self) -> None:
        if self._asked is None:
            self._asked = _Asked(self._background.start(self._why_no_offer))

    def _answer(self, now_s: float) -> Start | None:
        asked = self._asked
        if asked is None or not asked.answer.done():
            return None
        self._asked = None
        answer = asked.answer.result()
        if isinstance(answer, Start):
            if all(self._is_offered(agent) for agent in asked.agents if agent.agent_id in answer.operations):
                return answer
            self._plan()
            return None
        self._observer.waiting(answer)
        if asked.agents:
            self._desk.decline_rest()
            # Offers were held meanwhile: that none has come means nothing.
            self._desk.gathering.begin(now_s)
        return None

    def _is_offered(self, agent: AgentOffer) -> bool:
        now = self._desk.gathering.agent(agent.agent_id)
        return now is not None and set(agent.offer_ids) <= set(now.offer_ids)

    # In the background: nothing that is read here changes while the job waits.

    def _start_on(self, offered: Sequence[AgentOffer]) -> Start | str:
        agents = [agent for agent in offered if agent.amounts["ports"]]
        try:
            plan = plan_for(self._spec, agents)
            tasks = place(self._spec, plan, agents, self._run.serial, self._run.used_ports)
            operations = self._operations(plan, tasks, agents)
        except (InfeasibleError, DoesNotFitError) as error:
            # Of a job that has run already, the agents that carried it may only be away for a while.
            never = "" if self._run.attempt else self._why_never(*self._agents(), error)
            return f"{never or error} On offer: {describe_offers(offered)}."
        return Start(plan, tasks, operations, [agent.node_class() for agent in agents])

    def _why_no_offer(self) -> str:
        nodes, unmet = self._agents()
        if nodes == []:
            return "No agent is registered with the Mesos master."
        never = unmet if self._run.attempt else self._why_never(nodes, unmet)
        return never or (
            f"No offer has come for {NO_OFFER_S:g} s: other frameworks hold what the agents have, or none of it is for "
            "this role (--role)."
        )

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
