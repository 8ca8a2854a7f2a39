"""Master and agent processes of an embedded cluster."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dike.exceptions import DikeError
from framework.embedded import settings
from framework.embedded.access import ClusterAccess
from framework.embedded.agents import AgentSpec
from framework.embedded.control import SupervisorControl
from framework.embedded.loopback import get_json
from framework.embedded.ports import is_free
from framework.embedded.supervisor import ENDING_SIGNALS

READY_TIMEOUT_S = 60.0
READY_REQUEST_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.02
AGENT = "agent"
"""The last argument but one of an agent's command line; the last is its master."""


@dataclass
class Daemon(ABC):
    """A master or an agent, running or not.

    Attributes:
        name: name of its log and work folder.
        address, port: where it listens.
        started_at: Unix time of its last start.
    """

    name: str
    address: str
    port: int
    pid: int = field(default=0, init=False)
    started_at: float = field(default=0.0, init=False)

    @property
    @abstractmethod
    def flags_path(self) -> str:
        """Path at which the daemon itself reports its flags once it is up."""

    @abstractmethod
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `framework.embedded.daemon`."""

    @abstractmethod
    def environment(self, files: settings.ClusterFiles) -> dict[str, str]: ...


@dataclass
class MasterDaemon(Daemon):
    """A master.

    Attributes:
        zookeeper: `zk://` URI of its election; None for a single master.
        agent_timeout_s: without an answer for this time an agent counts as lost.
    """

    zookeeper: str | None = None
    agent_timeout_s: int = 3

    @property
    def flags_path(self) -> str:
        # A master that does not lead redirects requests for its state to the leader.
        return "/master/state" if self.zookeeper is None else "/master/flags"

    def arguments(self) -> tuple[str, ...]:
        return ("master",) if self.zookeeper is None else ("master", self.zookeeper)

    def environment(self, files: settings.ClusterFiles) -> dict[str, str]:
        return settings.master_environment(files, self.name, self.address, self.port, self.agent_timeout_s)


@dataclass
class AgentDaemon(Daemon):
    """An agent.

    Attributes:
        hostname: its name in Mesos.
        master: returns the master's `host:port` or `zk://` URI when the agent starts.
        store: `host:port` of the store of a cluster of several machines; empty without one.
    """

    hostname: str
    spec: AgentSpec
    master: Callable[[], str]
    store: str = ""

    @property
    def flags_path(self) -> str:
        return "/state"

    def arguments(self) -> tuple[str, ...]:
        return (AGENT, self.master())

    def environment(self, files: settings.ClusterFiles) -> dict[str, str]:
        environment = settings.agent_environment(files, self.name, self.address, self.port, self.hostname, self.spec)
        return settings.with_store(environment, files, self.store) if self.store else environment


class DaemonRunner:
    """Starts and signals the daemons of one cluster.

    Args:
        spare_ports: for daemons whose port was taken.
    """

    def __init__(
        self,
        control: SupervisorControl,
        files: settings.ClusterFiles,
        access: ClusterAccess,
        library: Path,
        spare_ports: Iterator[int],
    ) -> None:
        self.control = control
        self._files = files
        self._access = access
        self._library = library
        self._spare_ports = spare_ports

    def bring_up(self, daemons: Sequence[Daemon], *, movable: bool = True) -> None:
        """Starts daemons and waits until all answer; from then on the supervisor restarts them.

        A `movable` daemon whose port another program has taken gets another port.

        Raises:
            DikeError: one ended or does not answer.
        """
        for daemon in daemons:
            self._spawn(daemon)
        deadline = time.monotonic() + READY_TIMEOUT_S
        for daemon in daemons:
            while not self._answers(daemon):
                if self.has_ended(daemon):
                    another = next(self._spare_ports, None) if movable and not is_free(daemon.port) else None
                    if another is None:
                        raise DikeError(f"The private Mesos' {daemon.name} ended. {self._files.log_tail(daemon.name)}")
                    daemon.port = another
                    self._spawn(daemon)
                self._keep_waiting(deadline, daemon, "answer")
            self.control.keep(daemon.name)

    def signal(self, daemon: Daemon, sig: signal.Signals) -> None:
        """Sends a signal; if it ends the daemon, waits for that and disables restarts.

        Raises:
            DikeError: it does not end.
        """
        self.control.signal(daemon.name, sig)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while sig in ENDING_SIGNALS and not self.has_ended(daemon):
            self._keep_waiting(deadline, daemon, "end")

    def has_ended(self, daemon: Daemon) -> bool:
        return self.control.has_ended(daemon.name)

    def _spawn(self, daemon: Daemon) -> None:
        command = settings.daemon_command(self._library, self.control.pid, *daemon.arguments())
        daemon.started_at = time.time()
        daemon.pid = self.control.start(
            daemon.name, command, daemon.environment(self._files), self._files.log(daemon.name)
        )

    def _answers(self, daemon: Daemon) -> bool:
        """Whether the daemon itself, and not another program on its port, answers."""
        answer = get_json(
            daemon.address, daemon.port, daemon.flags_path, self._access.credentials, READY_REQUEST_TIMEOUT_S
        )
        work_dir = Path((answer or {}).get("flags", {}).get("work_dir", ""))
        return work_dir.is_relative_to(self._files.daemon(daemon.name))

    def _keep_waiting(self, deadline: float, daemon: Daemon, what: str) -> None:
        if time.monotonic() > deadline:
            tail = self._files.log_tail(daemon.name)
            raise DikeError(f"The private Mesos' {daemon.name} does not {what}. {tail}")
        time.sleep(POLL_INTERVAL_S)
