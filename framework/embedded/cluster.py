"""A real Apache Mesos on loopback: a master, or two to be elected, and any number of agents, one process each."""

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
from collections.abc import Iterator, Sequence
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
    LOOK_INTERVAL_S,
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
from framework.embedded.supervisor import MOST_STARTS, send, task_processes

logger = logging.getLogger(__name__)

MOST_AGENTS = 110
PORTS_OF_A_DAEMON = 2
"""One, and another if some program has taken it meanwhile."""
WATCH_INTERVAL_S = 0.5
MASTER = "master"
CANDIDATES = ("master-0", "master-1")


@dataclass(frozen=True)
class Agent:
    """A started agent.

    Attributes:
        name: its hostname in Mesos, `agent-0` and so on.
        pid: id of its process.
        port: port of its own HTTP interface.
        work_dir: folder with its state and sandboxes.
        spec: what it offers, filled in.
    """

    name: str
    pid: int
    port: int
    work_dir: Path
    spec: AgentSpec


class EmbeddedCluster:
    """A private Mesos cluster that ends with its owner.

    A small supervisor process starts the daemons, and starts again what ends or stands still without the owner having
    asked for it. When the owner stops the cluster, or ends in any way, the supervisor ends daemons, executors and all
    their children. One cluster object is started once.

    It hears connections of its own account only (`libmesos.peers`), and of these only who knows its secret may look at
    it or have anything done (HTTP basic); see docs/security.md.

    Attributes:
        access: where it listens, and to whom.
        failure: why it does not go on, in one sentence; empty as long as it does.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec] = (AgentSpec(),),
        work_dir: Path | None = None,
        zookeeper: str | None = None,
    ) -> None:
        """Plans a cluster and starts nothing.

        Args:
            agents: one spec for each agent.
            work_dir: folder for logs and sandboxes, kept afterwards; None for a temporary one, removed at the end.
            zookeeper: `zk://host:port/path` of a running ZooKeeper, where two masters are elected; None for one master
                that leads without.

        Raises:
            BadInputError: there is no agent or too many, a spec is malformed, or two name the same GPU.
        """
        if not 1 <= len(agents) <= MOST_AGENTS:
            raise BadInputError(f"An embedded cluster has 1 to {MOST_AGENTS} agents, not {len(agents)}.")
        self._specs = [spec.checked() for spec in agents]
        self._devices = unnamed_devices(self._specs)
        self._named_work_dir = work_dir
        self.access = ClusterAccess()
        self._zookeeper = zookeeper
        self._lock = threading.Lock()
        self._runner: DaemonRunner | None = None
        self._library = Path()
        self._files = settings.ClusterFiles(Path())
        names = (MASTER,) if zookeeper is None else CANDIDATES
        self._masters = [MasterDaemon(name, 0, zookeeper) for name in names]
        self._agents: list[AgentDaemon] = []
        self._start: Future[None] | None = None
        self._unwatched = threading.Event()
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
        """What frameworks are told: the master's `host:port`, or the `zk://` URI of an election."""
        return self._zookeeper or f"{self.access.address}:{self._masters[0].port}"

    @property
    def agents(self) -> list[Agent]:
        """The agents, in the order of the specs, as last started."""
        return [
            Agent(agent.name, self._pid(agent), agent.port, self._files.daemon(agent.name), agent.spec)
            for agent in self._agents
        ]

    @property
    def master_pid(self) -> int:
        """Id of the leading master's process, as last started.

        Raises:
            DikeError: none leads at the moment.
        """
        return self._pid(self._leading())

    @property
    def supervisor_pid(self) -> int:
        """Id of the process that ends the whole cluster when it gets SIGTERM."""
        return self._running().control.pid

    @property
    def work_dir(self) -> Path:
        """Folder with the daemons' logs (`master.log`, `agent-0.log`, ...), state and sandboxes."""
        return self._files.work_dir

    def start(self) -> None:
        """Starts everything and returns when all agents have registered.

        Raises:
            BadInputError: the platform is not supported, or `$DIKE_MESOS_FILE` names something else.
            DikeError: Mesos cannot be had or does not come up; the message ends with its log.
        """
        try:
            self._bring_up(self._prepare())
        except BaseException:  # Ctrl-C included: nothing half-started stays.
            self.stop()
            raise

    @contextlib.contextmanager
    def starting(self) -> Iterator[EmbeddedCluster]:
        """Starts everything in the background; the zygote server is there at once, for the rest see `wait_started`.

        Raises:
            BadInputError, DikeError: as `start`.
        """
        with ThreadPoolExecutor(1, "mesos") as background:
            try:
                self._start = background.submit(self._bring_up, self._prepare())
                yield self
            finally:
                # Without the supervisor a start that is still under way fails at once.
                self.stop()

    def wait_started(self) -> None:
        """Returns when all agents have registered, of a cluster that is `starting`.

        Raises:
            DikeError: as `start`.
        """
        assert self._start is not None
        self._start.result()

    @property
    def zygotes(self) -> str:
        """The zygote server's socket (`executor.zygote_server`)."""
        return str(self._files.zygotes)

    def stop(self) -> None:
        """Ends everything the cluster has started; does nothing when it is not running."""
        self._unwatched.set()
        with self._lock:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.control.stop()
            # Nothing is left by now, unless someone has killed the supervisor; then the system ended the daemons.
            for pid in task_processes(str(self.work_dir)):
                send(pid, signal.SIGKILL)
            self.access.remove()
        if self._named_work_dir is None and self.work_dir != Path():
            shutil.rmtree(self.work_dir, ignore_errors=True)

    def detach(self) -> None:
        """Lets the cluster live on without its owner, until SIGTERM reaches its supervisor."""
        self._unwatched.set()
        self._running().control.detach()
        self._runner = None

    def state(self) -> dict[str, Any]:
        """What the leading master answers to `GET /master/state`.

        Raises:
            DikeError: none answers.
        """
        state = self._told_state()
        if state is None:
            raise DikeError(f"The embedded Mesos master at {self.master} does not answer.")
        return state

    def wait_for_agents(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns when the master counts every agent as active, since its last start.

        Raises:
            DikeError: that did not come true in `timeout_s` seconds, or the cluster was stopped meanwhile.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self._missing_agents():
            self._running()  # Another thread may have stopped it.
            if time.monotonic() > deadline:
                names = ", ".join(agent.name for agent in missing)
                tail = self._files.log_tail(missing[0].name)
                raise DikeError(f"{names} did not register with the embedded Mesos. {tail}")
            time.sleep(LOOK_INTERVAL_S)

    def kill_agent(self, index: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to an agent's process, and waits for its end if the signal means that.

        With SIGKILL the agent's executors are left alone, as when an agent crashes; SIGUSR1 has it leave in good order.
        """
        self._running().signal(self._agents[index], sig)

    def restart_agent(self, index: int) -> None:
        """Starts a killed agent again with the same port and work folder; see `wait_for_agents`."""
        self._running().bring_up([self._agents[index]], movable=False)

    def kill_master(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the leading master's process, and waits for its end if the signal means that.

        Raises:
            DikeError: none leads at the moment.
        """
        self._running().signal(self._leading(), sig)

    def restart_master(self) -> None:
        """Starts killed masters again, each on its port; agents and their tasks come back about three seconds later."""
        runner = self._running()
        runner.bring_up([master for master in self._masters if runner.has_ended(master)], movable=False)

    def _bring_up(self, runner: DaemonRunner) -> None:
        runner.bring_up(self._masters)
        runner.bring_up(self._agents)
        self.wait_for_agents(READY_TIMEOUT_S)

    def _prepare(self) -> DaemonRunner:
        """Makes the work folder, reserves ports, starts the supervisor and the zygote server."""
        if self._files.work_dir != Path():
            raise DikeError("A cluster object can be started only once: make another.")
        self._library = ensure_library()
        named = self._named_work_dir
        folder = Path(tempfile.mkdtemp(prefix="dike-mesos-")) if named is None else named
        folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        self._files = settings.ClusterFiles(folder.resolve())
        settings.write_programs(self._files, self._library)
        models = gpu_models()
        daemons = len(self._masters) + len(self._specs)
        own_count = math.ceil(PORTS_OF_A_DAEMON * daemons / BLOCK_SIZE)
        blocks = reserve_blocks(own_count + sum(not spec.names("ports") for spec in self._specs))
        try:
            control = SupervisorControl(
                settings.supervisor_command(self._files, self.access, remove=named is None),
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
        # That of a cluster before would be taken for the new one's.
        self._files.zygotes.unlink(missing_ok=True)
        control.start(
            settings.ZYGOTES,
            settings.zygote_server_command(self._files),
            settings.zygote_server_environment(),
            self._files.log(settings.ZYGOTES),
        )
        control.keep(settings.ZYGOTES)
        self._runner = DaemonRunner(control, self._files, self.access, self._library, ports)
        self.access.write(self._files.credentials, self._files.zygotes)
        for master in self._masters:
            master.port = next(ports)
        for index, spec in enumerate(self._specs):
            name = f"agent-{index}"
            for part in ("work", "run"):
                (self._files.daemon(name) / part).mkdir(parents=True, exist_ok=True)
            filled_in = spec.filled_in(models, offered, self._devices)
            self._agents.append(AgentDaemon(name, next(ports), filled_in, lambda: self.master))
        threading.Thread(target=self._watch, args=(control,), name="mesos watch", daemon=True).start()
        return self._runner

    def _watch(self, control: SupervisorControl) -> None:
        """Finds out why the cluster does not go on, in a thread: a supervisor may be long in answering."""
        from executor.process import describe_exit  # only here: it takes long, and commands start with this module

        while not self._unwatched.wait(WATCH_INTERVAL_S):
            try:
                losses = control.losses()
            except DikeError as error:
                if not self._unwatched.is_set():
                    logger.error("%s", error)
                    how = describe_exit(control.wait())
                    self.failure = f"The private Mesos is gone, because its supervisor (process {control.pid}) {how}."
                return
            # Without their zygote server, executors import by themselves.
            losses.pop(settings.ZYGOTES, None)
            for name, status in losses.items():
                logger.error("%s", self._files.log_tail(name))
                self.failure = (
                    f"The private Mesos cannot go on: its {name} {describe_exit(status)}, and so it did each of the "
                    f"{MOST_STARTS} times that it was started again."
                )
                return

    def _running(self) -> DaemonRunner:
        if self._runner is None:
            raise DikeError("The embedded Mesos is not running: start it first.")
        return self._runner

    def _pid(self, daemon: Daemon) -> int:
        """Id of its process, which the supervisor may have started after us; of a cluster that is stopped, the last."""
        runner = self._runner
        return daemon.pid if runner is None else runner.control.running_pid(daemon.name)

    def _leading(self) -> MasterDaemon:
        if self._zookeeper is None:
            return self._masters[0]
        for master in self._masters:
            if self._state(master):
                return master
        raise DikeError(f"No embedded Mesos master leads at {self._zookeeper} at the moment.")

    def _told_state(self) -> dict[str, Any] | None:
        return next(filter(None, map(self._state, self._masters)), None)

    def _state(self, master: MasterDaemon) -> dict[str, Any] | None:
        """The cluster's state as a master tells it; None where it does not lead, or not answer."""
        return get_json(self.access, master.port, "/master/state")

    def _missing_agents(self) -> list[AgentDaemon]:
        """The agents that no leading master counts as active since their last start."""
        known = (self._told_state() or {}).get("slaves", ())
        seen_at = {
            agent["hostname"]: max(agent["registered_time"], agent.get("reregistered_time", 0.0))
            for agent in known
            if agent["active"]
        }
        return [agent for agent in self._agents if seen_at.get(agent.name, 0.0) < agent.started_at]
