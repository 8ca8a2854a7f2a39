"""Command lines and environments of the daemons of an embedded cluster."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from executor.environment import ZYGOTES_VARIABLE
from executor.limits import LIMITS_VARIABLE, PROCESSES_VARIABLE
from executor.mirror import CREDENTIALS_VARIABLE, STORE_VARIABLE
from framework.embedded.agents import AgentSpec

HERE = Path(__file__).resolve().parent
INTERPRETER = (sys.executable, "-SEsP")
"""Python without site packages, user settings or the program's folder: the programs need only the standard library."""
ZYGOTES = "zygotes"
AGENT_PYTHON = "dike-agent-python"
"""Program on the PATH of executors: the Python that has started the agent."""
DAEMON_VARIABLES = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables that the daemons inherit from the owner."""
EXECUTOR_VARIABLES = ("TMPDIR", PROCESSES_VARIABLE)
"""Variables that the executors inherit; others that a script needs come with its job."""
LOG_TAIL_BYTES = 1500


@dataclass(frozen=True)
class ClusterFiles:
    """Files of a cluster, below its work folder."""

    work_dir: Path

    @property
    def programs(self) -> Path:
        return self.work_dir / "libexec"

    @property
    def credentials(self) -> Path:
        """File with the credentials that daemons require, in Mesos' form."""
        return self.work_dir / "credentials.json"

    @property
    def zygotes(self) -> Path:
        return self.work_dir / "zygotes.sock"

    def log(self, name: str) -> Path:
        return self.work_dir / f"{name}.log"

    def daemon(self, name: str) -> Path:
        return self.work_dir / name

    def log_tail(self, name: str) -> str:
        """The end of a daemon's log, as the end of an error message."""
        log = self.log(name)
        text = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
        return f"Its log {log} ends with:\n{text}"


def write_programs(files: ClusterFiles, library: Path) -> None:
    """Writes the programs that Mesos expects in its launcher folder."""
    files.programs.mkdir(parents=True, exist_ok=True)
    for name, command in {
        "mesos-containerizer": [*INTERPRETER, str(HERE / "daemon.py"), str(library), "0", "containerizer"],
        "mesos-executor": [*INTERPRETER, str(HERE / "command_executor.py")],
        AGENT_PYTHON: [sys.executable],
    }.items():
        program = files.programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        program.chmod(0o755)


def supervisor_command(files: ClusterFiles, leftovers: Iterable[Path]) -> list[str]:
    program = [*INTERPRETER, str(HERE / "supervisor.py"), str(os.getpid()), str(files.work_dir)]
    return [*program, *map(str, leftovers)]


def daemon_command(library: Path, supervisor_pid: int, *arguments: str) -> list[str]:
    return [*INTERPRETER, str(HERE / "daemon.py"), str(library), str(supervisor_pid), *arguments]


def zygote_server_command(files: ClusterFiles) -> list[str]:
    return [sys.executable, "-P", "-m", "executor.zygote_server", str(files.zygotes), str(files.daemon(ZYGOTES))]


def service_environment() -> dict[str, str]:
    """Environment of processes beside the daemons; each zygote of the zygote server has its own."""
    return _values((*DAEMON_VARIABLES, "PYTHONPATH"))


def master_environment(files: ClusterFiles, name: str, address: str, port: int, agent_timeout_s: int) -> dict[str, str]:
    return {
        **_common(address, port),
        "MESOS_HOSTNAME": address,
        "MESOS_WORK_DIR": str(files.daemon(name)),
        "MESOS_REGISTRY": "in_memory",
        "MESOS_ALLOCATION_INTERVAL": "100ms",
        # Detects dead agents, and lets agents detect a restarted master, after this time instead of 75 s.
        "MESOS_AGENT_PING_TIMEOUT": "1secs",
        "MESOS_MAX_AGENT_PING_TIMEOUTS": str(agent_timeout_s),
        "MESOS_CREDENTIALS": str(files.credentials),
        "MESOS_AUTHENTICATE_HTTP_FRAMEWORKS": "true",
        "MESOS_HTTP_FRAMEWORK_AUTHENTICATORS": "basic",
        # Rejects libprocess drivers: they would need SASL, which the library lacks.
        "MESOS_AUTHENTICATE_FRAMEWORKS": "true",
    }


def agent_environment(
    files: ClusterFiles, name: str, address: str, port: int, hostname: str, spec: AgentSpec
) -> dict[str, str]:
    folder = files.daemon(name)
    environment = {
        **_common(address, port),
        "MESOS_HOSTNAME": hostname,
        "MESOS_WORK_DIR": str(folder / "work"),
        "MESOS_RUNTIME_DIR": str(folder / "run"),
        "MESOS_FETCHER_CACHE_DIR": str(folder / "fetch"),
        "MESOS_LAUNCHER_DIR": str(files.programs),
        "MESOS_CONTAINERIZERS": "mesos",
        "MESOS_ISOLATION": "posix/cpu,posix/mem",
        "MESOS_LAUNCHER": "posix",
        "MESOS_SWITCH_USER": "false",
        "MESOS_SYSTEMD_ENABLE_SUPPORT": "false",
        "MESOS_REGISTRATION_BACKOFF_FACTOR": "100ms",
        "MESOS_EXECUTOR_SHUTDOWN_GRACE_PERIOD": "1secs",
        "MESOS_RESOURCES": spec.resources,
        "MESOS_EXECUTOR_ENVIRONMENT_VARIABLES": json.dumps(
            {
                ZYGOTES_VARIABLE: str(files.zygotes),
                LIMITS_VARIABLE: "1",
                **_values(EXECUTOR_VARIABLES),
                "PATH": f"{files.programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            }
        ),
        "MESOS_HTTP_CREDENTIALS": str(files.credentials),
    }
    if spec.attributes:
        environment["MESOS_ATTRIBUTES"] = spec.attributes
    return environment


def with_store(environment: dict[str, str], files: ClusterFiles, store: str) -> dict[str, str]:
    """Adds what executors need to use the store of a cluster of several machines."""
    variable = "MESOS_EXECUTOR_ENVIRONMENT_VARIABLES"
    added = {
        STORE_VARIABLE: store,
        CREDENTIALS_VARIABLE: str(files.credentials),
    }
    return {**environment, variable: json.dumps({**json.loads(environment[variable]), **added})}


def _common(address: str, port: int) -> dict[str, str]:
    return _values(DAEMON_VARIABLES) | {
        "LIBPROCESS_IP": address,
        "LIBPROCESS_PORT": str(port),
        "LIBPROCESS_NUM_WORKER_THREADS": "4",
        "MESOS_AUTHENTICATE_HTTP_READONLY": "true",
        "MESOS_AUTHENTICATE_HTTP_READWRITE": "true",
    }


def _values(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}
