"""Nothing of an embedded cluster outlives its owner, however the owner ends: proved on the process table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.embedded.embedded_support import DEADLINE_S, alive, with_argument
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.mesos
ROOT = Path(__file__).resolve().parents[2]

# A task whose child has left its process group and session, and whose grandchild has no environment any more either.
# The framework would have an hour to come back: Mesos itself has no reason to end the task.
# A shell that runs the tests in the background has them, and all that they start, ignore Ctrl-C.
OWNER = """
import json, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests.embedded.embedded_support import RawFramework

mark = sys.argv[1].removeprefix("mark=")
with EmbeddedCluster([AgentSpec("cpus:1;mem:256"), AgentSpec("cpus:1;mem:256")]) as cluster:
    framework = RawFramework(cluster.master, failover_timeout=3600.0, checkpoint=True)
    command = f"(env -i setsid sh -c 'sleep {mark} & sleep {mark}' &) ; setsid sleep {mark} & exec sleep {mark}"
    framework.launch("stays", {"value": command})
    framework.wait_for("stays", "TASK_RUNNING")
    print(json.dumps({"work_dir": str(cluster.work_dir), "supervisor": cluster.supervisor_pid,
                      "daemons": [cluster.master_pid] + [agent.pid for agent in cluster.agents]}), flush=True)
    if sys.stdin.readline().strip() == "raise":
        raise RuntimeError("the owner failed")
"""


@dataclass
class Owner:
    """A process that owns a cluster with a running task, and everything that belongs to that cluster."""

    process: subprocess.Popen[str]
    work_dir: Path
    supervisor: psutil.Process
    daemons: list[psutil.Process]
    belongings: list[psutil.Process]

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def assert_all_gone(self) -> None:
        wait_until(lambda: not alive(self.belongings), "daemons, executors and tasks have ended")
        wait_until(lambda: not self.work_dir.exists(), "the temporary work folder is removed")


@pytest.fixture
def owner() -> Iterator[Owner]:
    mark = f"8000.{time.time_ns()}"  # The task's sleep in seconds, unique among all processes.
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"mark={mark}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        sleepers = wait_until(lambda: (found := with_argument(mark)) and len(found) == 4 and found, "the task runs")
        supervisor = psutil.Process(told["supervisor"])
        belongings = [supervisor, *supervisor.children(recursive=True)]
        ids = {process.pid for process in belongings}
        assert set(told["daemons"]) <= ids
        assert {sleeper.pid for sleeper in sleepers} <= ids
        assert any(part.endswith("command_executor.py") for one in belongings for part in one.cmdline())
        daemons = [one for one in belongings if one.pid in told["daemons"]]
        yield Owner(process, Path(told["work_dir"]), supervisor, daemons, belongings)
        wait_until(lambda: not with_argument(mark), "no process of the task is left")
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_stop(owner: Owner) -> None:
    owner.say("stop")
    assert owner.process.wait(DEADLINE_S) == 0
    assert not alive(owner.belongings)  # No wait: stop() returns when all have ended.
    assert not owner.work_dir.exists()


def test_exception_in_the_owner(owner: Owner) -> None:
    owner.say("raise")
    assert owner.process.wait(DEADLINE_S) == 1
    assert not alive(owner.belongings)
    assert not owner.work_dir.exists()


def test_ctrl_c(owner: Owner) -> None:
    """As a terminal does it: the signal goes to the owner's whole process group."""
    os.killpg(owner.process.pid, signal.SIGINT)
    assert owner.process.wait(DEADLINE_S) != 0
    assert not alive(owner.belongings)
    assert not owner.work_dir.exists()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_owner_is_killed(owner: Owner, ending: signal.Signals) -> None:
    owner.process.send_signal(ending)
    assert owner.process.wait(DEADLINE_S) == -ending
    owner.assert_all_gone()


def test_owner_is_killed_while_a_child_holds_its_pipe() -> None:
    """A forked child of the owner keeps the pipe open: the supervisor sees that its parent is gone."""
    script = """
import os, sys
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
cluster = EmbeddedCluster([AgentSpec("cpus:1;mem:256")])
cluster.start()
if os.fork() == 0:
    sys.stdin.readline()
    os._exit(0)
print(cluster.work_dir, cluster.supervisor_pid, cluster.master_pid, cluster.agents[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        work_dir, *pids = process.stdout.readline().split()
        assert len(pids) == 3
        wait_until(
            lambda: not any(is_alive(int(pid)) for pid in pids),
            "supervisor, master and agent have ended",
        )
        assert not Path(work_dir).exists()
        assert process.stdin is not None
        process.stdin.close()


def test_supervisor_is_killed(owner: Owner) -> None:
    """The kernel ends the daemons immediately; the owner's stop() ends the rest."""
    owner.supervisor.kill()
    wait_until(lambda: not alive(owner.daemons), "the daemons have ended")
    owner.say("stop")
    owner.process.wait(DEADLINE_S)
    assert not owner.work_dir.exists()
    # Processes that cleared their environment cannot be identified any more. The rest takes a moment to end.
    wait_until(lambda: not any(map(carries_its_folder, owner.belongings)), "the end of the identifiable processes")
    for process in alive(owner.belongings):
        process.kill()


def carries_its_folder(process: psutil.Process) -> bool:
    """Whether a process runs and has the folder of its task in its environment."""
    try:
        return is_alive(process) and "MESOS_DIRECTORY" in process.environ()
    except psutil.NoSuchProcess:
        return False
