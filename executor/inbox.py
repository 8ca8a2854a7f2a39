"""What one thread leaves for another that waits for file descriptors."""

from __future__ import annotations

import contextlib
import os
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Messages in the order in which they came; its file descriptor can be read as long as there are any."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, message: T) -> None:
        """Leaves a message; any thread may."""
        self._messages.put(message)
        os.eventfd_write(self._event, 1)

    def take(self) -> list[T]:
        """All that has come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages
