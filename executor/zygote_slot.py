"""What slots have in common whose processes are forked from a zygote, one at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from executor import bundle, descendants
from executor.channel import TaskChannel, TaskEnd
from executor.environment import process_environment
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
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """What a slot needs before it can fork anything.

    Attributes:
        bundle_url: where the script's folder can be fetched, token included.
        preload: modules for the zygote to import.
        environment: variables of the slot's processes, on top of the executor's own.
        cpus: the slot's CPUs.
        gpu_devices: the slot's GPUs; None where Mesos isolates GPUs itself.
        zygote_command: the program that forks the processes.
    """

    bundle_url: str
    preload: Sequence[str]
    environment: Mapping[str, str]
    cpus: float
    gpu_devices: Sequence[int] | None
    zygote_command: Sequence[str]


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

    def take(self) -> list[T]:
        """All that has come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages


class ZygoteSlot(ABC, Generic[Wish]):
    """Does what the framework wants: one thread, which waits for whatever comes first.

    Args:
        channel: the slot's task.
        setup: what it needs.
        kill_grace_s: seconds between SIGTERM and SIGKILL when the task is killed.
    """

    def __init__(self, channel: TaskChannel, setup: Setup, kill_grace_s: float) -> None:
        self._channel = channel
        self._setup = setup
        self._own_grace_s = kill_grace_s
        self._folder = channel.sandbox / "bundle"
        self._gpus = Gpus(setup.gpu_devices)
        self._mailbox: Mailbox[Wish | float] = Mailbox()
        self._kill_grace_s: float | None = None
        self._zygote: Zygote | None = None
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
        self._channel.update("TASK_STARTING", "fetching the script")
        setup = self._setup
        environment = process_environment(setup.cpus, setup.environment, setup.gpu_devices)
        try:
            bundle.fetch(setup.bundle_url, self._folder)
            self._given = dict(local_files(self._folder))
            descendants.adopt_orphans()
            log = self._channel.sandbox / "zygote.out"
            self._zygote = zygote = Zygote(setup.preload, environment, log, setup.zygote_command)
        except (bundle.BundleError, OSError) as error:
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
        watched = (self._mailbox.fileno(), *zygote.watched, *(held.watched if held else ()))
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

    def _is_clear(self, held: Held, zygote: Zygote) -> bool:
        """Whether nothing is left of what was in the slot; to be called until that is so."""
        assert held.over_s is not None
        if not descendants.clear(zygote.pid):
            return False
        if held.monitor.gpus_free():
            return True
        if time.monotonic() - held.over_s < GPU_RELEASE_TIMEOUT_S:
            return False
        logger.warning("%s is gone, but its GPU memory is not seen free", held)
        return True

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
