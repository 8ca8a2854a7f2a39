"""Command tasks on the embedded Mesos, driven over the plain v1 scheduler API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from tests.embedded.embedded_support import RawFramework, alive, be_patient, with_argument
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.mesos
TERMINAL = ("TASK_FINISHED", "TASK_FAILED", "TASK_KILLED", "TASK_LOST", "TASK_ERROR")


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        be_patient(monkeypatch)
        with EmbeddedCluster([AgentSpec("cpus:2;mem:512;gpus:1")]) as started:
            yield started


@pytest.fixture
def framework(cluster: EmbeddedCluster) -> Iterator[RawFramework]:
    started = RawFramework(cluster.master)
    yield started
    started.close()


def sandbox_file(cluster: EmbeddedCluster, task_id: str, name: str) -> Path:
    runs = cluster.work_dir.glob(f"agent-0/work/slaves/*/frameworks/*/executors/{task_id}/runs/latest/{name}")
    return next(iter(runs))


def test_prints_into_its_sandbox_and_finishes(cluster: EmbeddedCluster, framework: RawFramework) -> None:
    command = {
        "value": 'echo "hello from $WHERE"; echo "task $MESOS_EXECUTOR_ID" >&2',
        "environment": {"variables": [{"name": "WHERE", "value": "the agent"}]},
    }
    framework.launch("prints", command)
    status = framework.wait_for("prints", *TERMINAL)
    assert status["state"] == "TASK_FINISHED"
    assert status["message"] == "Command exited with status 0"
    states = [update["state"] for update in framework.updates]
    assert states == ["TASK_STARTING", "TASK_RUNNING", "TASK_FINISHED"]
    assert sandbox_file(cluster, "prints", "stdout").read_text() == "hello from the agent\n"
    assert "task prints" in sandbox_file(cluster, "prints", "stderr").read_text()


def test_exit_status_is_in_the_message(framework: RawFramework) -> None:
    framework.launch("exits", {"value": "exit 3"})
    status = framework.wait_for("exits", *TERMINAL)
    assert status["state"] == "TASK_FAILED"
    assert "exited with status 3" in status["message"]


def test_signal_is_in_the_message(framework: RawFramework) -> None:
    framework.launch("crashes", {"value": "kill -SEGV $$"})
    status = framework.wait_for("crashes", *TERMINAL)
    assert status["state"] == "TASK_FAILED"
    assert "SIGSEGV" in status["message"]


def test_arguments_without_a_shell(cluster: EmbeddedCluster, framework: RawFramework) -> None:
    framework.launch("bare", {"shell": False, "value": "/bin/echo", "arguments": ["echo", "$HOME", "a  b"]})
    assert framework.wait_for("bare", *TERMINAL)["state"] == "TASK_FINISHED"
    assert sandbox_file(cluster, "bare", "stdout").read_text() == "$HOME a  b\n"


def test_command_that_cannot_be_started(framework: RawFramework) -> None:
    framework.launch("absent", {"shell": False, "value": "/no/such/program", "arguments": ["program"]})
    status = framework.wait_for("absent", *TERMINAL)
    assert status["state"] == "TASK_FAILED"
    assert "could not be started" in status["message"]
    assert "/no/such/program" in status["message"]


def test_kill_ends_the_command_and_its_children(framework: RawFramework) -> None:
    agent = framework.launch("killed", {"value": "sleep 7101.5 & sleep 7101.5; true"})
    framework.wait_for("killed", "TASK_RUNNING")
    wait_until(lambda: len(with_argument("7101.5")) == 2, "both children run")
    framework.kill("killed", agent)
    status = framework.wait_for("killed", *TERMINAL)
    assert status["state"] == "TASK_KILLED"
    assert "SIGTERM" in status["message"]
    wait_until(lambda: not with_argument("7101.5"), "no child is left")


def test_kill_waits_for_the_grace_period(cluster: EmbeddedCluster, framework: RawFramework) -> None:
    script = 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.05; done'
    agent = framework.launch("graceful", {"value": script}, kill_policy={"grace_period": {"nanoseconds": 30 * 10**9}})
    framework.wait_for("graceful", "TASK_RUNNING")
    wait_until(lambda: "ready" in sandbox_file(cluster, "graceful", "stdout").read_text(), "the trap is set")
    framework.kill("graceful", agent)
    status = framework.wait_for("graceful", *TERMINAL)
    assert status["state"] == "TASK_KILLED"
    assert "exited with status 0" in status["message"]
    assert "saved" in sandbox_file(cluster, "graceful", "stdout").read_text()


def test_kill_of_a_deaf_command_after_the_grace_period(cluster: EmbeddedCluster, framework: RawFramework) -> None:
    script = 'trap "" TERM; echo ready; while :; do sleep 0.05; done'
    agent = framework.launch("deaf", {"value": script}, kill_policy={"grace_period": {"nanoseconds": 300_000_000}})
    framework.wait_for("deaf", "TASK_RUNNING")
    wait_until(lambda: "ready" in sandbox_file(cluster, "deaf", "stdout").read_text(), "the trap is set")
    framework.kill("deaf", agent)
    status = framework.wait_for("deaf", *TERMINAL)
    assert status["state"] == "TASK_KILLED"
    assert "SIGKILL" in status["message"]


def test_executor_ends_after_its_task(cluster: EmbeddedCluster, framework: RawFramework, tmp_path: Path) -> None:
    """The last status has been taken by the agent: the scheduler gets it although the executor is gone."""
    end = tmp_path / "end"
    framework.launch("short", {"value": f"until [ -e {end} ]; do sleep 0.05; done"})
    framework.wait_for("short", "TASK_RUNNING")
    assert _executors(cluster)
    end.touch()
    assert framework.wait_for("short", *TERMINAL)["state"] == "TASK_FINISHED"
    wait_until(lambda: not _executors(cluster), "no executor is left")


def _executors(cluster: EmbeddedCluster) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(cluster.supervisor_pid).children(recursive=True):
        # It may end meanwhile.
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_alive(process) and any(part.endswith("/command_executor.py") for part in process.cmdline()):
                found.append(process)
    return found


def test_a_checkpointed_task_outlives_its_agent(cluster: EmbeddedCluster) -> None:
    """The command executor waits for its agent, subscribes again and continues to report."""
    framework = RawFramework(cluster.master, checkpoint=True, failover_timeout=600.0)
    agent = framework.launch("survivor", {"value": "exec sleep 7102.5"})
    framework.wait_for("survivor", "TASK_RUNNING")
    (sleeper,) = wait_until(lambda: with_argument("7102.5"), "the command runs")
    cluster.kill_agent(0)
    cluster.restart_agent(0)
    cluster.wait_for_agents()
    assert alive([sleeper])
    sleeper.terminate()
    status = framework.wait_for("survivor", *TERMINAL)
    assert status["state"] == "TASK_FAILED"
    assert "SIGTERM" in status["message"]
    assert status["agent_id"]["value"] == agent
    framework.close()
