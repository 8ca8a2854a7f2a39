"""Offers in hand and what becomes of them: some are accepted, the rest is given back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from framework.driver import CallRefusedError, MasterUnavailableError
from framework.gathering import Gathering
from framework.mesos_calls import MesosCalls
from framework.offers import AgentOffer

logger = logging.getLogger(__name__)

REFUSE_S = 2.0
"""How long Mesos keeps back what was declined while more is wanted."""


class OfferDesk:
    """Gathers offers, accepts on them, and declines what is left.

    Args:
        mesos: where offers come from.
        now_s: the time, on any clock that only moves forward.
    """

    def __init__(self, mesos: MesosCalls, now_s: float) -> None:
        self._mesos = mesos
        self._unwanted: list[dict[str, str]] = []
        self.gathering = Gathering(now_s)

    def forget(self) -> None:
        """The connection is gone, and offers do not outlive it."""
        self.gathering.take_all()
        self._unwanted.clear()

    def refuse(self, offers: Sequence[dict[str, Any]]) -> None:
        """Declines offers in Mesos' JSON form as they come."""
        self._unwanted += [offer["id"] for offer in offers]
        self.give_back()

    def decline_rest(self) -> None:
        """Declines everything in hand."""
        agents = self.gathering.take_all()
        self._unwanted += [{"value": offer_id} for agent in agents for offer_id in agent.offer_ids]
        self.give_back()

    def give_back(self) -> None:
        """Declines what is not wanted; what the master did not take stays noted for the next call."""
        if not self._unwanted:
            return
        try:
            self._mesos.declineOffer(self._unwanted, {"refuse_seconds": REFUSE_S})
        except MasterUnavailableError as error:
            logger.info("%s", error)
            return
        except CallRefusedError as error:
            # Void offers: a master that was just restarted does not know the subscription they came by.
            logger.info("%s", error)
        self._unwanted = []

    def accept(self, agent: AgentOffer, operation: dict[str, Any]) -> None:
        """Uses an agent's offers for an operation; Mesos offers the rest of them again.

        Raises:
            MasterUnavailableError: if the call could not be delivered.
            CallRefusedError: if the master refused it.
        """
        ids = [{"value": offer_id} for offer_id in agent.offer_ids]
        self._mesos.acceptOffers(ids, [operation], {"refuse_seconds": REFUSE_S})
        self.gathering.take(agent.agent_id)
