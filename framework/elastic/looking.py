"""The offers that a running job looks at now and then: asked for, gathered, given back."""

from __future__ import annotations

from framework.mesos_calls import MesosCalls, try_now
from framework.offer_desk import OfferDesk

GATHER_S = 6.0
"""How long offers are waited for."""


class Looking:
    """Whether a job looks at offers just now.

    Args:
        mesos: is asked for offers, and for none.
        desk: offers in hand.
    """

    def __init__(self, mesos: MesosCalls, desk: OfferDesk) -> None:
        self._mesos = mesos
        self._desk = desk
        self._since_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether it does."""
        return self._since_s is not None

    def begin(self, now_s: float) -> None:
        """Asks for offers."""
        self._since_s = now_s
        try_now(self._mesos.reviveOffers)

    def is_complete(self, now_s: float) -> bool:
        """Whether it looks, and waiting for more offers is not worth while."""
        if self._since_s is None:
            return False
        return self._desk.gathering.settled(now_s) or now_s - self._since_s >= GATHER_S

    def end(self) -> None:
        """Gives back what is left."""
        if self.is_on:
            self._since_s = None
            self._desk.decline_rest()
            try_now(self._mesos.suppressOffers)

    def forget(self) -> None:
        """All of the job is being ended."""
        self._since_s = None
