"""State of the connection to the master, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

from dike.exceptions import BadInputError, JobFailedError
from framework.mesos import events

REMOVED_PHRASE = "has been removed"
"""Occurs in Mesos' error when a framework id is no longer valid."""


class FrameworkRemovedError(JobFailedError):
    """The master removed the framework and killed its tasks; its id cannot be used again."""


class MesosLostError(JobFailedError):
    """The private Mesos of this command died, and all tasks with it."""


class Connection:
    """Tracks whether the master is connected, and turns refusals into exceptions.

    Args:
        log: receives lines for the user.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._attached = False
        self.connected = False

    def subscribed(self) -> None:
        if not self.connected and self._attached:
            self._log("connected to the Mesos master again")
        self.connected = self._attached = True

    def disconnected(self) -> None:
        """Notes that the connection is lost; the driver keeps reconnecting."""
        if self.connected:
            self._log("the connection to the Mesos master is lost; tasks keep running, reconnecting")
        self.connected = False

    def refused(self, event: events.Refused) -> None:
        """Raises the error for a refused subscription.

        Raises:
            BadInputError: if the master never accepted the framework.
            FrameworkRemovedError: if the framework was torn down, or its failover timeout elapsed.
            JobFailedError: if the master ended the subscription for another reason.
        """
        if event.http_status in (401, 403):
            raise BadInputError(
                "The Mesos master does not accept these credentials; check --principal and --secret-file."
            )
        if REMOVED_PHRASE in event.reason:
            raise FrameworkRemovedError(f"The Mesos master has ended this framework: {event.reason}.")
        if event.http_status is not None or not self._attached:
            raise BadInputError(f"The Mesos master refused the framework: {event.reason}.")
        raise JobFailedError(f"The Mesos master has ended this framework: {event.reason}.")
