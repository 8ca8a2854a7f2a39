"""What a training job and a search have in common: a master, a subscription, events until the work is done."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import ipaddress
import logging
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from dike.exceptions import BadInputError, JobFailedError
from framework.embedded.access import exposure, known_access
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos import events
from framework.mesos import master as mesos_master
from framework.mesos.driver import Driver, FrameworkSettings, driver_failure
from framework.mesos.master import LeadingMaster
from framework.project.bundle import BundleServer, address_towards

logger = logging.getLogger(__name__)

EVENT_WAIT_S = 0.1
DRAIN_S = 0.25
"""How long events are taken in before what is due by time is done, however many there are."""
SUBSCRIBE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class MesosAccess:
    """Which Mesos to use, and how.

    Attributes:
        master: `host:port` or `zk://...`; None starts a private Mesos on this machine.
        agents: the private Mesos' agents.
        connect_timeout_s: how long to wait for the master.
        role: in which to subscribe.
        principal, secret: of which user; an embedded Mesos of this account takes its own, which need not be named.
        image: container image for the tasks; None for the agent's own file system.
        agent_python: interpreter on the agents; None takes ours for a Mesos on this machine and `python3` for another.
        advertise_address: by which host name or address agents reach this machine; None for the one that faces the
            master.
        bundle_port: where executors fetch scripts from; 0 takes a free port.
        warn: takes what the user should know of a private Mesos.
        private: the private Mesos, where it is being started already.
    """

    master: str | None = None
    agents: Sequence[AgentSpec] = (AgentSpec(),)
    connect_timeout_s: float = 10.0
    role: str = "*"
    principal: str | None = None
    secret: str | None = None
    image: str | None = None
    agent_python: str | None = None
    advertise_address: str | None = None
    bundle_port: int = 0
    warn: Callable[[str], None] = logger.warning
    private: EmbeddedCluster | None = None

    @property
    def runs_here(self) -> bool:
        """Whether tasks see this machine's files, as far as that can be told before the master has answered."""
        if self.master is None or self.image is not None:
            return self.image is None
        host = self.master.rpartition("@")[2].rpartition(":")[0]
        return not self.master.startswith("zk://") and _is_loopback(host)

    @contextlib.contextmanager
    def starting(self) -> Iterator[MesosAccess]:
        """Begins to start a private Mesos, while there is something else to do before `connect`.

        Yields:
            What connects to it; this, if it is another Mesos.
        """
        if self.master is not None:
            yield self
            return
        with EmbeddedCluster(self.agents).starting() as cluster:
            yield dataclasses.replace(self, private=cluster)

    @contextlib.contextmanager
    def connect(self) -> Iterator[LeadingMaster]:
        """The master; a private one lives as long as the context."""
        with contextlib.ExitStack() as stack:
            address = self.master
            if address is None:
                cluster = self.private or stack.enter_context(EmbeddedCluster(self.agents).starting())
                cluster.wait_started()
                address = cluster.master
                if said := exposure():
                    self.warn(said)
            found = mesos_master.connect(address, self.connect_timeout_s)
            embedded = known_access(found.host)
            credentials = None if embedded is None else embedded.credentials
            if self.principal is not None:
                credentials = None if self.secret is None else (self.principal, self.secret)
            now = dataclasses.replace(found, credentials=credentials)
            yield LeadingMaster(now, is_private=self.master is None)

    def settings(self, name: str, master: LeadingMaster, **more: Any) -> FrameworkSettings:
        """How a framework of this name presents itself to a master; `more` are further fields of the settings."""
        principal, secret = master.credentials or (None, None)
        return FrameworkSettings(name, _user_name(), self.role, principal=principal, secret=secret, **more)

    def bundle_server(self, archive: Callable[[str], bytes | None], master: LeadingMaster) -> BundleServer:
        """Where executors fetch scripts; the arguments are those of `BundleServer`.

        Raises:
            BadInputError: if that port cannot be listened on.
        """
        if self.advertise_address is not None:
            # Whoever stands in between may come to any of our addresses.
            return BundleServer(archive, "", self.bundle_port, self.advertise_address)
        address = "127.0.0.1" if self.master is None else address_towards(master.host, master.port)
        return BundleServer(archive, address, self.bundle_port)

    def python(self, master: LeadingMaster) -> str:
        """The interpreter that runs executors on the agents."""
        return self.agent_python or (sys.executable if is_on_this_machine(master) and not self.image else "python3")


def is_on_this_machine(master: LeadingMaster) -> bool:
    """Whether the master is reached by loopback, and so its agents are on this machine too."""
    return _is_loopback(master.host)


def this_machine() -> str:
    """Host name and account: equal for processes that see the same files."""
    return f"{socket.gethostname()} {os.getuid()}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


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
        KeyboardInterrupt: after Ctrl-C, when the work has been cancelled.
    """
    driver.start()
    try:
        subscribed(_subscribe(work, callbacks, master))
        try:
            _pump_until_interrupted(work, callbacks)
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


def _pump_until_interrupted(work: Work, callbacks: events.EventScheduler) -> None:
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
            _pump(work, callbacks, deadline=time.monotonic() + EVENT_WAIT_S)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that has no name.
        return "nobody"


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
