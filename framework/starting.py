"""From the offers in hand to what a training job launches on them, or the reason why it has to wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dike.exceptions import InfeasibleError
from framework.driver import CallRefusedError, MasterUnavailableError, OffersGoneError
from framework.gathering import NO_OFFER_S, describe_offers
from framework.job import JobSpec, JobTask
from framework.job_plan import AllAgents, check_ever_fits, plan_for
from framework.job_state import JobMemory
from framework.launching import DoesNotFitError, cluster_spec, launch_operation, place
from framework.observer import JobObserver
from framework.offer_desk import OfferDesk
from framework.offers import AgentOffer
from framework.running import Turn
from solver import NodeClass, Plan


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


class Starter:
    """Plans a job on what is on offer.

    Args:
        spec: the job.
        memory: what is known of it.
        desk: offers in hand.
        observer: is told why it waits.
        all_agents: lists every agent with all its resources.
        patient: whether a job that fits no agents there are waits for others, instead of being an error.
    """

    def __init__(
        self,
        spec: JobSpec,
        memory: JobMemory,
        desk: OfferDesk,
        observer: JobObserver,
        all_agents: AllAgents,
        *,
        patient: bool,
    ) -> None:
        self._spec = spec
        self._run = memory.run
        self._result = memory.result
        self._desk = desk
        self._observer = observer
        self._all_agents = all_agents
        self._patient = patient
        self._checked: tuple[Sequence[NodeClass], str] | None = None

    def prepare(self) -> Start | None:
        """What to launch on the offers in hand; None if the job has to wait.

        Raises:
            InfeasibleError: if it can never fit, and is not patient.
        """
        offered = self._desk.gathering.agents
        agents = [agent for agent in offered if agent.pool.ports()]
        try:
            plan = plan_for(self._spec, agents)
            tasks = place(self._spec, plan, agents, self._run.serial, self._run.used_ports)
            operations = self._operations(plan, tasks, agents)
        except (InfeasibleError, DoesNotFitError) as error:
            # Of a job that has run already, the agents that carried it may only be away for a while.
            never = "" if self._run.attempt else self._why_never(*self._agents(), error)
            self._observer.waiting(f"{never or error} On offer: {describe_offers(offered)}.")
            return None
        return Start(plan, tasks, operations, [agent.node_class() for agent in agents])

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

    def no_offer(self) -> None:
        """Tells the user why none may have come.

        Raises:
            InfeasibleError: if the job can never fit, and is not patient.
        """
        nodes, unmet = self._agents()
        if nodes == []:
            self._observer.waiting("No agent is registered with the Mesos master.")
            return
        never = unmet if self._run.attempt else self._why_never(nodes, unmet)
        self._observer.waiting(
            never
            or f"No offer has come for {NO_OFFER_S:g} s: other frameworks hold what the agents have, or none of it is "
            "for this role (--role)."
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
