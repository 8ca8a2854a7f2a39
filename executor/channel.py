"""What a slot says of its task: status updates to Mesos, messages to the framework."""

from __future__ import annotations

import http.client
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Driver(Protocol):
    """What a slot needs of `executor.driver.ExecutorDriver`."""

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802 (pymesos' name)
        """Sends a status update."""

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        """Sends a framework message, in base64."""


@dataclass(frozen=True)
class TaskEnd:
    """How a slot's task ended.

    Attributes:
        state: Mesos' terminal state.
        message: one sentence for the user.
        data: what the framework wants to know beside it, in base64; empty if nothing.
    """

    state: str
    message: str
    data: str = ""


class TaskChannel:
    """The outgoing side of one task.

    Attributes:
        task_id: Mesos' id of the task.
        sandbox: the folder that Mesos made for the executor.
    """

    def __init__(self, driver: Driver, task_id: str, sandbox: Path) -> None:
        self.task_id = task_id
        self.sandbox = sandbox
        self._driver = driver

    def update(self, state: str, message: str, data: str = "") -> None:
        """Tells Mesos the task's state; delivered without fail."""
        status: dict[str, Any] = {"task_id": {"value": self.task_id}, "state": state, "message": message}
        if data:
            status["data"] = data
        self._driver.sendStatusUpdate(status)

    def send(self, data: str) -> bool:
        """Sends the framework a message in base64, which may get lost.

        Returns:
            Whether the agent has taken it, which promises nothing.
        """
        try:
            self._driver.sendFrameworkMessage(data)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            logger.warning("message not delivered: %s", error)
            return False
        return True


class Slot(Protocol):
    """What holds the processes of a task.

    `run` is called on the main thread, which lives as long as they; everything else on the driver's thread.
    """

    def run(self) -> TaskEnd:
        """Does the task's work, to its end."""

    def kill(self, grace_s: float | None = None) -> None:
        """Ends the task, gently at first.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; None for what the task's order says.
        """

    def told(self, data: str) -> None:
        """The framework has sent a message, in base64."""
