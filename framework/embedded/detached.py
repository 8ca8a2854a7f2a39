"""Clusters without an owner, each with its state in a folder: `dike mesos up` and `dike cluster`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dike import typed
from dike.exceptions import BadInputError, DikeError
from framework.embedded.access import find_access
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.embedded.control import STOP_TIMEOUT_S
from framework.embedded.daemons import AGENT
from framework.embedded.library import check_platform
from framework.embedded.loopback import get_json
from framework.embedded.supervisor import send
from framework.user_folders import file_lock, machine_dir

POLL_INTERVAL_S = 0.02


@dataclass(frozen=True)
class DetachedCluster:
    """A detached cluster that was started.

    Attributes:
        supervisor_pid: process that ends the cluster on SIGTERM.
        supervisor_started: Unix time of that process's start, which detects reuse of its id.
        agent_pids: hostname -> process id of each agent, as first started.
        secret_file: secret of the principal `dike`, for other frameworks.
    """

    master: str
    supervisor_pid: int
    supervisor_started: float
    agent_pids: dict[str, int]
    secret_file: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+:[0-9]{1,5}", self.master) or not 0 < self.supervisor_pid < 2**31:
            raise ValueError("there is no such master or process")

    def is_up(self) -> bool:
        """Whether the supervisor runs and is not a zombie."""
        try:
            process = psutil.Process(self.supervisor_pid)
            same = abs(process.create_time() - self.supervisor_started) < 1
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def describe(self) -> dict[str, Any]:
        """The master, and of each agent id, hostname, pid, resources, attributes and whether it is active.

        Raises:
            DikeError: the master does not answer.
        """
        host, _, port = self.master.rpartition(":")
        access = find_access(host)
        state = None if access is None else get_json(host, int(port), "/master/state", access.credentials)
        if state is None:
            raise DikeError(
                f"The private Mesos is up but its master at {self.master} does not answer: `dike mesos down`."
            )
        known = {agent["hostname"]: agent for agent in state["slaves"]}
        pids = self._running_agents()
        agents = []
        for hostname, first_pid in self.agent_pids.items():
            agent = known.get(hostname, {})
            agents.append(
                {
                    "id": agent.get("id"),
                    "hostname": hostname,
                    "pid": pids.get(hostname, first_pid),
                    "resources": agent.get("resources", {}),
                    "attributes": agent.get("attributes", {}),
                    "active": bool(agent.get("active", False)),
                }
            )
        return {"master": self.master, "secret_file": self.secret_file, "agents": agents}

    def _running_agents(self) -> dict[str, int]:
        """Hostname -> process id of the running agents, which the supervisor may have restarted."""
        found = {}
        # A daemon, or the supervisor itself, may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.supervisor_pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.cmdline()[-2:-1] == [AGENT]:
                        found[child.environ()["MESOS_HOSTNAME"]] = child.pid
        return found


@dataclass(frozen=True)
class DetachedFiles:
    """The files of a detached cluster.

    Attributes:
        work_dir: of its daemons.
        state, lock: what is stored about it, and the lock of the processes that start or stop it.
    """

    work_dir: Path
    state: Path
    lock: Path

    @classmethod
    def of_mesos_up(cls) -> DetachedFiles:
        """Those of `dike mesos up`."""
        folder = machine_dir()
        return cls(folder / "mesos-cluster", folder / "mesos-cluster.json", folder / "mesos-cluster.lock")

    def find(self) -> DetachedCluster | None:
        """The cluster, if it is up.

        Raises:
            DikeError: the state is damaged.
        """
        try:
            cluster = typed.read(DetachedCluster, json.loads(self.state.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise DikeError(
                f"The file {self.state} is damaged ({error}): remove it; a Mesos that is still up ends with the "
                f"process that has {self.work_dir} on its command line."
            ) from error
        return cluster if cluster.is_up() else None

    def bring_up(self, planned: EmbeddedCluster) -> DetachedCluster:
        """Starts a cluster in `work_dir`, which is emptied first, and detaches it. Call it with `lock` locked.

        Raises:
            DikeError: it does not start.
        """
        check_platform()
        shutil.rmtree(self.work_dir, ignore_errors=True)
        with planned as cluster:
            # Written first: if this process is killed in between, the cluster ends and the file is outdated.
            found = self.record(cluster)
            cluster.detach()
        return found

    def record(self, cluster: EmbeddedCluster) -> DetachedCluster:
        """Stores the state of a started cluster."""
        found = DetachedCluster(
            cluster.master,
            cluster.supervisor_pid,
            psutil.Process(cluster.supervisor_pid).create_time(),
            {agent.name: agent.pid for agent in cluster.agents},
            str(cluster.access.secret_file),
        )
        draft = self.state.with_suffix(".new")
        draft.write_text(json.dumps(dataclasses.asdict(found)))
        draft.replace(self.state)
        return found

    def take_down(self) -> bool:
        """Ends the cluster; returns whether it was up.

        Raises:
            DikeError: it does not end.
        """
        if not self.lock.exists():  # never started
            return False
        with file_lock(self.lock):
            cluster = self.find()
            if cluster is not None:
                send(cluster.supervisor_pid, signal.SIGTERM)
                deadline = time.monotonic() + STOP_TIMEOUT_S
                while cluster.is_up():
                    if time.monotonic() > deadline:
                        raise DikeError(f"The private Mesos (process {cluster.supervisor_pid}) does not end: kill it.")
                    time.sleep(POLL_INTERVAL_S)
            self.state.unlink(missing_ok=True)
            shutil.rmtree(self.work_dir, ignore_errors=True)
        return cluster is not None


def bring_up(agents: Sequence[AgentSpec]) -> DetachedCluster:
    """Starts the cluster of `dike mesos up`.

    Raises:
        BadInputError: it is up already, or a spec is malformed.
        DikeError: it does not start.
    """
    files = DetachedFiles.of_mesos_up()
    planned = EmbeddedCluster(agents, work_dir=files.work_dir)
    with file_lock(files.lock):
        if running := files.find():
            raise BadInputError(
                f"A private Mesos is up already, its master at {running.master}: end it with `dike mesos down`."
            )
        return files.bring_up(planned)


def find() -> DetachedCluster | None:
    """The cluster of `dike mesos up`, if it is up."""
    return DetachedFiles.of_mesos_up().find()


def take_down() -> bool:
    """Ends the cluster of `dike mesos up`; returns whether it was up."""
    return DetachedFiles.of_mesos_up().take_down()
