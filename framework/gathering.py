"""Gathering offers until it is worth planning with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from framework.offers import AgentOffer, OfferBook

SETTLE_S = 0.6
"""Offers count as complete when none has come for so long."""
COLLECT_S = 5.0
"""Planning starts at the latest so long after the first offer."""
NO_OFFER_S = 10.0
"""After so long without any offer the user is told."""


class Gathering:
    """The offers in hand, and since when.

    Args:
        now_s: the time, on any clock that only moves forward.
        settle_s: offers count as complete when none has come for so long; 0 for offers that come all at once.
    """

    def __init__(self, now_s: float, settle_s: float = 0.0) -> None:
        self._settle_s = settle_s
        self._book = OfferBook()
        self._first_s: float | None = None
        self._last_s = now_s

    def add(self, offers: Sequence[dict[str, Any]], now_s: float) -> None:
        """Takes in offers in Mesos' JSON form."""
        for offer in offers:
            self._book.add(offer)
        self._last_s = now_s
        if self._first_s is None:
            self._first_s = now_s

    def settled(self, now_s: float) -> bool:
        """Whether there are offers, and waiting for more is not worth while."""
        if self._first_s is None or not self._book.agents:
            return False
        return now_s - self._last_s >= self._settle_s or now_s - self._first_s >= COLLECT_S

    def begin(self, now_s: float) -> None:
        """Offers are wanted from now on: that none has come before means nothing."""
        self._last_s = now_s

    def is_overdue(self, now_s: float) -> bool:
        """Whether no offer has come for long; true once for each such time."""
        if now_s - self._last_s < NO_OFFER_S:
            return False
        self._last_s = now_s
        return True

    def rescind(self, offer_id: str) -> None:
        """An offer is void."""
        self._book.rescind(offer_id)

    def take(self, agent_id: str) -> AgentOffer | None:
        """Takes one agent's offers out."""
        return self._book.remove(agent_id)

    def agent(self, agent_id: str) -> AgentOffer | None:
        return self._book.agent(agent_id)

    def take_all(self) -> list[AgentOffer]:
        """Takes all offers out; the next one starts a new gathering."""
        self._first_s = None
        return self._book.clear()

    @property
    def agents(self) -> list[AgentOffer]:
        """What is on offer, by name of the agent."""
        return self._book.agents


def describe_offers(agents: Sequence[AgentOffer]) -> str:
    """What is on offer, agent by agent, in words."""
    texts = []
    for agent in agents:
        pool = agent.pool
        texts.append(
            f"{agent.node} {pool.scalar('cpus'):g} cpus, {pool.scalar('mem'):g} MiB, {pool.scalar('gpus'):g} gpus, "
            f"{len(pool.ports())} ports"
        )
    return "; ".join(texts) or "nothing"
