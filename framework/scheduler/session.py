"""What a training job and a search have in common: a master, a subscription, events until the work is done."""

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
"""How long events are taken in before what is due by time is done, however many there are."""
SUBSCRIBE_TIMEOUT_S = 20.0


class Work(Protocol):
    """What is driven by Mesos' events, on one thread."""

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
        work: gets the events.
        driver: not started yet.
        callbacks: files what the driver hears.
        master: for messages.
        subscribed: called with the framework's id once the master has taken it in.
        interrupted: called after Ctrl-C, before the work is cancelled.
        cancel_timeout_s: how long the cancelled work may take.
        keep_tasks: whether tasks go on when we leave, for whoever takes the framework over.

    Raises:
        BadInputError: if the master refuses the framework.
        JobFailedError: if the connection broke down for good.
        MesosLostError: if the Mesos was started for us and does not go on.
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
        # Unless told otherwise Mesos kills every task that might still run: the framework is torn down.
        driver.stop(failover=keep_tasks)
        driver.join()


def _subscribe(work: Work, callbacks: events.EventScheduler, master: LeadingMaster) -> str:
    deadline = time.monotonic() + SUBSCRIBE_TIMEOUT_S
    while True:
        try:
            event = callbacks.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise BadInputError(
                f"The Mesos master at {master.address} did not take the framework in within {SUBSCRIBE_TIMEOUT_S:g} s."
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
    """As `_pump`; Ctrl-C and SIGTERM take effect between two events, so that none is half dealt with."""
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
    """Makes SIGTERM end a run in the same orderly way as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
