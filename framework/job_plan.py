"""A job's plan for what is on offer, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dike.exceptions import InfeasibleError
from framework.job import JobSpec
from framework.offers import AgentOffer, cluster_of
from solver import NodeClass, Plan, PlanRequest, make_plan

PLAN_TIME_LIMIT_S = 30.0
"""Offers are held while a plan is made: the best one found by then will do."""

AllAgents = Callable[[], list[NodeClass] | None]
"""Lists every registered agent that a job may use with all its resources, used or not; None where that is not known.

Raises `InfeasibleError` if there are agents, but none that meets the job's constraints."""


def no_agent_meets(constraints: Sequence[str]) -> InfeasibleError:
    """What `AllAgents` raises."""
    return InfeasibleError(f"No agent meets --constraint {' and '.join(constraints)}.")


def plan_for(spec: JobSpec, agents: Sequence[AgentOffer]) -> Plan:
    """The plan to follow on these agents: the one the job came with, or the best there is.

    Raises:
        InfeasibleError: if the job does not fit what they offer.
    """
    if not agents:
        raise InfeasibleError(
            "None of the agents offers ports, and each TensorFlow server needs one; give the agents a 'ports' resource."
        )
    return spec.plan or _make_plan(spec, [agent.node_class() for agent in agents])


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
        return
    try:
        _make_plan(spec, nodes)
    except InfeasibleError as error:
        raise InfeasibleError(f"This job can never start on the agents there are: {error}") from cause


def plan_request(spec: JobSpec, nodes: Sequence[NodeClass]) -> PlanRequest:
    """What the planner is asked for a job on these machines."""
    return PlanRequest(
        profile=spec.profile,
        cluster=cluster_of(nodes),
        objective=spec.objective,
        max_workers=spec.max_workers if spec.elastic is None else spec.elastic[1],
        min_workers=1 if spec.elastic is None else spec.elastic[0],
        # A script uses the one GPU it sees; more would lie idle.
        max_gpus_per_worker=1,
        time_limit_s=PLAN_TIME_LIMIT_S,
    )


def _make_plan(spec: JobSpec, nodes: Sequence[NodeClass]) -> Plan:
    return make_plan(plan_request(spec, nodes))
