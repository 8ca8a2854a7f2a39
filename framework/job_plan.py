"""A job's plan for what is on offer, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dike.exceptions import InfeasibleError
from framework.job import JobSpec
from framework.offers import AgentOffer, cluster_of
from solver import NodeClass, Plan, PlanRequest, make_plan

AllAgents = Callable[[], list[NodeClass] | None]
"""Lists every registered agent with all its resources, used or not; None where that is not known."""


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
        spec: the job; one that follows a plan of its own is not judged.
        nodes: all agents with all their resources; None where that is not known.
        cause: why it does not fit at the moment.

    Raises:
        InfeasibleError: if it would not.
    """
    if not nodes or spec.plan is not None:
        return
    try:
        _make_plan(spec, nodes)
    except InfeasibleError as error:
        raise InfeasibleError(f"This job can never start on the agents there are: {error}") from cause


def _make_plan(spec: JobSpec, nodes: Sequence[NodeClass]) -> Plan:
    return make_plan(
        PlanRequest(
            profile=spec.profile,
            cluster=cluster_of(nodes),
            objective=spec.objective,
            max_workers=spec.max_workers,
        )
    )
