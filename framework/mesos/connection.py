"""The connection to the master, as whoever works through it sees it."""

from __future__ import annotations

from collections.abc import Callable

from dike.exceptions import BadInputError, JobFailedError
from framework.mesos import events

REMOVED_PHRASE = "has been removed"
"""Part of what Mesos says to a framework that it has ended."""


class FrameworkRemovedError(JobFailedError):
    """The master has ended the framework, and with it all its tasks; its id is of no use any more."""


class MesosLostError(JobFailedError):
    """The Mesos that was started for this command is gone, and with it all tasks."""


class Connection:
    """Whether the master is there.

    Args:
        log: takes lines for the user.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._attached = False
        self.connected = False

    def subscribed(self) -> None:
        """The master has taken the framework in, for the first time or again."""
        if not self.connected and self._attached:
            self._log("connected to the Mesos master again")
        self.connected = self._attached = True

    def disconnected(self) -> None:
        """The connection is gone; the driver keeps trying."""
        if self.connected:
            self._log("the connection to the Mesos master is lost; tasks go on, trying again")
        self.connected = False

    def refused(self, event: events.Refused) -> None:
        """The master does not want this framework.

        Raises:
            BadInputError: if it never did.
            FrameworkRemovedError: if it has removed it: somebody has torn it down, or it was away for too long.
            JobFailedError: if it has thrown it out otherwise.
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
