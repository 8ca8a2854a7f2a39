"""The unused offers of a framework, unchanged as received."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.mesos.resources import usable_amounts
from framework.scheduler.amounts import covers, subtract, totals

Offer = dict[str, Any]
"""An offer in Mesos' JSON form."""

Supply = Mapping[str, Mapping[str, float]]
"""Agent -> resource -> offered amount: `cpus`, `mem` and `disk` in MiB, `gpus`, number of `ports`."""

SETTLE_S = 0.6
"""Offers count as complete when none has arrived for this time."""
MAX_COLLECT_S = 5.0
"""Maximum delay after the first offer."""
NEW_AGENT_S = 60.0
"""An unknown agent with an offer younger than this may not be listed by the master yet."""
OLD_OFFER_S = 24 * 3600.0
"""If the agents are unknown, those without an offer for this time count as gone."""


@dataclass(frozen=True)
class LastOffer:
    """Last offer of an agent.

    Attributes:
        free: resource -> amount, less what was launched on it since.
        time_s: seconds since the epoch.
    """

    free: Mapping[str, float]
    time_s: float


def offer_id(offer: Offer) -> str:
    return str(offer["id"]["value"])


def agent_id(offer: Offer) -> str:
    return str(offer["agent_id"]["value"])


def amounts_of(offer: Offer) -> dict[str, float]:
    """Usable amount of each resource in an offer."""
    return usable_amounts(offer.get("resources", ()))


def is_within(supply: Supply, other: Supply) -> bool:
    """Whether the other supply covers this one."""
    return all(agent in other and covers(other[agent], amounts) for agent, amounts in supply.items())


@dataclass
class _PooledOffer:
    offer: Offer
    amounts: Mapping[str, float]
    since_s: float
    is_locked: bool = False


class OfferPool:
    """Unused offers, some of them locked for jobs that are planning.

    Args:
        agents: number of agents, if known and not shared with other frameworks: offers are complete once each agent
            offers as much as it ever has.

    Attributes:
        generation: grows with every arrival of offers.
        version: grows with every change.
        last: agent -> its last offer, unused or not.
        last_offer_s: when the last offer arrived, in seconds since the epoch; None before the first.
    """

    def __init__(self, agents: int | None = None) -> None:
        self._agents = agents
        self._most: dict[str, Mapping[str, float]] = {}
        self._pooled: dict[str, _PooledOffer] = {}
        self._new_since_s: float | None = None
        self._newest_s = 0.0
        self.generation = 0
        self.version = 0
        self.last: dict[str, LastOffer] = {}
        self.last_offer_s: float | None = None

    def __len__(self) -> int:
        return len(self._pooled)

    def __contains__(self, one: str) -> bool:
        """Whether the offer of this id is unused."""
        return one in self._pooled

    @property
    def offers(self) -> list[Offer]:
        """All that are not locked, oldest first."""
        return [pooled.offer for pooled in self._pooled.values() if not pooled.is_locked]

    def received_s(self, offer: Offer) -> float:
        return self._pooled[offer_id(offer)].since_s

    def supply(self, offers: Iterable[Offer]) -> Supply:
        """Total resources of these offers by agent."""
        return totals((agent_id(offer), self._pooled[offer_id(offer)].amounts) for offer in offers)

    def add(self, offers: Sequence[Offer], now_s: float) -> None:
        """Adds offers from Mesos."""
        for offer in offers:
            self._pooled[offer_id(offer)] = _PooledOffer(offer, amounts_of(offer), now_s)
        agents = {agent_id(offer) for offer in offers}
        supply = self.supply(pooled.offer for pooled in self._pooled.values() if agent_id(pooled.offer) in agents)
        if self._agents is not None:
            for agent, amounts in supply.items():
                most = self._most.get(agent, {})
                self._most[agent] = {name: max(amount, most.get(name, 0.0)) for name, amount in amounts.items()}
        self.last.update({agent: LastOffer(free, time.time()) for agent, free in supply.items()})
        if self._new_since_s is None:
            self._new_since_s = now_s
        self._newest_s = now_s
        self.last_offer_s = time.time()
        self.generation += 1
        self.version += 1

    def is_settled(self, now_s: float) -> bool:
        """Whether there are offers, and waiting for more is not worthwhile."""
        if not self._pooled:
            return False
        first_s = self._new_since_s
        if self._agents is not None and self._has_all(self._agents):
            return True
        return first_s is None or now_s - self._newest_s >= SETTLE_S or now_s - first_s >= MAX_COLLECT_S

    def _has_all(self, agents: int) -> bool:
        supply = self.supply(pooled.offer for pooled in self._pooled.values())
        return len(supply) == agents and all(
            amounts.get(name, 0.0) >= most
            for agent, amounts in supply.items()
            for name, most in self._most[agent].items()
        )

    def settle(self) -> None:
        """Marks the present offers as settled; only newer ones are collected again."""
        self._new_since_s = None

    def lock(self, offers: Sequence[Offer]) -> None:
        """Locks offers for a job that plans on them, until `unlock` or `used`."""
        for offer in offers:
            self._pooled[offer_id(offer)].is_locked = True
        self.version += 1

    def unlock(self, offers: Iterable[Offer]) -> None:
        for offer in offers:
            self._pooled[offer_id(offer)].is_locked = False
        self.version += 1

    def used(self, offers: Sequence[Offer], amounts: Mapping[str, float]) -> None:
        """Removes one agent's offers after a launch of these amounts; Mesos offers the rest again."""
        agent = agent_id(offers[0])
        for offer in offers:
            del self._pooled[offer_id(offer)]
        last = self.last[agent]
        self.last[agent] = LastOffer(subtract(last.free, amounts), last.time_s)
        self._changed()

    def void(self, one: str) -> None:
        """Removes an offer that was rescinded."""
        if self._pooled.pop(one, None) is not None:
            self._changed()

    def take(self, which: Callable[[Offer], bool]) -> list[Offer]:
        """Removes and returns all that match and are not locked, to be declined."""
        taken = [offer for offer in self.offers if which(offer)]
        for offer in taken:
            del self._pooled[offer_id(offer)]
        if taken:
            self._changed()
        return taken

    def forget_gone_agents(self, known: Collection[str] | None) -> None:
        """Forgets the last offers of agents that are gone.

        Args:
            known: the registered agents; None if unknown: agents count as gone after a day without an offer.
        """
        offering = {agent_id(pooled.offer) for pooled in self._pooled.values()}
        now_s = time.time()
        self.last = {
            agent: last
            for agent, last in self.last.items()
            if agent in offering
            or now_s - last.time_s < NEW_AGENT_S
            or (now_s - last.time_s < OLD_OFFER_S if known is None else agent in known)
        }

    def clear(self) -> None:
        """Removes all offers, which become void with the connection."""
        self._pooled.clear()
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        if not self._pooled:
            self._new_since_s = None
