"""What other frameworks hold and want, and what a fair share of the cluster is (dominant resource fairness)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework.mesos.master import LeadingMaster
from framework.mesos.offers import MIB
from framework.scheduler.amounts import SHARE_RESOURCES, Amounts


@dataclass(frozen=True)
class FrameworkUsage:
    """One framework as the master sees it.

    Attributes:
        id, name: Mesos' id of it, and its name for people.
        used: what its tasks hold.
        is_requesting: whether it is to be offered resources: connected and not suppressed.
    """

    id: str
    name: str
    used: Amounts
    is_requesting: bool

    @property
    def is_waiting(self) -> bool:
        """Whether it wants resources and holds none."""
        return self.is_requesting and not any(self.used.get(name, 0) > 0 for name in SHARE_RESOURCES)


@dataclass(frozen=True)
class Demand:
    """Who shares the cluster.

    Attributes:
        total: all agents' resources.
        others: the other frameworks.
        ours: what all tasks of the framework that asks hold.
    """

    total: Amounts
    others: Sequence[FrameworkUsage] = field(default=())
    ours: Amounts = field(default_factory=dict)

    @classmethod
    def among(cls, total: Amounts, uses: Iterable[FrameworkUsage], own_id: str) -> Demand:
        """Who shares the cluster with the framework of this id, which may be among those given."""
        all_uses = list(uses)
        ours = next((one.used for one in all_uses if one.id == own_id), {})
        return cls(total, [one for one in all_uses if one.id != own_id], ours)

    @property
    def waiting(self) -> list[FrameworkUsage]:
        """Those that want resources and hold none."""
        return [one for one in self.others if one.is_waiting]

    def max_fair_workers(self, workers: int, worker: Amounts, rest: Amounts) -> int | None:
        """Most workers with which our dominant share is not above that of each framework that holds or wants any.

        Where we hold more than that, each of our jobs may keep as much of the share as it has of what we hold;
        where we hold less, it may have all of what is missing.

        Args:
            workers: how many the job has.
            worker: what one worker takes.
            rest: what the job's other tasks take together.

        Returns:
            At least 0; None if no other framework wants anything.
        """
        if not any(one.is_requesting for one in self.others):
            return None
        sharing = 1 + sum(
            one.is_requesting or any(one.used.get(name, 0) > 0 for name in SHARE_RESOURCES) for one in self.others
        )
        most = math.inf
        for name in SHARE_RESOURCES:
            if worker.get(name, 0) > 0 and self.total.get(name, 0) > 0:
                share = self.total[name] / sharing
                own = workers * worker[name] + rest.get(name, 0)
                # The master's answer may be older than the job's tasks.
                ours = max(own, self.ours.get(name, 0))
                part = share * own / ours if ours > share else own + share - ours
                most = min(most, (part - rest.get(name, 0)) / worker[name] + 1e-9)
        return max(0, math.floor(most)) if math.isfinite(most) else None


def query_demand(master: LeadingMaster, own_id: str) -> Demand | None:
    """What the master says of the other frameworks; None where it does not tell.

    Args:
        master: whom to ask.
        own_id: Mesos' id of the framework that asks.
    """
    # One that does not answer is not waited for again.
    nodes = master.agents()
    uses = framework_usages(master.ask) if nodes else None
    if not nodes or uses is None:
        return None
    total = {
        "cpus": sum(node.cpus for node in nodes),
        "mem": sum(node.mem_bytes for node in nodes) / MIB,
        "gpus": float(sum(node.gpus for node in nodes)),
    }
    return Demand.among(total, uses, own_id)


def framework_usages(ask: Callable[[str], dict[str, Any] | None]) -> list[FrameworkUsage] | None:
    """All frameworks, ours too; None where the master does not tell.

    Args:
        ask: path -> what the master answers, None where it does not (`framework.mesos.master.Master.ask`).
    """
    frameworks = ask("/frameworks")
    # Mesos tells in its metrics alone whether a framework has suppressed its offers.
    metrics = None if frameworks is None else ask("/metrics/snapshot")
    if frameworks is None or metrics is None:
        return None
    return [_use(one, metrics) for one in frameworks.get("frameworks", ())]


def _use(framework: Mapping[str, Any], metrics: Mapping[str, float]) -> FrameworkUsage:
    name = str(framework.get("id"))
    flags = [value for key, value in metrics.items() if key.endswith("/suppressed") and f"/{name}/" in key]
    connected = bool(framework.get("active")) and bool(framework.get("connected"))
    used = framework.get("used_resources", {})
    return FrameworkUsage(
        id=name,
        name=str(framework.get("name")),
        used={resource: float(used.get(resource, 0)) for resource in SHARE_RESOURCES},
        is_requesting=connected and not (flags and all(flags)),
    )
