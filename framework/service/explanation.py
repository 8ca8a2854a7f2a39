"""Why a job does not run, or not yet: the answer of `dike explain`, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


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
class TaskNeed:
    """What one of a job's tasks takes at least.

    Attributes:
        name: such as `worker`, `parameter server`, `chief` or `slot`.
        count: how many of them there have to be at least.
        cpus: CPU cores.
        mem: MiB.
        disk: MiB.
        gpus: whole GPUs.
        ports: how many.
    """

    name: str
    count: int = 1
    cpus: float = 0.0
    mem: float = 0.0
    disk: float = 0.0
    gpus: float = 0.0
    ports: int = 0

    @property
    def amounts(self) -> dict[str, float]:
        """Resource -> amount, of those that it needs."""
        all_of_them = {
            "cpus": self.cpus,
            "mem": self.mem,
            "disk": self.disk,
            "gpus": self.gpus,
            "ports": float(self.ports),
        }
        return {name: amount for name, amount in all_of_them.items() if amount > 0}

    def missing(self, free: Mapping[str, float]) -> dict[str, float]:
        """Resource -> by how much these amounts are too little for one such task; empty if they are not."""
        short = {name: round(amount - free.get(name, 0.0), 3) for name, amount in self.amounts.items()}
        return {name: amount for name, amount in short.items() if amount > 0}

    def lack(self, free: Mapping[str, float]) -> float:
        """Which part (0 to 1) of the resource that is scarcest for one such task these amounts lack."""
        return max((short / self.amounts[name] for name, short in self.missing(free).items()), default=0.0)


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
            each, if it never offered anything, and for a job that runs.
        obstacles: what else is in the way, one sentence each.
        held_by_jobs: job of this service -> what its tasks hold there.
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


def describe(amounts: Mapping[str, float]) -> str:
    """Amounts of resources in words: `2 cpus, 512 MiB, 1 gpu`."""
    words = []
    for name, amount in amounts.items():
        match name:
            case "mem":
                words.append(f"{amount:g} MiB")
            case "disk":
                words.append(f"{amount:g} MiB of disk")
            case _:
                words.append(f"{amount:g} {name.removesuffix('s') if amount == 1 else name}")
    return ", ".join(words) or "nothing"
