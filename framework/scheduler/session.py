"""Runs the event loop of a framework: subscribes, and feeds events to its work until that is done."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from dike.exceptions import BadInputError, JobFailedError
from framework.mesos import events
from framework.mesos.connection import MesosLostError
from framework.mesos.driver import Driver, driver_failure
from framework.mesos.master import LeadingMaster

logger = logging.getLogger(__name__)

EVENT_WAIT_S = 0.1
DRAIN_S = 0.25
"""Maximum time for which queued events are handled before the next tick."""
SUBSCRIBE_TIMEOUT_S = 20.0


class Work(Protocol):
    """Event-driven work on one thread."""

    @property
    def done(self) -> bool: ...
    def handle(self, event: events.Event) -> None: ...
    def tick(self) -> None: ...
    def cancel(self) -> None: ...


def drive(
    work: Work,
    driver: Driver,
    callbacks: events.EventScheduler,
    master: LeadingMaster,
    *,
    subscribed: Callable[[str], None],
    interrupted: Callable[[], None],
    cancel_timeout_s: float,
    keep_tasks: bool = False,
) -> None:
    """Subscribes and feeds events to the work until it is done.

    Args:
        work: receives the events.
        driver: not started yet.
        callbacks: the driver's event queue.
        master: for messages.
        subscribed: called with the framework's id after the subscription.
        interrupted: called after Ctrl-C, before the work is cancelled.
        cancel_timeout_s: maximum duration of the cancellation.
        keep_tasks: whether tasks keep running afterwards, for a process that takes over the framework.

    Raises:
        BadInputError: if the master refuses the framework.
        JobFailedError: if the connection failed for good.
        MesosLostError: if the private Mesos of this command failed.
        KeyboardInterrupt: after Ctrl-C, when the work has been cancelled.
    """
    driver.start()
    try:
        subscribed(_subscribe(work, callbacks, master))
        try:
            _pump_until_interrupted(work, callbacks, master)
        except KeyboardInterrupt:
            if reason := driver_failure():
                raise JobFailedError(f"The connection to the Mesos master broke down: {reason}.") from None
            interrupted()
            work.cancel()
            _pump(work, callbacks, deadline=time.monotonic() + cancel_timeout_s)
            raise
    finally:
        # Without `failover` the framework is torn down, and Mesos kills all its tasks.
        driver.stop(failover=keep_tasks)
        driver.join()


def _subscribe(work: Work, callbacks: events.EventScheduler, master: LeadingMaster) -> str:
    deadline = time.monotonic() + SUBSCRIBE_TIMEOUT_S
    while True:
        try:
            event = callbacks.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise BadInputError(
                f"The Mesos master at {master.address} did not accept the subscription within "
                f"{SUBSCRIBE_TIMEOUT_S:g} s."
            ) from None
        work.handle(event)
        if isinstance(event, events.Subscribed):
            return event.framework_id


def _pump(work: Work, callbacks: events.EventScheduler, deadline: float) -> None:
    while not work.done and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            work.handle(callbacks.events.get(timeout=EVENT_WAIT_S))
            until = time.monotonic() + DRAIN_S
            while not callbacks.events.empty() and time.monotonic() < until:
                work.handle(callbacks.events.get())
        work.tick()


def _pump_until_interrupted(work: Work, callbacks: events.EventScheduler, master: LeadingMaster) -> None:
    """Like `_pump`, but Ctrl-C and SIGTERM take effect between two events, so that each is handled completely."""
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not work.done:
            if interrupted:
                raise KeyboardInterrupt
            if reason := master.failure():
                raise MesosLostError(reason)
            _pump(work, callbacks, deadline=time.monotonic() + EVENT_WAIT_S)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
