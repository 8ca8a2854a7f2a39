"""Why a job does not run, or not yet: the answer of `dike explain`, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from framework.scheduler.records import TaskNeed


class Verdict(enum.StrEnum):
    """What decides over a job at the moment."""

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
    """What the agents have is reserved for other roles than the service's."""
    NEVER_FITS = "never-fits"
    """No agents seen so far could hold it even if nothing else ran on them."""
    EXCLUDED = "excluded"
    """It leaves out, after failures, every agent that could hold it."""
    RESERVED = "reserved"
    """What it could use is kept free for a job that has waited longer."""
    NO_OFFERS = "no-offers"
    """Nothing that it could use has been offered: other frameworks hold it."""
    RESOURCES = "resources"
    """What is free does not hold it."""
    TURN = "turn"
    """Others are served before it."""


@dataclass(frozen=True)
class AgentRow:
    """One agent, as one job sees it; amounts by resource: `cpus`, `mem` and `disk` in MiB, `gpus`, `ports`.

    Attributes:
        agent_id: Mesos' id of it.
        node: its host name.
        total: what our role may use of it when nothing runs there.
        free: what it offered last, less what was launched on that since; None if it never offered anything.
        offered_s: when that was, in seconds since the epoch; None if never.
        missing: what that is short of for the one of `Explanation.needs` that lacks most; empty if it has room for
            each, if it never offered anything, and for a job that runs. Where each of the tasks has room alone but
            not all have it together: what is short for the first that is left over, beside the others.
        obstacles: what else is in the way, one sentence each.
        held_by_jobs: job of this service, this one included -> what its tasks hold there.
        held_by_others: what other frameworks hold there.
        can_ever_hold: whether it could hold the first of `Explanation.needs` if nothing ran there and nothing else
            was in the way.
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
    """What stands in a job's way.

    Attributes:
        job_id: which job.
        verdict: what decides.
        sentence: the same in one sentence, for people.
        needs: what it takes at least, the most demanding task first; empty where that is not known.
        agents: all agents, by name.
        ahead: jobs that are served before it, in their order.
        last_offer_s: when an offer last came to the service, in seconds since the epoch; None if none has.
        could_be_freed: what holds resources that it could have, one sentence each.
    """

    job_id: str
    verdict: Verdict
    sentence: str
    needs: tuple[TaskNeed, ...] = ()
    agents: tuple[AgentRow, ...] = ()
    ahead: tuple[str, ...] = ()
    last_offer_s: float | None = None
    could_be_freed: tuple[str, ...] = ()
