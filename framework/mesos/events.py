"""What Mesos tells a framework, as immutable events in one queue.

pymesos calls back on its own thread; `EventScheduler` only files what it hears, so that a job's logic runs on one
thread, in the order of arrival, and can be tested by feeding it events.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor.driver import pymesos
from executor.messages import storable


@dataclass(frozen=True)
class Subscribed:
    """The master has taken the framework in, for the first time or again.

    Attributes:
        framework_id: Mesos' id of us.
        master: its `host:port`.
        master_age_s: for how long it has been the leading master; None where that is not known.
        version: its Mesos version; empty where it has not told.
    """

    framework_id: str
    master: str
    master_age_s: float | None = None
    version: str = ""


@dataclass(frozen=True)
class Disconnected:
    """The connection to the master is gone; the driver keeps trying."""


@dataclass(frozen=True)
class OffersArrived:
    """Offers in Mesos' JSON form."""

    offers: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class OfferRescinded:
    """An offer is no longer valid."""

    offer_id: str


@dataclass(frozen=True)
class StatusUpdate:
    """A task's state, in Mesos' JSON form; to be acknowledged once it has been dealt with."""

    status: dict[str, Any]

    @property
    def task_id(self) -> str:
        return str(self.status["task_id"]["value"])

    @property
    def state(self) -> str:
        return str(self.status["state"])


@dataclass(frozen=True)
class MessageArrived:
    """A message from an executor, in base64."""

    agent_id: str
    executor_id: str
    data: str


@dataclass(frozen=True)
class ExecutorLost:
    """An executor has ended; `status` is its wait status."""

    agent_id: str
    executor_id: str
    status: int

    def log(self, logger: logging.Logger) -> None:
        """Mesos also sends a status update for each task that went with it, so this is for the log only."""
        how = f"executor {self.executor_id} on agent {self.agent_id} has ended with wait status {self.status}"
        logger.log(logging.INFO if self.status else logging.DEBUG, "%s", how)


@dataclass(frozen=True)
class AgentLost:
    """An agent is gone."""

    agent_id: str

    def log(self, logger: logging.Logger) -> None:
        """As `ExecutorLost.log`."""
        logger.info("agent %s is gone", self.agent_id)


@dataclass(frozen=True)
class Refused:
    """The master does not want this framework; trying again would not help."""

    reason: str
    http_status: int | None = None


@dataclass(frozen=True)
class JobSubmitted:
    """A service's client has submitted a job; the database has it."""

    job_id: str


@dataclass(frozen=True)
class KillRequested:
    """A service's client wants a job to end; the database has that too."""

    job_id: str
    user: str = ""


@dataclass(frozen=True)
class WorkDone:
    """Something is done in the background: wakes the loop, whose next round sees to it."""


Event = (
    Subscribed
    | Disconnected
    | OffersArrived
    | OfferRescinded
    | StatusUpdate
    | MessageArrived
    | ExecutorLost
    | AgentLost
    | Refused
    | JobSubmitted
    | KillRequested
    | WorkDone
)


class EventScheduler(pymesos.Scheduler):
    """Files everything pymesos reports in `events`.

    Args:
        master_age_s: from a master's `host:port`, for how long it has been the leading one; None where that is not
            known (`framework.mesos.master.leader_age_s`).
    """

    def __init__(self, master_age_s: Callable[[str], float | None] = lambda address: None) -> None:
        self._master_age_s = master_age_s
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def registered(self, driver: Any, framework_id: dict[str, Any], master_info: dict[str, Any]) -> None:
        self._subscribed(framework_id["value"], master_info)

    def reregistered(self, driver: Any, master_info: dict[str, Any]) -> None:
        self._subscribed(driver.framework_id, master_info)

    def disconnected(self, driver: Any) -> None:
        self.events.put(Disconnected())

    def resourceOffers(self, driver: Any, offers: list[dict[str, Any]]) -> None:  # noqa: N802
        self.events.put(OffersArrived(tuple(offers)))

    def offerRescinded(self, driver: Any, offer_id: dict[str, Any]) -> None:  # noqa: N802
        self.events.put(OfferRescinded(offer_id["value"]))

    def statusUpdate(self, driver: Any, status: dict[str, Any]) -> None:  # noqa: N802
        # Its message may be the executor's.
        self.events.put(StatusUpdate(storable(status)))

    def frameworkMessage(  # noqa: N802
        self, driver: Any, executor_id: dict[str, Any], agent_id: dict[str, Any], message: str
    ) -> None:
        self.events.put(MessageArrived(agent_id["value"], executor_id["value"], message))

    def executorLost(  # noqa: N802
        self, driver: Any, executor_id: dict[str, Any], agent_id: dict[str, Any], status: int
    ) -> None:
        self.events.put(ExecutorLost(agent_id["value"], executor_id["value"], status))

    def slaveLost(self, driver: Any, agent_id: dict[str, Any]) -> None:  # noqa: N802
        self.events.put(AgentLost(agent_id["value"]))

    def error(self, driver: Any, message: str) -> None:
        # pymesos would subscribe again, and so throw out whoever took this framework over.
        driver.stop(failover=True)
        self.events.put(Refused(message))

    def _subscribed(self, framework_id: str, master_info: dict[str, Any]) -> None:
        # Its name need not be known here.
        host = master_info.get("address", {}).get("ip") or master_info["hostname"]
        address = f"{host}:{master_info['port']}"
        version = str(master_info.get("version", ""))
        self.events.put(Subscribed(framework_id, address, self._master_age_s(address), version))
