"""How commands reach Mesos: `--master` and the related options.

Commands create a `MesosAccess` first, and start a private Mesos with it, so slow imports that are needed later are made
in functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.embedded.access import exposure_warning, find_access
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.embedded.settings import AGENT_PYTHON

if TYPE_CHECKING:
    from executor.mirror import RunFolder
    from framework.cluster.machine import ClusterMachine
    from framework.mesos.driver import FrameworkSettings
    from framework.mesos.master import LeadingMaster
    from framework.project.bundle import Bundles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MesosAccess:
    """Which Mesos to use, and how.

    Attributes:
        master: `host:port` or `zk://...`; None starts a private Mesos on this machine.
        agents: the private Mesos' agents.
        connect_timeout_s: how long to wait for the master.
        role: role of the subscription.
        principal, secret: credentials; a private Mesos of the same account needs none.
        image: container image for the tasks; None for the agent's own file system.
        agent_python: interpreter on the agents; None: this one for a Mesos on this machine, `python3` for another.
        advertise_address: host name or address under which agents reach this machine; None for the one that faces the
            master.
        bundle_port: port from which executors fetch scripts; 0 takes a free port.
        warn: receives warnings about a private Mesos.
        private: the private Mesos, if it is being started already.
        machine: this machine's part of the cluster of `dike cluster` whose master `master` is; None for another Mesos.
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
    machine: ClusterMachine | None = None

    @property
    def runs_here(self) -> bool:
        """Whether tasks see this machine's files, as far as that is known before the master has answered."""
        if self.machine is not None:
            return False
        if self.master is None or self.image is not None:
            return self.image is None
        return not self.master.startswith("zk://") and _is_loopback(self._host)

    @property
    def zygotes(self) -> str:
        """Socket of the zygote server of a private Mesos, either private or of the same account and named by its
        address; empty if there is none.
        """
        if self.private is not None:
            return self.private.zygotes
        if self.machine is not None:
            return self.machine.zygotes
        access = find_access(self._host) if self.runs_here else None
        return "" if access is None else access.zygotes

    @property
    def keeps_run_folders(self) -> bool:
        """Whether checkpoints and outputs of a run get to a folder of this machine by themselves."""
        return self.runs_here or self.machine is not None

    @contextlib.contextmanager
    def run_folder(self, path: str, *, outlives: bool = False) -> Iterator[RunFolder | None]:
        """Makes a run's folder available to executors that do not see it, within the context.

        With `outlives` it stays available afterwards, for tasks that a restarted service takes over.

        Yields:
            How they reach it; None if they reach the path itself.
        """
        if self.machine is None:
            yield None
            return
        from framework.cluster.sharing import shared_folder

        with shared_folder(self.machine, path, outlives=outlives) as folder:
            yield folder

    @property
    def _host(self) -> str:
        return "" if self.master is None else self.master.rpartition("@")[2].rpartition(":")[0]

    @contextlib.contextmanager
    def starting(self) -> Iterator[MesosAccess]:
        """Starts a private Mesos in the background, so that the caller can do other work before `connect`.

        Yields:
            An object that connects to it; `self` for another Mesos.
        """
        if self.master is not None:
            yield self
            return
        with EmbeddedCluster(self.agents).starting() as cluster:
            yield dataclasses.replace(self, private=cluster)

    @contextlib.contextmanager
    def connect(self) -> Iterator[LeadingMaster]:
        """Connects to the master; a private one ends with the context."""
        from framework.mesos import master as mesos_master
        from framework.mesos.master import LeadingMaster

        with contextlib.ExitStack() as stack:
            address, failure = self.master, lambda: ""
            if address is None:
                cluster = self.private or stack.enter_context(EmbeddedCluster(self.agents).starting())
                cluster.wait_started()
                address, failure = cluster.master, lambda: cluster.failure
                if warning := exposure_warning():
                    self.warn(warning)
            found = mesos_master.connect(address, self.connect_timeout_s)
            embedded = find_access(found.host) if self.machine is None else self.machine.access
            credentials = None if embedded is None else embedded.credentials
            if self.principal is not None:
                credentials = None if self.secret is None else (self.principal, self.secret)
            now = dataclasses.replace(found, credentials=credentials)
            is_here = self.machine is None and _is_loopback(found.host)
            yield LeadingMaster(now, is_private=self.master is None, is_here=is_here, failure=failure)

    def settings(self, name: str, master: LeadingMaster, **more: Any) -> FrameworkSettings:
        """Returns the settings of a framework of this name; `more` are further fields."""
        from framework.mesos.driver import FrameworkSettings

        principal, secret = master.credentials or (None, None)
        return FrameworkSettings(name, _user_name(), self.role, principal=principal, secret=secret, **more)

    def bundle_server(self, archive: Callable[[str], bytes | None], master: LeadingMaster) -> Bundles:
        """Returns the server from which executors fetch scripts; the arguments are those of `BundleServer`.

        Raises:
            BadInputError: if it cannot listen on that port.
        """
        if self.machine is not None:
            from framework.cluster.sharing import StoreBundles, store_client

            return StoreBundles(archive, store_client(self.machine), self.machine.cluster.store)
        from framework.project.bundle import BundleServer, address_towards

        if self.advertise_address is not None:
            # A proxy in between may connect to any address of this machine.
            return BundleServer(archive, "", self.bundle_port, self.advertise_address)
        address = "127.0.0.1" if self.master is None else address_towards(master.host, master.port)
        return BundleServer(archive, address, self.bundle_port)

    def python(self, master: LeadingMaster) -> str:
        """Returns the interpreter that runs executors on the agents."""
        if self.agent_python is not None:
            return self.agent_python
        if self.image is not None:
            return "python3"
        if self.machine is not None:
            return AGENT_PYTHON
        return sys.executable if master.is_here else "python3"


def this_machine() -> str:
    """Returns host name and account, which are equal for processes that see the same files."""
    return f"{socket.gethostname()} {os.getuid()}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id without a name.
        return "nobody"
