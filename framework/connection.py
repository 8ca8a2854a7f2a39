"""The connection to the master, as whoever works through it sees it."""

from __future__ import annotations

from collections.abc import Callable

from dike.exceptions import BadInputError, JobFailedError
from framework import events

RECONCILE_AFTER_S = 15.0
"""How old a master has to be when the tasks' states are asked for."""

REMOVED = "has been removed"
"""Part of what Mesos says to a framework that it has ended."""


class FrameworkRemovedError(JobFailedError):
    """The master has ended the framework, and with it all its tasks; its id is of no use any more."""


class Connection:
    """Whether the master is there, and when the states of tasks have to be asked for again.

    Args:
        note: tells the user something.
        has_tasks: whether tasks may run already that were launched before; their states are asked for from the first
            connection on.
    """

    def __init__(self, note: Callable[[str], None], *, has_tasks: bool = False) -> None:
        self._note = note
        self._attached = False
        self._has_tasks = has_tasks
        self._reconcile_at: float | None = None
        self.connected = False

    def subscribed(self, now_s: float, master_age_s: float | None = None) -> None:
        """The master has taken the framework in, for the first time or again.

        Args:
            now_s: the time.
            master_age_s: for how long the master has been the leading one; None where that is not known.
        """
        if not self.connected and self._attached:
            self._note("connected to the Mesos master again")
        if not self.connected and (self._attached or self._has_tasks):
            # A master that has just started knows none of its agents yet, and would call their tasks lost.
            self._reconcile_at = now_s + max(0.0, RECONCILE_AFTER_S - (master_age_s or 0.0))
        self.connected = self._attached = True

    def disconnected(self) -> None:
        """The connection is gone; the driver keeps trying."""
        if self.connected:
            self._note("the connection to the Mesos master is lost; tasks go on, trying again")
        self.connected = False

    def must_reconcile(self, now_s: float) -> bool:
        """Whether it is time to ask for the tasks' states; true once for each reconnection."""
        if self._reconcile_at is None or now_s < self._reconcile_at:
            return False
        self._reconcile_at = None
        return True

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
        if REMOVED in event.reason:
            raise FrameworkRemovedError(f"The Mesos master has ended this framework: {event.reason}.")
        if event.http_status is not None or not self._attached:
            raise BadInputError(f"The Mesos master refused the framework: {event.reason}.")
        raise JobFailedError(f"The Mesos master has ended this framework: {event.reason}.")
