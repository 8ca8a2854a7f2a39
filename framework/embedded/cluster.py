"""A real Apache Mesos on loopback: one master and any number of agents, one process each."""

from __future__ import annotations

import itertools
import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dike.exceptions import BadInputError, DikeError
from framework.embedded import settings
from framework.embedded.agents import AgentSpec
from framework.embedded.control import SupervisorControl
from framework.embedded.library import ensure_library
from framework.embedded.loopback import get_json
from framework.embedded.machine import gpu_models, local_resources
from framework.embedded.ports import BLOCK_SIZE, PortBlock, is_free, reserve_blocks
from framework.embedded.supervisor import send, task_processes

__all__ = ["Agent", "AgentSpec", "EmbeddedCluster", "local_resources"]

READY_TIMEOUT_S = 60.0
READY_REQUEST_TIMEOUT_S = 2.0
LOOK_INTERVAL_S = 0.02
LOG_TAIL_BYTES = 1500
MOST_AGENTS = 110
PORTS_OF_A_DAEMON = 2
"""One, and another if some program has taken it meanwhile."""
MASTER = "master"
ENDING_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1})


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


@dataclass
class _Daemon:
    """A master (no spec) or agent, whether or not it runs at the moment."""

    name: str
    port: int
    spec: AgentSpec | None = None
    pid: int = 0
    started_at: float = field(default=0.0)
    """Unix time of its last start."""


class EmbeddedCluster:
    """A private Mesos cluster that ends with its owner.

    A small supervisor process starts the daemons. When the owner stops the cluster, or ends in any way, the supervisor
    ends daemons, executors and all their children. One cluster object is started once.
    """

    def __init__(
        self,
        agents: Sequence[AgentSpec] = (AgentSpec(),),
        work_dir: Path | None = None,
        framework_credentials: Path | None = None,
    ) -> None:
        """Plans a cluster and starts nothing.

        Args:
            agents: one spec for each agent.
            work_dir: folder for logs and sandboxes, kept afterwards; None for a temporary one, removed at the end.
            framework_credentials: file in Mesos' JSON form, `{"credentials": [{"principal": ..., "secret": ...}]}`;
                frameworks must then authenticate with one of them (HTTP basic).

        Raises:
            BadInputError: there is no agent or too many, or a spec is malformed.
        """
        if not 1 <= len(agents) <= MOST_AGENTS:
            raise BadInputError(f"An embedded cluster has 1 to {MOST_AGENTS} agents, not {len(agents)}.")
        self._specs = [spec.checked() for spec in agents]
        self._named_work_dir = work_dir
        self._credentials = framework_credentials.absolute() if framework_credentials else None
        self._lock = threading.Lock()
        self._control: SupervisorControl | None = None
        self._library = Path()
        self._files = settings.ClusterFiles(Path())
        self._ports: Iterator[int] = iter(())
        self._master = _Daemon(MASTER, 0)
        self._agents: list[_Daemon] = []

    def __enter__(self) -> EmbeddedCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def master(self) -> str:
        """The master's `host:port`."""
        return f"{settings.ADDRESS}:{self._master.port}"

    @property
    def agents(self) -> list[Agent]:
        """The agents, in the order of the specs, as last started."""
        return [
            Agent(agent.name, agent.pid, agent.port, self._files.daemon(agent.name), agent.spec)
            for agent in self._agents
            if agent.spec is not None
        ]

    @property
    def master_pid(self) -> int:
        """Id of the master's process, as last started."""
        return self._master.pid

    @property
    def supervisor_pid(self) -> int:
        """Id of the process that ends the whole cluster when it gets SIGTERM."""
        return self._running().pid

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
        if self._files.work_dir != Path():
            raise DikeError("A cluster object can be started only once: make another.")
        self._library = ensure_library()
        try:
            self._prepare()
            self._bring_up([self._master])
            self._bring_up(self._agents)
            self.wait_for_agents(READY_TIMEOUT_S)
        except BaseException:  # Ctrl-C included: nothing half-started stays.
            self.stop()
            raise

    def stop(self) -> None:
        """Ends everything the cluster has started; does nothing when it is not running."""
        with self._lock:
            control, self._control = self._control, None
        if control is not None:
            control.stop()
            # Nothing is left by now, unless someone has killed the supervisor; then the system ended the daemons.
            for pid in task_processes(str(self.work_dir)):
                send(pid, signal.SIGKILL)
        if self._named_work_dir is None and self.work_dir != Path():
            shutil.rmtree(self.work_dir, ignore_errors=True)

    def detach(self) -> None:
        """Lets the cluster live on without its owner, until SIGTERM reaches its supervisor."""
        self._running().detach()
        self._control = None

    def state(self) -> dict[str, Any]:
        """What the master answers to `GET /master/state`.

        Raises:
            DikeError: it does not answer.
        """
        state = self._get(self._master, "/master/state")
        if state is None:
            raise DikeError(f"The embedded Mesos master at {self.master} does not answer.")
        return state

    def wait_for_agents(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns when the master counts every agent as active, since its last start.

        Raises:
            DikeError: that did not come true in `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self._missing_agents():
            if time.monotonic() > deadline:
                names = ", ".join(agent.name for agent in missing)
                raise DikeError(f"{names} did not register with the embedded Mesos. {self._log_tail(missing[0].name)}")
            time.sleep(LOOK_INTERVAL_S)

    def kill_agent(self, index: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to an agent's process, and waits for its end if the signal means that.

        With SIGKILL the agent's executors are left alone, as when an agent crashes; SIGUSR1 has it leave in good order.
        """
        self._signal(self._agents[index], sig)

    def restart_agent(self, index: int) -> None:
        """Starts a killed agent again with the same port and work folder; see `wait_for_agents`."""
        self._bring_up([self._agents[index]], movable=False)

    def kill_master(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the master's process, and waits for its end if the signal means that."""
        self._signal(self._master, sig)

    def restart_master(self) -> None:
        """Starts a killed master again on the same port; agents and their tasks come back about three seconds later."""
        self._bring_up([self._master], movable=False)

    def _prepare(self) -> None:
        """Makes the work folder, reserves ports and starts the supervisor."""
        named = self._named_work_dir
        folder = Path(tempfile.mkdtemp(prefix="dike-mesos-")) if named is None else named
        folder.mkdir(parents=True, exist_ok=True)
        self._files = settings.ClusterFiles(folder.resolve())
        settings.write_programs(self._files, self._library)
        models = gpu_models()
        daemons = 1 + len(self._specs)
        own_count = math.ceil(PORTS_OF_A_DAEMON * daemons / BLOCK_SIZE)
        blocks = reserve_blocks(own_count + sum(not spec.names("ports") for spec in self._specs))
        try:
            self._control = SupervisorControl(
                settings.supervisor_command(self._files, remove=named is None),
                self.work_dir,
                self._files.log("supervisor"),
                [block.claim.fileno() for block in blocks],  # The supervisor keeps them reserved from now on.
            )
        finally:
            for block in blocks:
                block.claim.close()
        own, offered = blocks[:own_count], blocks[own_count:]
        self._ports = itertools.chain.from_iterable(own)
        self._master.port = next(self._ports)
        for index, spec in enumerate(self._specs):
            name = f"agent-{index}"
            for part in ("work", "run"):
                (self._files.daemon(name) / part).mkdir(parents=True, exist_ok=True)
            self._agents.append(_Daemon(name, next(self._ports), _filled_in(spec, models, offered)))

    def _bring_up(self, daemons: Sequence[_Daemon], *, movable: bool = True) -> None:
        """Starts daemons and returns when all answer.

        A daemon that has lost its port to some other program gets another one, if it is `movable`.
        """
        control = self._running()
        for daemon in daemons:
            self._spawn(daemon)
        deadline = time.monotonic() + READY_TIMEOUT_S
        for daemon in daemons:
            while not self._answers(daemon):
                if control.has_ended(daemon.name):
                    another = next(self._ports, None) if movable and not is_free(daemon.port) else None
                    if another is None:
                        raise DikeError(f"The embedded Mesos' {daemon.name} ended. {self._log_tail(daemon.name)}")
                    daemon.port = another
                    self._spawn(daemon)
                if time.monotonic() > deadline:
                    raise DikeError(f"The embedded Mesos' {daemon.name} does not answer. {self._log_tail(daemon.name)}")
                time.sleep(LOOK_INTERVAL_S)

    def _spawn(self, daemon: _Daemon) -> None:
        control = self._running()
        if daemon.spec is None:
            arguments: tuple[str, ...] = ("master",)
            environment = settings.master_environment(self._files, daemon.port, self._credentials)
        else:
            arguments = ("agent", self.master)
            environment = settings.agent_environment(self._files, daemon.name, daemon.port, daemon.spec)
        command = settings.daemon_command(self._library, control.pid, *arguments)
        daemon.started_at = time.time()
        daemon.pid = control.start(daemon.name, command, environment, self._files.log(daemon.name))

    def _signal(self, daemon: _Daemon, sig: signal.Signals) -> None:
        control = self._running()
        control.signal(daemon.name, sig)
        self._wait_until(lambda: sig not in ENDING_SIGNALS or control.has_ended(daemon.name), daemon.name)

    def _wait_until(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                raise DikeError(f"The embedded Mesos' {name} does not end. {self._log_tail(name)}")
            time.sleep(LOOK_INTERVAL_S)

    def _running(self) -> SupervisorControl:
        if self._control is None:
            raise DikeError("The embedded Mesos is not running: start it first.")
        return self._control

    def _answers(self, daemon: _Daemon) -> bool:
        """Whether the daemon itself, and not some other program on its port, answers."""
        path = "/master/state" if daemon.spec is None else "/state"
        state = get_json(settings.ADDRESS, daemon.port, path, READY_REQUEST_TIMEOUT_S)
        work_dir = str((state or {}).get("flags", {}).get("work_dir", ""))
        return work_dir.startswith(f"{self._files.daemon(daemon.name)}")

    def _missing_agents(self) -> list[_Daemon]:
        """The agents that the master does not count as active since their last start."""
        known = (self._get(self._master, "/master/state") or {}).get("slaves", ())
        seen_at = {
            agent["hostname"]: max(agent["registered_time"], agent.get("reregistered_time", 0.0))
            for agent in known
            if agent["active"]
        }
        return [agent for agent in self._agents if seen_at.get(agent.name, 0.0) < agent.started_at]

    def _get(self, daemon: _Daemon, path: str) -> dict[str, Any] | None:
        return get_json(settings.ADDRESS, daemon.port, path)

    def _log_tail(self, name: str) -> str:
        """The end of a daemon's log, as the end of an error message."""
        log = self._files.log(name)
        text = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
        return f"Its log {log} ends with:\n{text}"


def _filled_in(spec: AgentSpec, models: Sequence[str], blocks: list[PortBlock]) -> AgentSpec:
    """`spec` with the machine's resources where it names none, a block of ports, and the model of its GPUs."""
    resources = spec.resources or local_resources()
    if not spec.names("ports"):
        resources += f";ports:{blocks.pop(0)}"
    attributes = spec.attributes
    named = {part.split(":")[0] for part in attributes.split(";")}
    has_gpus = replace(spec, resources=resources).scalar("gpus") > 0
    if has_gpus and "gpu_model" not in named and len(set(models)) == 1:
        attributes = ";".join(filter(None, (attributes, f"gpu_model:{models[0]}")))
    return AgentSpec(resources, attributes)
