"""The further tasks of a job that grows: where they are launched, and what they are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from framework.driver import CallRefusedError, MasterUnavailableError
from framework.elastic.layout import Layout
from framework.job import JobSpec, JobTask
from framework.job_run import JobRun
from framework.launching import cluster_spec, launch_operation, place
from framework.offer_desk import OfferDesk
from framework.offers import AgentOffer


def launch_further(
    spec: JobSpec, run: JobRun, desk: OfferDesk, target: Layout, agents: Sequence[AgentOffer]
) -> list[JobTask]:
    """Launches the tasks that a change of size adds; they are not part of the attempt yet.

    Args:
        spec: the job.
        run: what runs of it; gets them.
        desk: takes the offers.
        target: the job after the change.
        agents: the offers in hand.

    Raises:
        DoesNotFitError: if there is no room for them.
        MasterUnavailableError, CallRefusedError: if the master does not take the launch.
    """
    new, operations = further_tasks(spec, run, target, agents)
    run.add(new)
    try:
        for agent, operation in operations:
            desk.accept(agent, operation)
    except (MasterUnavailableError, CallRefusedError):
        # The master may have taken some; it says of the others that it does not know them.
        for task in new:
            task.stop_requested = True
        raise
    return new


def further_tasks(
    spec: JobSpec, run: JobRun, target: Layout, agents: Sequence[AgentOffer]
) -> tuple[list[JobTask], list[tuple[AgentOffer, dict[str, Any]]]]:
    """The tasks to launch beside those that stay, and the operations that launch them.

    Args:
        spec: the job.
        run: what runs of it.
        target: the job after the change.
        agents: the offers in hand.

    Raises:
        DoesNotFitError: if there is no room for them.
    """
    wanted = dataclasses.replace(target.plan, tasks=target.new)
    new = place(spec, wanted, agents, run.serial, run.used_ports, run.members)
    cluster = _next_cluster(run, target, new)
    for task in new:
        task.member = False
    operations = []
    for agent in agents:
        here = [task for task in new if task.agent_id == agent.agent_id]
        if here:
            operation = launch_operation(spec, target.plan, here, cluster, agent, run.attempt + 1, standby=True)
            operations.append((agent, operation))
    return new, operations


def _next_cluster(run: JobRun, target: Layout, new: Sequence[JobTask]) -> dict[str, list[str]]:
    """Addresses of the whole job after the change."""
    stay = [
        dataclasses.replace(task, planned=target.stays[task.task_id])
        for task in run.members
        if task.task_id in target.stays
    ]
    return cluster_spec([*stay, *new])
