"""Demand of other frameworks, and the fair share of this one (dominant resource fairness)."""

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
    """One framework, from the master.

    Attributes:
        id, name: its id in Mesos, and its name for people.
        used: amounts that its tasks use.
        is_requesting: whether it receives offers: it is connected, and has not suppressed them.
    """

    id: str
    name: str
    used: Amounts
    is_requesting: bool

    @property
    def is_waiting(self) -> bool:
        """Whether it requests resources and uses none."""
        return self.is_requesting and not any(self.used.get(name, 0) > 0 for name in SHARE_RESOURCES)


@dataclass(frozen=True)
class Demand:
    """All frameworks of a cluster.

    Attributes:
        total: all agents' resources.
        others: the other frameworks.
        ours: amounts that all tasks of this framework use.
    """

    total: Amounts
    others: Sequence[FrameworkUsage] = field(default=())
    ours: Amounts = field(default_factory=dict)

    @classmethod
    def among(cls, total: Amounts, uses: Iterable[FrameworkUsage], own_id: str) -> Demand:
        """Separates the framework of this id from the others, if it is among `uses`."""
        all_uses = list(uses)
        ours = next((one.used for one in all_uses if one.id == own_id), {})
        return cls(total, [one for one in all_uses if one.id != own_id], ours)

    @property
    def waiting(self) -> list[FrameworkUsage]:
        """Other frameworks that request resources and use none."""
        return [one for one in self.others if one.is_waiting]

    def max_fair_workers(self, workers: int, worker: Amounts, rest: Amounts) -> int | None:
        """Maximum number of workers with which this framework's dominant share does not exceed an equal share among all
        frameworks that use or request resources.

        If this framework uses more than that, each of its jobs may keep its proportional part of the share; if it uses
        less, the job may have all of the rest.

        Args:
            workers: the job's number of workers.
            worker: amounts of one worker.
            rest: amounts of all other tasks of the job.

        Returns:
            At least 0; None if no other framework requests anything.
        """
        if not any(one.is_requesting for one in self.others):
            return None
        competing = 1 + sum(
            one.is_requesting or any(one.used.get(name, 0) > 0 for name in SHARE_RESOURCES) for one in self.others
        )
        most = math.inf
        for name in SHARE_RESOURCES:
            if worker.get(name, 0) > 0 and self.total.get(name, 0) > 0:
                share = self.total[name] / competing
                own = workers * worker[name] + rest.get(name, 0)
                # The master's answer may be older than some of the job's tasks.
                ours = max(own, self.ours.get(name, 0))
                part = share * own / ours if ours > share else own + share - ours
                most = min(most, (part - rest.get(name, 0)) / worker[name] + 1e-9)
        return max(0, math.floor(most)) if math.isfinite(most) else None


def query_demand(master: LeadingMaster, own_id: str) -> Demand | None:
    """Queries the master for the other frameworks; None if it does not answer."""
    # If the first request times out, a second one would double the delay.
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
    """Queries the master for all frameworks, including this one; None if it does not answer.

    Args:
        ask: path -> the master's answer, None if there is none (`framework.mesos.master.Master.ask`).
    """
    frameworks = ask("/frameworks")
    # Only Mesos' metrics say whether a framework has suppressed its offers.
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
