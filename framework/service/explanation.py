"""Why a job does not run: the answer of `dike explain`, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from framework.scheduler.records import TaskNeed


class Verdict(enum.StrEnum):
    """The main reason for a job's state."""

    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"
    NOT_CONNECTED = "not-connected"
    """The service has no connection to the Mesos master."""
    NO_AGENTS = "no-agents"
    """No agent is registered with the master."""
    CONSTRAINTS = "constraints"
    """Its constraints admit no agent, or none that is large enough."""
    ROLE = "role"
    """The agents' resources are reserved for other roles than the service's."""
    NEVER_FITS = "never-fits"
    """The agents seen so far could not run it even if they were empty."""
    EXCLUDED = "excluded"
    """After failures it avoids every agent that could run it."""
    RESERVED = "reserved"
    """The agents it could use are reserved for a job that has waited longer."""
    NO_OFFERS = "no-offers"
    """No suitable resources are offered: other frameworks use them."""
    RESOURCES = "resources"
    """The free resources do not suffice."""
    HELD = "held"
    """It is held, or waits for the end of another job (`--after`)."""
    TURN = "turn"
    """Other jobs are ahead of it."""


@dataclass(frozen=True)
class AgentRow:
    """One agent from the view of a job; amounts by resource: `cpus`, `mem` and `disk` in MiB, `gpus`, `ports`.

    Attributes:
        total: what the service's role may use of it when it is empty.
        free: its last offer, less what was launched on it since; None if it never offered anything.
        offered_s: time of that offer, in seconds since the epoch.
        missing: what `free` lacks for the entry of `Explanation.needs` that lacks most; empty without an offer and for
            a running job. Where each task fits alone but not all together: what the first unplaced task lacks.
        obstacles: other obstacles, one sentence each.
        held_by_jobs: job of this service, this one included -> what its tasks use there.
        held_by_others: what other frameworks use there.
        can_ever_hold: whether the empty agent could run the first entry of `Explanation.needs`, other obstacles aside.
    """

    agent_id: str
    node: str
    total: dict[str, float] = field(default_factory=dict)
    free: dict[str, float] | None = None
    offered_s: float | None = None
    missing: dict[str, float] = field(default_factory=dict)
    obstacles: tuple[str, ...] = ()
    held_by_jobs: dict[str, dict[str, float]] = field(default_factory=dict)
    held_by_others: dict[str, float] = field(default_factory=dict)
    can_ever_hold: bool = True


@dataclass(frozen=True)
class Explanation:
    """Why a job does not run.

    Attributes:
        sentence: the verdict in one sentence, for people.
        needs: its minimum needs, the most demanding task first; empty if unknown.
        ahead: jobs that are served before it, in order.
        last_offer_s: time of the last offer to the service, in seconds since the epoch; None before the first.
        could_be_freed: jobs that use resources which it could use, one sentence each.
    """

    job_id: str
    verdict: Verdict
    sentence: str
    needs: tuple[TaskNeed, ...] = ()
    agents: tuple[AgentRow, ...] = ()
    ahead: tuple[str, ...] = ()
    last_offer_s: float | None = None
    could_be_freed: tuple[str, ...] = ()
