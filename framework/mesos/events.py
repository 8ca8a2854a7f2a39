"""Events from Mesos and from a service's clients, as immutable objects in one queue.

pymesos calls back on its own thread; `EventScheduler` only queues the events, so that all jobs are handled on one
thread, in the order of arrival.
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
    """The master accepted the framework, for the first time or again.

    Attributes:
        framework_id: the framework's id in Mesos.
        master: its `host:port`.
        master_age_s: seconds since it was elected; None if unknown.
        version: its Mesos version; empty if unknown.
    """

    framework_id: str
    master: str
    master_age_s: float | None = None
    version: str = ""


@dataclass(frozen=True)
class Disconnected:
    """The connection to the master is lost; the driver keeps reconnecting."""


@dataclass(frozen=True)
class OffersArrived:
    """Offers in Mesos' JSON form."""

    offers: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class OfferRescinded:
    offer_id: str


@dataclass(frozen=True)
class StatusUpdate:
    """A task's state, in Mesos' JSON form; must be acknowledged once handled."""

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
        """Logs it; nothing else is needed, since Mesos also sends a status update for each of its tasks."""
        how = f"executor {self.executor_id} on agent {self.agent_id} has ended with wait status {self.status}"
        logger.log(logging.INFO if self.status else logging.DEBUG, "%s", how)


@dataclass(frozen=True)
class AgentLost:
    agent_id: str

    def log(self, logger: logging.Logger) -> None:
        """See `ExecutorLost.log`."""
        logger.info("agent %s is gone", self.agent_id)


@dataclass(frozen=True)
class Refused:
    """The master refuses this framework; a retry would not help."""

    reason: str
    http_status: int | None = None


@dataclass(frozen=True)
class JobSubmitted:
    """A service's client submitted a job, which is in the database."""

    job_id: str


@dataclass(frozen=True)
class KillRequested:
    """A service's client asked to kill a job; the request is in the database."""

    job_id: str
    user: str = ""


@dataclass(frozen=True)
class JobReleased:
    """A service's client released a held job; the database says so."""

    job_id: str


@dataclass(frozen=True)
class WorkDone:
    """Background work has finished; wakes the loop, which collects the result in its next iteration."""


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
    | JobReleased
    | WorkDone
)


class EventScheduler(pymesos.Scheduler):
    """Puts all of pymesos' callbacks into `events`.

    Args:
        master_age_s: maps a master's `host:port` to the seconds since its election, None if unknown
            (`framework.mesos.master.leader_age_s`).
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
        # The executor may have written its message.
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
        # pymesos would subscribe again, and so throw out a process that took over this framework.
        driver.stop(failover=True)
        self.events.put(Refused(message))

    def _subscribed(self, framework_id: str, master_info: dict[str, Any]) -> None:
        # Its host name may not resolve on this machine.
        host = master_info.get("address", {}).get("ip") or master_info["hostname"]
        address = f"{host}:{master_info['port']}"
        version = str(master_info.get("version", ""))
        self.events.put(Subscribed(framework_id, address, self._master_age_s(address), version))
