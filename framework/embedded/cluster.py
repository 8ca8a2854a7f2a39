"""A real Apache Mesos on loopback: one master, or two elected ones, and agents, one process each."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dike.exceptions import BadInputError, DikeError
from framework.embedded import settings
from framework.embedded.access import PRIVATE_FOLDER, ClusterAccess
from framework.embedded.agents import AgentSpec, unnamed_devices
from framework.embedded.control import SupervisorControl
from framework.embedded.daemons import (
    POLL_INTERVAL_S,
    READY_TIMEOUT_S,
    AgentDaemon,
    Daemon,
    DaemonRunner,
    MasterDaemon,
)
from framework.embedded.library import ensure_library
from framework.embedded.loopback import get_json
from framework.embedded.machine import gpu_models
from framework.embedded.ports import BLOCK_SIZE, reserve_blocks
from framework.embedded.supervisor import MAX_RESTARTS, send, task_processes

logger = logging.getLogger(__name__)

MAX_AGENTS = 110
PORTS_PER_DAEMON = 2
"""One, and a spare if another program has taken it meanwhile."""
AGENT_TIMEOUT_S, REMOTE_AGENT_TIMEOUT_S = 3, 6
"""Without an answer for this time an agent on this machine, or on another one, counts as lost."""
WATCH_INTERVAL_S = 0.5
MASTER = "master"
CANDIDATES = ("master-0", "master-1")


@dataclass(frozen=True)
class MachinePart:
    """This machine's part of a cluster of several machines.

    Attributes:
        access: the master's address, and the cluster's secret.
        master_port: port of the master, on whichever machine it runs.
        has_master: whether it runs on this one.
        address, port: of this machine's agent.
        hostname: of that agent.
        services: name -> command line of further processes, which are started first and kept running.
        store: `host:port` of the cluster's store.
    """

    access: ClusterAccess
    master_port: int
    has_master: bool
    address: str
    port: int
    hostname: str
    services: Mapping[str, Sequence[str]]
    store: str


@dataclass(frozen=True)
class Agent:
    """A started agent.

    Attributes:
        name: its hostname in Mesos; on a private Mesos `agent-0` and so on.
        work_dir: folder of its state and sandboxes.
    """

    name: str
    pid: int
    port: int
    work_dir: Path
    spec: AgentSpec


class EmbeddedCluster:
    """A private Mesos cluster that ends with its owner.

    A small supervisor process starts the daemons and restarts those that end or stall. When the owner stops the
    cluster, or ends in any way, the supervisor ends daemons, executors and all their children. A cluster object is
    started once.

    Daemons accept only connections of their own account (`libmesos.peers`), and requests only with the cluster's secret
    (HTTP basic); see docs/security.md.

    Attributes:
        failure: why the cluster has failed, in one sentence; empty while it has not.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec] = (AgentSpec(),),
        work_dir: Path | None = None,
        zookeeper: str | None = None,
        part: MachinePart | None = None,
    ) -> None:
        """Validates a cluster; starts nothing.

        Args:
            agents: one spec per agent.
            work_dir: folder for logs and sandboxes, kept afterwards; None for a temporary one.
            zookeeper: `zk://host:port/path` of a running ZooKeeper that elects one of two masters; None for one master.
            part: this machine's part of a larger cluster, with at most one agent here; None for a cluster on this
                machine alone.

        Raises:
            BadInputError: there are no or too many agents, a spec is malformed, or two specs name the same GPU.
        """
        if part is None and not 1 <= len(agents) <= MAX_AGENTS:
            raise BadInputError(f"An embedded cluster has 1 to {MAX_AGENTS} agents, not {len(agents)}.")
        self._specs = [spec.validated() for spec in agents]
        self._devices = unnamed_devices(self._specs)
        self._named_work_dir = work_dir
        self.access = ClusterAccess() if part is None else part.access
        self._part = part
        self._zookeeper = zookeeper
        self._lock = threading.Lock()
        self._runner: DaemonRunner | None = None
        self._library = Path()
        self._files = settings.ClusterFiles(Path())
        names: Sequence[str] = (MASTER,) if zookeeper is None else CANDIDATES
        if part is not None and not part.has_master:
            names = ()
        port = 0 if part is None else part.master_port
        timeout_s = AGENT_TIMEOUT_S if part is None else REMOTE_AGENT_TIMEOUT_S
        self._masters = [MasterDaemon(name, self.access.address, port, zookeeper, timeout_s) for name in names]
        self._agents: list[AgentDaemon] = []
        self._start: Future[None] | None = None
        self._stop_watching = threading.Event()
        self.failure = ""

    def __enter__(self) -> EmbeddedCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def master(self) -> str:
        """Address for frameworks: the master's `host:port`, or the `zk://` URI of an election."""
        if self._part is not None:
            return f"{self.access.address}:{self._part.master_port}"
        return self._zookeeper or f"{self.access.address}:{self._masters[0].port}"

    @property
    def agents(self) -> list[Agent]:
        """The agents, in the order of the specs, as last started."""
        return [
            Agent(agent.hostname, self._pid(agent), agent.port, self._files.daemon(agent.name), agent.spec)
            for agent in self._agents
        ]

    @property
    def master_pid(self) -> int:
        """Process id of the leading master, as last started.

        Raises:
            DikeError: there is no leader.
        """
        return self._pid(self._leading())

    @property
    def supervisor_pid(self) -> int:
        """Id of the process that ends the whole cluster on SIGTERM."""
        return self._running().control.pid

    @property
    def work_dir(self) -> Path:
        """Folder with the daemons' logs (`master.log`, `agent-0.log`, ...), state and sandboxes."""
        return self._files.work_dir

    def start(self) -> None:
        """Starts the cluster and returns when all agents have registered.

        Raises:
            BadInputError: the platform is not supported, or `$DIKE_MESOS_FILE` names another file.
            DikeError: Mesos is not available or does not start; the message ends with its log.
        """
        try:
            self._bring_up(self._prepare())
        except BaseException:  # Ctrl-C included
            self.stop()
            raise

    @contextlib.contextmanager
    def starting(self) -> Iterator[EmbeddedCluster]:
        """Starts the cluster in the background, see `wait_started`; the zygote server is available immediately.

        Raises:
            BadInputError, DikeError: as `start`.
        """
        with ThreadPoolExecutor(1, "mesos") as background:
            try:
                self._start = background.submit(self._bring_up, self._prepare())
                yield self
            finally:
                # Without the supervisor a start in progress fails immediately.
                self.stop()

    def wait_started(self) -> None:
        """Waits until all agents of a cluster that is `starting` have registered.

        Raises:
            DikeError: as `start`.
        """
        assert self._start is not None
        self._start.result()

    @property
    def zygotes(self) -> str:
        return str(self._files.zygotes)

    def stop(self) -> None:
        """Ends all processes of the cluster; no-op if it is not running."""
        self._stop_watching.set()
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.control.stop()
            # Processes remain only if the supervisor was killed; then the system has killed the daemons.
            for pid in task_processes(str(self.work_dir)):
                send(pid, signal.SIGKILL)
            if self._part is None:
                self.access.remove()
        if self._named_work_dir is None and self.work_dir != Path():
            shutil.rmtree(self.work_dir, ignore_errors=True)

    def detach(self) -> None:
        """Detaches the cluster from its owner: it runs until its supervisor receives SIGTERM."""
        self._stop_watching.set()
        self._running().control.detach()
        self._runner = None

    def state(self) -> dict[str, Any]:
        """The leading master's answer to `GET /master/state`.

        Raises:
            DikeError: there is no answer.
        """
        state = self._leader_state()
        if state is None:
            raise DikeError(f"The private Mesos master at {self.master} does not answer.")
        return state

    def wait_for_agents(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until every agent has been active since its last start.

        Raises:
            DikeError: on timeout, or if the cluster was stopped.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self._missing_agents():
            self._running()  # Another thread may have stopped it.
            if time.monotonic() > deadline:
                names = ", ".join(agent.hostname for agent in missing)
                tail = self._files.log_tail(missing[0].name)
                raise DikeError(f"{names} did not register with the private Mesos. {tail}")
            time.sleep(POLL_INTERVAL_S)

    def kill_agent(self, index: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to an agent, and waits for its end if the signal ends it.

        SIGKILL leaves its executors running, like a crash of the agent; SIGUSR1 shuts it down in good order.
        """
        self._running().signal(self._agents[index], sig)

    def restart_agent(self, index: int) -> None:
        """Restarts a killed agent with the same port and work folder; see `wait_for_agents`."""
        self._running().bring_up([self._agents[index]], movable=False)

    def kill_master(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the leading master, and waits for its end if the signal ends it.

        Raises:
            DikeError: there is no leader.
        """
        self._running().signal(self._leading(), sig)

    def restart_master(self) -> None:
        """Restarts killed masters, each on its port; agents and their tasks reregister about three seconds later."""
        runner = self._running()
        runner.bring_up([master for master in self._masters if runner.has_ended(master)], movable=False)

    def _bring_up(self, runner: DaemonRunner) -> None:
        # The other machines know the ports of a part.
        is_movable = self._part is None
        runner.bring_up(self._masters, movable=is_movable)
        runner.bring_up(self._agents, movable=is_movable)
        self.wait_for_agents(READY_TIMEOUT_S)

    def _prepare(self) -> DaemonRunner:
        if self._files.work_dir != Path():
            raise DikeError("A cluster object can be started only once: make another.")
        self._library = ensure_library()
        named = self._named_work_dir
        folder = Path(tempfile.mkdtemp(prefix="dike-mesos-")) if named is None else named
        folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        self._files = settings.ClusterFiles(folder.resolve())
        settings.write_programs(self._files, self._library)
        part = self._part
        if part is not None:
            # Of an earlier start, whose supervisor was killed.
            for pid in task_processes(str(self.work_dir)):
                send(pid, signal.SIGKILL)
        models = gpu_models()
        daemons = len(self._masters) + len(self._specs)
        own_count = math.ceil(PORTS_PER_DAEMON * daemons / BLOCK_SIZE)
        blocks = reserve_blocks(own_count + sum(not spec.specifies("ports") for spec in self._specs))
        try:
            control = SupervisorControl(
                settings.supervisor_command(self._files, self._leftovers()),
                self.work_dir,
                self._files.log("supervisor"),
                [block.claim.fileno() for block in blocks],  # The supervisor keeps them reserved from now on.
            )
        finally:
            for block in blocks:
                block.claim.close()
        own, offered = blocks[:own_count], blocks[own_count:]
        ports = itertools.chain.from_iterable(own)
        self._files.daemon(settings.ZYGOTES).mkdir(exist_ok=True)
        # The socket of an earlier cluster would be mistaken for the new one.
        self._files.zygotes.unlink(missing_ok=True)
        services = {settings.ZYGOTES: settings.zygote_server_command(self._files)}
        for name, command in {**services, **({} if part is None else part.services)}.items():
            control.start(name, command, settings.service_environment(), self._files.log(name))
            control.keep(name)
        self._runner = DaemonRunner(control, self._files, self.access, self._library, ports)
        self.access.write_credentials(self._files.credentials)
        if part is None:
            self.access.publish(self._files.zygotes)
            for master in self._masters:
                master.port = next(ports)
        for index, spec in enumerate(self._specs):
            name = f"agent-{index}"
            for folder_name in ("work", "run"):
                (self._files.daemon(name) / folder_name).mkdir(parents=True, exist_ok=True)
            with_defaults = spec.with_defaults(models, offered, self._devices)
            if part is None:
                where = (self.access.address, next(ports), name)
            else:
                where = (part.address, part.port, part.hostname)
            store = "" if part is None else part.store
            self._agents.append(AgentDaemon(name, *where, with_defaults, lambda: self.master, store))
        threading.Thread(target=self._watch, args=(control,), name="mesos watch", daemon=True).start()
        return self._runner

    def _leftovers(self) -> list[Path]:
        """Files and folders that are removed when the cluster ends."""
        published = [self.access.secret_file, self.access.zygotes_link] if self._part is None else []
        return [*published, *([self.work_dir] if self._named_work_dir is None else [])]

    def _watch(self, control: SupervisorControl) -> None:
        """Monitors the daemons in a thread, as a supervisor may answer slowly; sets `failure`."""
        from executor.process import describe_exit  # imported late: slow, and commands import this module

        while not self._stop_watching.wait(WATCH_INTERVAL_S):
            try:
                given_up = control.given_up()
            except DikeError as error:
                if not self._stop_watching.is_set():
                    logger.error("%s", error)
                    how = describe_exit(control.wait())
                    self.failure = f"The private Mesos has ended, because its supervisor (process {control.pid}) {how}."
                return
            # Optional: without a zygote server, executors import by themselves.
            given_up.pop(settings.ZYGOTES, None)
            for name, status in given_up.items():
                logger.error("%s", self._files.log_tail(name))
                self.failure = (
                    f"The private Mesos has failed: its {name} {describe_exit(status)}, also after each of "
                    f"{MAX_RESTARTS} restarts."
                )
                return

    def _running(self) -> DaemonRunner:
        if self._runner is None:
            raise DikeError("The private Mesos is not running: start it first.")
        return self._runner

    def _pid(self, daemon: Daemon) -> int:
        """Id of its process, which the supervisor may have restarted; the last one if the cluster is stopped."""
        runner = self._runner
        return daemon.pid if runner is None else runner.control.running_pid(daemon.name)

    def _leading(self) -> MasterDaemon:
        if self._zookeeper is None:
            return self._masters[0]
        for master in self._masters:
            if self._state(master.port):
                return master
        raise DikeError(f"The private Mesos has no leading master at {self._zookeeper}.")

    def _leader_state(self) -> dict[str, Any] | None:
        ports = [self._part.master_port] if self._part is not None else [master.port for master in self._masters]
        return next(filter(None, map(self._state, ports)), None)

    def _state(self, port: int) -> dict[str, Any] | None:
        """The cluster's state; None if the master at a port does not lead, or does not answer."""
        return get_json(self.access.address, port, "/master/state", self.access.credentials)

    def _missing_agents(self) -> list[AgentDaemon]:
        """The agents that no leading master has seen active since their last start."""
        known = (self._leader_state() or {}).get("slaves", ())
        seen_at = {
            agent["hostname"]: max(agent["registered_time"], agent.get("reregistered_time", 0.0))
            for agent in known
            if agent["active"]
        }
        if not self._masters:  # The clocks of two machines differ.
            return [agent for agent in self._agents if agent.hostname not in seen_at]
        return [agent for agent in self._agents if seen_at.get(agent.hostname, 0.0) < agent.started_at]
