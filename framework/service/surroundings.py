"""What a service gives to each of its jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from framework.containers import Volume
from framework.elastic.demand import Demand
from framework.job_plan import AllAgents
from framework.service.mounts import Mounts
from framework.service.store import ServiceStore


@dataclass(frozen=True)
class Surroundings:
    """What a service gives to each of its jobs.

    Attributes:
        store: the service's database.
        bundle_url: bundle token -> where executors fetch that bundle.
        python: interpreter on the agents.
        image: container image for the tasks; None for the agent's own file system.
        allowed_volumes: what users may ask for in their containers.
        hand_out_gpus: whether we count GPU devices out, for agents that neither isolate nor announce them.
        checkpoint_root: folder for the checkpoints of jobs that name none; the same path on all agents.
        agents: constraints -> lists the agents that meet them (`framework.job_plan.AllAgents`).
        demand: what other frameworks than the one of this id hold and want, None where that is not known; at once.
    """

    store: ServiceStore
    bundle_url: Callable[[str], str]
    python: str
    image: str | None
    hand_out_gpus: bool
    checkpoint_root: str
    agents: Callable[[tuple[str, ...]], AllAgents]
    demand: Callable[[str], Demand | None]
    allowed_volumes: tuple[Volume, ...] = ()

    @property
    def mounts(self) -> Mounts:
        """What its jobs find in their containers."""
        return Mounts(self.image, self.checkpoint_root, self.allowed_volumes)
