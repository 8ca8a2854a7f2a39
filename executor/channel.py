"""What a slot says of its task: status updates to Mesos, messages to the framework."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

TERMINAL = ("TASK_FINISHED", "TASK_FAILED", "TASK_KILLED")
"""States in which a task of ours ends."""


class Driver(Protocol):
    """What a slot needs of its executor."""

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802 (pymesos' name)
        """Sends a status update."""

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        """Sends a framework message, in base64."""

    def processStarted(self, pid: int) -> None:  # noqa: N802
        """A process that leads a group has been started for the task."""

    def processEnded(self, pid: int) -> None:  # noqa: N802
        """Nothing of it is left."""


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
        sandbox: the folder for what the task writes.
    """

    def __init__(self, driver: Driver, task_id: str, sandbox: Path) -> None:
        self.task_id = task_id
        self.sandbox = sandbox
        self._driver = driver

    def started(self, pid: int) -> None:
        """A process of the task has begun; it leads a group, which is to end with the task whatever happens to us."""
        self._driver.processStarted(pid)

    def ended(self, pid: int) -> None:
        """Nothing of such a process is left: its number may become another's."""
        self._driver.processEnded(pid)

    def update(self, state: str, message: str, data: str = "") -> None:
        """Tells Mesos the task's state; delivered without fail."""
        status: dict[str, Any] = {"task_id": {"value": self.task_id}, "state": state, "message": message}
        if data:
            status["data"] = data
        self._driver.sendStatusUpdate(status)

    def send(self, data: str) -> bool:
        """Sends the framework a message, as the function of that name."""
        return send(self._driver, data)


def send(driver: Driver, data: str) -> bool:
    """Sends the framework a message in base64, which may get lost.

    Returns:
        Whether the agent has taken it, which promises nothing.
    """
    try:
        driver.sendFrameworkMessage(data)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        logger.warning("message not delivered: %s", error)
        return False
    return True


class Slot(Protocol):
    """What holds the processes of a task; any thread may call it."""

    def kill(self, grace_s: float | None = None) -> None:
        """Ends the task, gently at first.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; None for what the task's order says.
        """

    def told(self, data: str) -> None:
        """The framework has sent a message, in base64."""


class Mailbox(Generic[T]):
    """Messages from any thread, in the order in which they came, for one that waits for file descriptors.

    Its own can be read as long as there are any.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, message: T) -> None:
        """Leaves a message; any thread may."""
        self._messages.put(message)
        os.eventfd_write(self._event, 1)

    @property
    def is_waiting(self) -> bool:
        """Whether there are messages."""
        return not self._messages.empty()

    def take(self) -> list[T]:
        """All that has come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages
