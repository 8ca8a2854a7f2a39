"""What jobs ask of Mesos, on its way from their seats to the master."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from framework.driver import OffersGoneError
from framework.mesos_calls import MesosCalls
from framework.service.dealing import Dealing
from framework.service.ledger import Ledger
from framework.service.metrics import Metrics
from framework.service.offer_pool import Offer
from framework.service.seat import Seat, ids_of
from framework.service.standing import added


class SeatCalls:
    """The hub's side of the seats (`framework.service.seat.Front`).

    Args:
        mesos: the master.
        ledger: the tasks.
        dealing: the offers.
        metrics: counts what happens.
    """

    def __init__(self, mesos: MesosCalls, ledger: Ledger, dealing: Dealing, metrics: Metrics) -> None:
        self._mesos = mesos
        self._ledger = ledger
        self._dealing = dealing
        self._metrics = metrics

    def launch(self, seat: Seat, offers: Sequence[Offer], operations: Sequence[dict[str, Any]]) -> None:
        """Launches tasks of a job, on offers of one agent, after having written that down.

        Raises:
            MasterUnavailableError: if the call could not be delivered.
            CallRefusedError: if the master refused it, or the offers are void.
        """
        if not offers:
            raise OffersGoneError("The offers were withdrawn before they could be used.")
        tasks = self._ledger.intends(seat, offers, operations)
        self._dealing.pool.used(offers, added(task.resources for task in tasks))
        try:
            # No filter: another job may want the rest at once.
            self._mesos.acceptOffers(ids_of(offers), operations, {"refuse_seconds": 0.0})
        except Exception:
            # Whether the master has taken it is not known.
            self._dealing.not_used(offers)
            self._ledger.doubts(tasks)
            raise
        self._metrics.launched(len(tasks))

    def give_back(self, seat: Seat, offers: Sequence[Offer]) -> None:
        """A job does not want offers that it has looked at."""
        self._dealing.returned(seat, offers)

    def kill(self, seat: Seat, task_id: str, agent_id: str) -> None:
        """A job wants a task to end, which may never have been launched; the job hears what the master says of it."""
        self._ledger.owns(seat, [task_id])
        self._mesos.kill(task_id, agent_id)

    def reconcile(self, seat: Seat, tasks: dict[str, str]) -> None:
        """A job wants to know how its tasks stand."""
        self._ledger.owns(seat, tasks)
        self._mesos.reconcile(tasks)

    def send(self, executor_id: Any, agent_id: Any, data: str) -> None:
        self._mesos.sendFrameworkMessage(executor_id, agent_id, data)
