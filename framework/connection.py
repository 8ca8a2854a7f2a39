"""The connection to the master, as whoever works through it sees it."""

from __future__ import annotations

from collections.abc import Callable

from dike.exceptions import BadInputError, JobFailedError
from framework import events

RECONCILE_AFTER_S = 15.0
"""How long after a reconnection the tasks' states are asked for."""


class Connection:
    """Whether the master is there, and when the states of tasks have to be asked for again.

    Args:
        note: tells the user something.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._attached = False
        self._reconcile_at: float | None = None
        self.connected = False

    def subscribed(self, now_s: float) -> None:
        """The master has taken the framework in, for the first time or again."""
        if not self.connected and self._attached:
            self._note("connected to the Mesos master again")
            # Not at once: a master that has just started knows none of its agents yet, and would call their tasks lost.
            self._reconcile_at = now_s + RECONCILE_AFTER_S
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
            JobFailedError: if it has thrown it out.
        """
        if event.http_status in (401, 403):
            raise BadInputError(
                "The Mesos master does not accept these credentials; check --principal and --secret-file."
            )
        if event.http_status is not None or not self._attached:
            raise BadInputError(f"The Mesos master refused the framework: {event.reason}.")
        raise JobFailedError(f"The Mesos master has ended this framework: {event.reason}.")
