"""Immutable snapshots of a service's loop, readable from any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from framework.cluster.demand import PilotNotice
from framework.scheduler.agents import AgentFacts
from framework.scheduler.constraints import Constraints
from framework.scheduler.feasibility import Sizing
from framework.scheduler.job import Need
from framework.scheduler.offer_pool import LastOffer
from framework.scheduler.reservation import Reservation


@dataclass(frozen=True)
class JobFacts:
    """A job that has not ended.

    Attributes:
        job_id, user: the job and its user.
        need: purpose of the offers that it requests.
        is_ending: whether it has been cancelled.
        constraints: which agents it may use.
        sizing: its minimum size; None if unknown.
        allocated: agent -> resource -> amount that its tasks use.
        tasks: number of tasks that have not ended.
        waits_for_allocation: whether it waits for workers from the central allocation.
        excluded: agent -> remaining seconds of its cooldown in this job.
        waits_since_s: time since which it is pending without tasks, in seconds since the epoch; None if it is not.
        missing_tasks: number of further tasks that it could use, for a job that counts them.
    """

    job_id: str
    user: str
    need: Need
    is_ending: bool = False
    constraints: Constraints = field(default_factory=Constraints)
    sizing: Sizing | None = None
    allocated: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tasks: int = 0
    waits_for_allocation: bool = False
    excluded: Mapping[str, float] = field(default_factory=dict)
    waits_since_s: float | None = None
    missing_tasks: int | None = None

    @property
    def waits(self) -> bool:
        """Whether it is pending without tasks."""
        return not self.tasks and not self.is_ending and self.need in (Need.REPLACE_LOST, Need.START)


@dataclass(frozen=True)
class Snapshot:
    """A service at one moment.

    Attributes:
        time_s: time of the snapshot, in seconds since the epoch.
        connected: whether the master is connected.
        agents: registered agents, by name; None if unknown.
        others: agent -> usage by other frameworks.
        gone: agents that have deregistered.
        offers: agent -> its last offer.
        last_offer_s: when the last offer arrived, in seconds since the epoch; None if none has.
        jobs: those that have not ended, by id.
        order: ids of the jobs that request offers, in service order.
        shares: user -> dominant share of the cluster (0 to 1) divided by the user's weight.
        reservation: the current reservation; None if there is none.
        reserved_for_s: its age in seconds.
        pilots: Slurm jobs that bring further machines; None if there are none.
    """

    time_s: float
    connected: bool = False
    agents: tuple[AgentFacts, ...] | None = None
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gone: tuple[AgentFacts, ...] = ()
    offers: Mapping[str, LastOffer] = field(default_factory=dict)
    last_offer_s: float | None = None
    jobs: Mapping[str, JobFacts] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    reservation: Reservation | None = None
    reserved_for_s: float = 0.0
    pilots: PilotNotice | None = None

    def queue_positions(self) -> dict[str, int]:
        """Position in the queue, from 1, of each job that is pending without tasks."""
        waiting = [job_id for job_id in self.order if (job := self.jobs.get(job_id)) is not None and job.waits]
        return {job_id: place for place, job_id in enumerate(waiting, start=1)}
