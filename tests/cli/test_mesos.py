"""`dike mesos up`, `status` and `down`, as a user types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework.embedded.library import ensure_library
from framework.embedded.supervisor import MAX_RESTARTS
from tests.embedded.embedded_support import RawFramework, alive, basic, kill_one_daemon, with_argument
from tests.waiting import wait_until

pytestmark = pytest.mark.mesos
DEADLINE_S = 120
Dike = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dike(tmp_path: Path) -> Iterator[Dike]:
    """Runs `dike mesos ...` with a cache of its own."""
    cache = tmp_path / "cache"
    library = ensure_library()
    # The process that built the library may still be deleting its temporary folder.
    shutil.copytree(library.parent, cache / library.parent.name, ignore=shutil.ignore_patterns("making-*"))
    environment = os.environ | {"DIKE_CACHE": str(cache)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "framework", "mesos", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    yield run
    run("down")


def test_up_status_down(dike: Dike) -> None:
    absent = dike("status")
    assert absent.returncode == 1
    assert absent.stderr.startswith("dike: No private Mesos is up")

    up = dike("up", "--agents", "3", "--resources", "cpus:4;mem:4096;gpus:2", "--attributes", "rack:r1")
    assert up.returncode == 0, up.stderr
    master = up.stdout.strip()

    status = json.loads(dike("status", "--format", "json").stdout)
    assert status["master"] == master
    assert [agent["hostname"] for agent in status["agents"]] == ["agent-0", "agent-1", "agent-2"]
    for agent in status["agents"]:
        assert agent["active"] is True
        assert agent["id"]
        assert agent["attributes"]["rack"] == "r1"
        resources = agent["resources"]
        assert (resources["cpus"], resources["mem"], resources["gpus"]) == (4, 4096, 2)
    assert len({agent["resources"]["ports"] for agent in status["agents"]}) == 3
    daemons = [psutil.Process(agent["pid"]) for agent in status["agents"]]
    assert len(alive(daemons)) == 3
    assert all("/daemon.py" in " ".join(process.cmdline()) for process in daemons)

    table = dike("status")
    assert table.returncode == 0
    assert master in table.stdout
    assert "agent-2" in table.stdout

    again = dike("up")
    assert again.returncode == 2
    assert master in again.stderr
    assert again.stderr.count("\n") == 1

    secret = Path(status["secret_file"]).read_text()
    assert status["secret_file"] in up.stderr
    framework = RawFramework(master, headers={"Authorization": basic("dike", secret)}, principal="dike")
    framework.launch("detached", {"value": "exec sleep 7104.5"})
    framework.wait_for("detached", "TASK_RUNNING")
    wait_until(lambda: with_argument("7104.5"), "the task runs")

    assert dike("down").returncode == 0
    assert not alive(daemons)
    assert not with_argument("7104.5")
    assert dike("status").returncode == 1
    down_again = dike("down")
    assert down_again.returncode == 0
    assert "No private Mesos was up" in down_again.stderr


def test_daemons_that_are_killed_come_back_until_one_is_killed_too_often(dike: Dike) -> None:
    assert dike("up", "--agents", "2", "--resources", "cpus:1;mem:256").returncode == 0

    def agents() -> list[dict[str, Any]]:
        answer = dike("status", "--format", "json")
        return list(json.loads(answer.stdout)["agents"]) if answer.returncode == 0 else []

    before = agents()
    supervisor = psutil.Process(before[0]["pid"]).parent()
    assert supervisor is not None
    kill_one_daemon(supervisor, "agent")

    def has_another_agent() -> bool:
        now = agents()
        pids = {agent["pid"] for agent in now} - {agent["pid"] for agent in before}
        return len(pids) == 1 and all(agent["active"] for agent in now)

    wait_until(has_another_agent, "another process as active agent")
    for _ in range(1 + MAX_RESTARTS):
        kill_one_daemon(supervisor, "master")
    headless = dike("status")
    assert headless.returncode == 1
    assert "does not answer" in headless.stderr
    assert dike("down").returncode == 0
    assert not alive([supervisor])


def test_a_cluster_whose_supervisor_was_killed_is_not_up(dike: Dike) -> None:
    assert dike("up", "--resources", "cpus:1;mem:256").returncode == 0
    agent = json.loads(dike("status", "--format", "json").stdout)["agents"][0]
    supervisor = psutil.Process(agent["pid"]).parent()
    assert supervisor is not None
    supervisor.kill()
    wait_until(lambda: not alive([supervisor]), "the supervisor has ended")
    assert dike("status").returncode == 1
    assert dike("up", "--resources", "cpus:1;mem:256").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--agents", "0"),
        ("--agents", "x"),
        ("--agents", "1000"),
        ("--resources", "cpus:-1"),
        ("--resources", "cpus"),
        ("--attributes", "rack"),
    ],
)
def test_bad_input_starts_nothing(dike: Dike, arguments: tuple[str, str]) -> None:
    answer = dike("up", *arguments)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("dike: ")
    assert answer.stderr.count("\n") == 1
    assert arguments[1] in answer.stderr
    assert dike("status").returncode == 1
