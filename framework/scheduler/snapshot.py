"""What the service's loop publishes of itself: immutable, so that any thread may read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        job_id, user: whose it is.
        need: what it wants offers for.
        is_ending: whether its end was asked for.
        constraints: which agents it may use.
        sizing: what it takes; None where that is not known.
        held: agent -> resource -> amount that its tasks hold.
        tasks: how many have not ended.
        waits_for_allocation: whether it waits for workers to be given to it, in the rounds of an allocation.
        excluded: agent -> for how many seconds the job leaves it out, after failures there.
        waits_since_s: since when it waits with nothing running, in seconds since the epoch; None if it does not.
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

    @property
    def waits(self) -> bool:
        """Whether nothing of it runs although it wants to."""
        return not self.tasks and not self.is_ending and self.need in (Need.REPLACE_LOST, Need.START)


@dataclass(frozen=True)
class Snapshot:
    """A service at one moment.

    Attributes:
        time_s: when, in seconds since the epoch.
        connected: whether there is a connection to the master.
        agents: those registered, by name; None where the master has not told.
        others: agent -> what other frameworks hold there.
        gone: agents that were registered and are not any more.
        offers: agent -> what it offered last.
        last_offer_s: when an offer last came, in seconds since the epoch; None if none has.
        jobs: those that have not ended, by id.
        order: jobs that want offers, those served first first.
        shares: user -> dominant share of the cluster (0 to 1) divided by the user's weight.
        reservation: agents kept for a job; None if there are none.
        reserved_for_s: since how many seconds the reservation stands.
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

    def queue_positions(self) -> dict[str, int]:
        """Job -> its place in the queue, from 1, of those that wait with nothing running."""
        waiting = [job_id for job_id in self.order if (job := self.jobs.get(job_id)) is not None and job.waits]
        return {job_id: place for place, job_id in enumerate(waiting, start=1)}
