"""Outgoing messages of a slot's task: status updates to Mesos, messages to the framework."""

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
"""Terminal states that an executor sends."""


class StatusSender(Protocol):
    """The part of the executor's driver that a slot uses."""

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802 (pymesos' name)
        ...

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        """Sends a framework message, in base64."""

    def processStarted(self, pid: int) -> None:  # noqa: N802
        """Records the leader of a process group of the task."""

    def processEnded(self, pid: int) -> None:  # noqa: N802
        """Records that nothing of such a process group is left."""


@dataclass(frozen=True)
class TaskEnd:
    """How a slot's task ended: Mesos' terminal state, one sentence for users, details for the framework in base64."""

    state: str
    message: str
    data: str = ""


class TaskChannel:
    """The outgoing side of one task, which writes to `sandbox`."""

    def __init__(self, driver: StatusSender, task_id: str, sandbox: Path) -> None:
        self.task_id = task_id
        self.sandbox = sandbox
        self._driver = driver

    def process_started(self, pid: int) -> None:
        """Reports a process group of the task; the executor kills it if this process ends unexpectedly."""
        self._driver.processStarted(pid)

    def process_ended(self, pid: int) -> None:
        """Reports that nothing of a process group is left: its id may be reused."""
        self._driver.processEnded(pid)

    def update(self, state: str, message: str, data: str = "") -> None:
        """Sends a status update; delivery is guaranteed."""
        status: dict[str, Any] = {"task_id": {"value": self.task_id}, "state": state, "message": message}
        if data:
            status["data"] = data
        self._driver.sendStatusUpdate(status)

    def send(self, data: str) -> bool:
        return send(self._driver, data)


def send(driver: StatusSender, data: str) -> bool:
    """Sends a framework message in base64, which may get lost.

    Returns:
        Whether the agent accepted it; it may still not reach the framework.
    """
    try:
        driver.sendFrameworkMessage(data)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        logger.warning("message not delivered: %s", error)
        return False
    return True


class TaskSlot(Protocol):
    """Runs the processes of one task. Thread-safe."""

    def kill(self, grace_s: float | None = None) -> None:
        """Ends the task, gracefully first. The default of `grace_s` is that of the task's order."""

    def drain(self) -> None:
        """Has the task save its work and end."""

    def receive(self, data: str) -> None:
        """Handles a message of the framework, in base64."""


class Mailbox(Generic[T]):
    """A thread-safe queue whose file descriptor is readable while it holds messages."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, message: T) -> None:
        self._messages.put(message)
        os.eventfd_write(self._event, 1)

    @property
    def has_messages(self) -> bool:
        return not self._messages.empty()

    def take(self) -> list[T]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages
