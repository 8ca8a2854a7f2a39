"""The offers that a framework holds for its jobs, whole as they came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from framework.gathering import COLLECT_S, SETTLE_S

Offer = dict[str, Any]
"""An offer in Mesos' JSON form."""


def offer_id(offer: Offer) -> str:
    return str(offer["id"]["value"])


def agent_id(offer: Offer) -> str:
    return str(offer["agent_id"]["value"])


class OfferPool:
    """Offers in hand, those that a job looks at just now excepted.

    Attributes:
        generation: grows whenever there is something new to look at.
        last_offer_s: when the last offer came; None before the first.
    """

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        self._since_s: dict[str, float] = {}
        self._first_s: float | None = None
        self.last_offer_s: float | None = None
        self.generation = 0

    @property
    def offers(self) -> list[Offer]:
        """All of them, oldest first."""
        return list(self._offers.values())

    def held_since_s(self, offer: Offer) -> float:
        """When an offer in hand came."""
        return self._since_s[offer_id(offer)]

    def add(self, offers: Iterable[Offer], now_s: float) -> None:
        """Takes in what has come from Mesos."""
        for offer in offers:
            self._offers[offer_id(offer)] = offer
            self._since_s[offer_id(offer)] = now_s
        self.last_offer_s = now_s
        if self._first_s is None:
            self._first_s = now_s
        self.generation += 1

    def settled(self, now_s: float) -> bool:
        """Whether there are offers, and waiting for more of them is not worth while."""
        if not self._offers or self._first_s is None or self.last_offer_s is None:
            return False
        return now_s - self.last_offer_s >= SETTLE_S or now_s - self._first_s >= COLLECT_S

    def lend(self, offers: Sequence[Offer]) -> None:
        """Takes offers out that a job is going to look at; they come back by `put_back`, or are used."""
        for offer in offers:
            del self._offers[offer_id(offer)]

    def put_back(self, offers: Iterable[Offer]) -> None:
        """Takes back what a job has looked at and does not want."""
        for offer in offers:
            self._offers[offer_id(offer)] = offer

    def used(self, ids: Iterable[str]) -> None:
        """Forgets offers that have been accepted, or are void."""
        for one in ids:
            self._offers.pop(one, None)
            self._since_s.pop(one, None)
        self._begin_again_if_empty()

    def take(self, which: Callable[[Offer], bool]) -> list[str]:
        """Takes out all that match, to be declined; returns their ids."""
        ids = [one for one, offer in self._offers.items() if which(offer)]
        self.used(ids)
        return ids

    def clear(self) -> None:
        """The connection is gone, and offers do not outlive it."""
        self._offers.clear()
        self._since_s.clear()
        self._first_s = None

    def _begin_again_if_empty(self) -> None:
        if not self._since_s:
            self._first_s = None
