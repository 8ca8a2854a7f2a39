"""A user's detached cluster, which has no owner: `dike mesos up`, `status` and `down`."""

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
from framework.user_folders import file_lock, private_cache_dir

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
        state = None if access is None else get_json(access, int(port), "/master/state")
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


def find() -> DetachedCluster | None:
    try:
        cluster = typed.read(DetachedCluster, json.loads(_state_file().read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise DikeError(
            f"The file {_state_file()} is damaged ({error}): remove it; a Mesos that is still up ends with the process "
            f"that has {_work_dir()} on its command line."
        ) from error
    return cluster if cluster.is_up() else None


def bring_up(agents: Sequence[AgentSpec]) -> DetachedCluster:
    """Starts the detached cluster.

    Raises:
        BadInputError: it is up already, or a spec is malformed.
        DikeError: it does not start.
    """
    planned = EmbeddedCluster(agents, work_dir=_work_dir())
    check_platform()
    with file_lock(_lock_file()):
        running = find()
        if running:
            raise BadInputError(
                f"A private Mesos is up already, its master at {running.master}: end it with `dike mesos down`."
            )
        shutil.rmtree(_work_dir(), ignore_errors=True)
        with planned as cluster:
            found = DetachedCluster(
                cluster.master,
                cluster.supervisor_pid,
                psutil.Process(cluster.supervisor_pid).create_time(),
                {agent.name: agent.pid for agent in cluster.agents},
                str(cluster.access.secret_file),
            )
            # Written first: if this process is killed in between, the cluster ends and the file is outdated.
            draft = _state_file().with_suffix(".new")
            draft.write_text(json.dumps(dataclasses.asdict(found)))
            draft.replace(_state_file())
            cluster.detach()
    return found


def take_down() -> bool:
    """Ends the detached cluster; returns whether it was up.

    Raises:
        DikeError: it does not end.
    """
    if not _lock_file().exists():  # never started
        return False
    with file_lock(_lock_file()):
        cluster = find()
        if cluster is not None:
            send(cluster.supervisor_pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while cluster.is_up():
                if time.monotonic() > deadline:
                    raise DikeError(f"The private Mesos (process {cluster.supervisor_pid}) does not end: kill it.")
                time.sleep(POLL_INTERVAL_S)
        _state_file().unlink(missing_ok=True)
        shutil.rmtree(_work_dir(), ignore_errors=True)
    return cluster is not None


def _state_file() -> Path:
    return private_cache_dir() / "mesos-cluster.json"


def _lock_file() -> Path:
    return private_cache_dir() / "mesos-cluster.lock"


def _work_dir() -> Path:
    return private_cache_dir() / "mesos-cluster"
