"""What slots have in common whose processes are forked from a zygote, one at a time."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

from executor import bundle, descendants
from executor.channel import Mailbox, TaskChannel, TaskEnd
from executor.monitor import Gpus, RunMonitor
from executor.outputs import Stamp, local_files, remote_copier
from executor.process import wait_readable
from executor.zygote import Zygote

logger = logging.getLogger(__name__)

CLEAR_POLL_S = 0.02
"""How often it is looked whether processes are gone that were killed."""
GPU_RELEASE_TIMEOUT_S = 10.0
"""How long the next process waits for GPU memory that one which is gone should not hold."""

Wish = TypeVar("Wish")


class Held(Protocol):
    """What is in a slot; its text names it."""

    @property
    def monitor(self) -> RunMonitor:
        """Watches it."""

    @property
    def over_s(self) -> float | None:
        """When its process ended, on the monotonic clock; None before."""

    @property
    def watched(self) -> tuple[int, ...]:
        """File descriptors that can be read when there is something to `poll`."""

    def poll(self) -> None:
        """Takes in what it has to say, and its end."""


class ZygoteSlot(ABC, Generic[Wish]):
    """Does what the framework wants: one thread, which waits for whatever comes first.

    Args:
        channel: the slot's task.
        bundle_url: where the script's folder can be fetched, token included; empty for a slot that runs no script.
        gpu_devices: the slot's GPUs; None where Mesos isolates GPUs itself.
        kill_grace_s: seconds between SIGTERM and SIGKILL when the task is killed.
        zygote: forks the slot's processes; the slot closes it.
    """

    def __init__(
        self,
        channel: TaskChannel,
        bundle_url: str,
        gpu_devices: Sequence[int] | None,
        kill_grace_s: float,
        zygote: Zygote,
    ) -> None:
        self._channel = channel
        self._bundle_url = bundle_url
        self._own_grace_s = kill_grace_s
        self._folder = channel.sandbox / "bundle"
        self._gpus = Gpus(gpu_devices)
        self._mailbox: Mailbox[Wish | float] = Mailbox()
        self._kill_grace_s: float | None = None
        self._zygote = zygote
        self._is_announced = False
        self._given: dict[str, Stamp] = {}
        """What has travelled with the script."""

    # Called on the driver's thread.

    def told(self, data: str) -> None:
        """Takes what the framework wants."""
        try:
            self._mailbox.put(self._decode(data))
        except ValueError as error:
            logger.warning("message ignored: %s", error)

    def kill(self, grace_s: float | None = None) -> None:
        """Ends what is in the slot, and the task."""
        self._mailbox.put(float(self._own_grace_s if grace_s is None else grace_s))

    # Called on the main thread.

    def run(self) -> TaskEnd:
        """Holds the slot to the end of its task."""
        zygote = self._zygote
        try:
            if self._bundle_url:
                bundle.fetch(self._bundle_url, self._folder)
            else:
                self._folder.mkdir()
            self._given = dict(local_files(self._folder))
        except (bundle.BundleError, OSError) as error:
            zygote.close()
            return self._end("TASK_FAILED", f"the slot could not be set up: {error}")
        try:
            while (end := self._advance(zygote)) is None:
                self._tell(zygote)
                self._wait(zygote)
        finally:
            zygote.close()
            remote_copier.close()
            while not descendants.clear(None):
                time.sleep(CLEAR_POLL_S)
        return self._concluded(end)

    def _wait(self, zygote: Zygote) -> None:
        """Waits until something has come or is due, and takes it in."""
        held = self._held
        watched = (self._mailbox.fileno(), *zygote.watched, *(held.watched if held else ()), *self._aside)
        wait_readable(watched, self._due_s(zygote) - time.monotonic())
        for message in self._mailbox.take():
            if isinstance(message, float):
                self._kill_grace_s = message if self._kill_grace_s is None else min(message, self._kill_grace_s)
            else:
                self._take(message)
        zygote.poll()
        if held is not None:
            held.poll()

    def _announce(self, message: str) -> None:
        """Tells Mesos once that the task runs."""
        if not self._is_announced:
            self._is_announced = True
            self._channel.update("TASK_RUNNING", message)

    def _is_clear(self, held: Held, zygote: Zygote, spared: Collection[int] = ()) -> bool:
        """Whether nothing is left of what was in the slot; to be called until that is so.

        Args:
            held: what it was.
            zygote: the slot's.
            spared: ids of processes that stay.
        """
        assert held.over_s is not None
        if not descendants.clear(zygote.pid, spared):
            return False
        if held.monitor.gpus_free():
            return True
        if time.monotonic() - held.over_s < GPU_RELEASE_TIMEOUT_S:
            return False
        logger.warning("%s is gone, but its GPU memory is not seen free", held)
        return True

    @property
    def _aside(self) -> tuple[int, ...]:
        """File descriptors of what stands still in the slot beside what it holds, that can be read when that ends."""
        return ()

    @property
    @abstractmethod
    def _held(self) -> Held | None:
        """What is in the slot."""

    @abstractmethod
    def _decode(self, data: str) -> Wish:
        """Reads a message of the framework; raises ValueError if it is none. Called on the driver's thread."""

    @abstractmethod
    def _take(self, wish: Wish) -> None:
        """Takes in what the framework wants."""

    @abstractmethod
    def _advance(self, zygote: Zygote) -> TaskEnd | None:
        """Does whatever can be done now; returns the end of the task if that is it."""

    @abstractmethod
    def _due_s(self, zygote: Zygote) -> float:
        """When there is something to do, whatever comes, on the monotonic clock."""

    @abstractmethod
    def _tell(self, zygote: Zygote) -> None:
        """Says what is to be said by now."""

    @abstractmethod
    def _concluded(self, end: TaskEnd) -> TaskEnd:
        """Says the last that is to be said, nothing being left in the slot; returns the end that Mesos is told."""

    def _end(self, state: str, message: str) -> TaskEnd:
        """The end of the task."""
        return TaskEnd(state, message)
